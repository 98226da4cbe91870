"""What the comparison with peers decides without a server: turns, ratios, commands, the best setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serve.peers.entries import Entry, EntryError, make_launch, parse_entry, read_entries
from benchmarks.serve.peers.machine import CPUTime, parse_status
from benchmarks.serve.peers.order import order_of_turns
from benchmarks.serve.peers.pairs import by_round, ratio, spread
from benchmarks.serve.peers.scores import best_server
from benchmarks.serve.peers.workload import LONG_PROMPT_TOKENS, make_cells
from onbeat.workload.prompts import PromptWriter, estimated_pool

SERVERS = Path(__file__).parents[3] / "benchmarks" / "serve" / "peers" / "servers.yaml"


def run_of(server: str, index: int, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    run = {"server": server, "round": index, "load": "8", "output_throughput": tokens_per_s, "short": None}
    return run | more


class TestTurns:
    def test_equal_loads_follow_each_other_and_neither_server_is_always_first(self) -> None:
        turns = order_of_turns(["a", "b"], [1, 8], 0, changes_with_load=True)

        assert turns == [("a", [1]), ("b", [1]), ("b", [8]), ("a", [8])]

    def test_servers_that_start_anew_get_all_loads_in_one_turn(self) -> None:
        rounds = [order_of_turns(["a", "b"], [1, 8], index, changes_with_load=False) for index in range(2)]

        assert rounds == [[("a", [1, 8]), ("b", [1, 8])], [("b", [1, 8]), ("a", [1, 8])]]

    @given(
        st.integers(1, 4),
        st.lists(st.integers(), max_size=5, unique=True),
        st.integers(0, 9),
        st.booleans(),
    )
    def test_every_server_gets_every_load_once(
        self, num_servers: int, loads: list[int], index: int, changes_with_load: bool
    ) -> None:
        names = [f"server {number}" for number in range(num_servers)]

        turns = order_of_turns(names, loads, index, changes_with_load=changes_with_load)

        given_out = [(name, load) for name, own in turns for load in own]
        assert sorted(given_out) == sorted((name, load) for name in names for load in loads)


class TestRatios:
    def test_they_are_taken_within_a_round(self) -> None:
        # The machine was twice as fast in the second round: the ratio stays.
        runs = [run_of("a", 0, 200), run_of("b", 0, 100), run_of("a", 1, 400), run_of("b", 1, 200)]

        assert ratio(runs, "a", "b", "8", "output_throughput") == (2.0, 2.0, 2.0)

    def test_rounds_that_lack_one_side_or_have_no_output_are_left_out(self) -> None:
        runs = [run_of("a", 0, 200), run_of("a", 1, 300), run_of("b", 1, 100), run_of("a", 2, 1)]
        runs.append(run_of("b", 2, 0))

        assert ratio(runs, "a", "b", "8", "output_throughput") == (3.0, 3.0, 3.0)

    def test_no_round_with_both_gives_none(self) -> None:
        assert ratio([run_of("a", 0, 1)], "a", "b", "8", "output_throughput") is None

    def test_values_of_short_prompts_are_found_by_their_path(self) -> None:
        runs = [
            run_of("a", 0, 1, short={"attainment": 0.5}),
            run_of("a", 1, 1, short={"attainment": None}),
            run_of("a", 2, 1),
        ]

        assert by_round(runs, "a", "8", "short.attainment") == {0: 0.5}

    def test_a_spread_shows_median_least_and_most(self) -> None:
        found = spread([3.0, 1.0, 2.0])

        assert found is not None
        assert found.text(1) == "2.0 (1.0 to 3.0)"


class TestBestSetting:
    def test_the_share_of_good_requests_decides(self) -> None:
        runs = [run_of("128", 0, 100, attainment=0.9), run_of("512", 0, 300, attainment=0.5)]

        assert best_server(runs) == "128"

    def test_output_decides_between_equals(self) -> None:
        runs = [run_of("128", 0, 100, attainment=0.9), run_of("512", 0, 300, attainment=0.9)]

        assert best_server(runs) == "512"

    def test_beside_long_prompts_the_short_ones_count(self) -> None:
        runs = [
            run_of("128", 0, 100, attainment=0.2, short={"attainment": 0.9}),
            run_of("512", 0, 100, attainment=0.8, short={"attainment": 0.6}),
        ]

        assert best_server(runs) == "128"


class TestEntries:
    def test_every_server_of_the_file_can_be_read(self) -> None:
        names = list(yaml.safe_load(SERVERS.read_text()))

        entries = read_entries(SERVERS, names)

        assert [entry.name for entry in entries] == names
        assert all("{port}" in entry.command for entry in entries)

    def test_an_unknown_server_is_named_with_those_that_exist(self) -> None:
        with pytest.raises(EntryError, match="'sglang'"):
            read_entries(SERVERS, ["sglang"])

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"about": "x"}, "key 'command'"),
            ({"about": "x", "command": "y", "port": 1}, "key 'port'"),
        ],
    )
    def test_a_wrong_entry_is_refused(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(EntryError, match=message):
            parse_entry("x", values)

    def test_places_and_variables_are_filled_in(self) -> None:
        entry = Entry(
            name="x",
            about="",
            command="run ${MODEL} --port {port} -t {threads} '{\"json\": 1}'",
            environment={"CORES": "0-{last_core}"},
        )

        launch = make_launch(entry, port=81, num_cores=4, variables={"MODEL": "/m"})

        assert launch.command == "run /m --port 81 -t 4 '{\"json\": 1}'"
        assert launch.environment == {"CORES": "0-3"}
        assert launch.url == "http://127.0.0.1:81"

    def test_a_variable_that_is_not_set_is_named(self) -> None:
        entry = Entry(name="x", about="", command="run ${MODEL}")

        with pytest.raises(EntryError, match="variable MODEL"):
            make_launch(entry, port=1, num_cores=1, variables={})

    @pytest.mark.parametrize(("variables", "program"), [({}, "server"), ({"PROGRAM": "/x"}, "/x")])
    def test_a_variable_may_have_a_default(self, variables: dict[str, str], program: str) -> None:
        entry = Entry(name="x", about="", command="${PROGRAM:-server} run")

        assert make_launch(entry, port=1, num_cores=1, variables=variables).command == f"{program} run"

    def test_a_variant_says_its_value_and_what_is_saved_keeps_variables(self) -> None:
        variant = Entry(name="x", about="", command="run ${MODEL}").with_flag("--size", "128")

        assert variant.name == "x 128"
        assert variant.as_json()["command"] == "run ${MODEL} --size 128"


class TestWorkload:
    def test_lengths_follow_the_seed_and_words_the_salt(self) -> None:
        (cell,) = make_cells([8], per_slot=10, interference=None)
        pool = estimated_pool()

        first, second = (cell.offer(PromptWriter(pool, salt), seed=1) for salt in ("a", "b"))

        assert first.num_prompts == 80
        assert first.load.num_prompt_tokens.tolist() == second.load.num_prompt_tokens.tolist()
        assert first.load.num_output_tokens.tolist() == second.load.num_output_tokens.tolist()
        assert first.prompts(0) != second.prompts(0)

    def test_one_prompt_in_eight_of_the_last_load_is_long(self) -> None:
        *_, cell = make_cells([1], per_slot=10, interference=8)

        offer = cell.offer(PromptWriter(estimated_pool(), ""), seed=1)

        lengths = offer.load.num_prompt_tokens.tolist()
        assert lengths.count(LONG_PROMPT_TOKENS) == 10
        assert max(lengths) == LONG_PROMPT_TOKENS

    def test_requests_fit_in_the_context_that_servers_are_started_with(self) -> None:
        *_, cell = make_cells([32], per_slot=100, interference=32)

        offer = cell.offer(PromptWriter(estimated_pool(), ""), seed=1)

        assert (offer.load.num_prompt_tokens + offer.load.num_output_tokens).max() < 2048


class TestMachine:
    def test_a_process_may_be_called_anything(self) -> None:
        line = "17 (a (b) c) S 4 17 9 0 -1 4194304 100 0 1 0 250 50 7 7 20 0 1"

        status = parse_status(line)

        assert (status.pid, status.parent, status.session, status.ticks) == (17, 4, 9, 300)

    def test_what_neither_side_used_was_used_by_others(self) -> None:
        start = CPUTime(total=100.0, busy=50.0, server=10.0, client=5.0)
        end = CPUTime(total=120.0, busy=65.0, server=20.0, client=7.0)

        shares = end.shares_since(start)

        assert shares == pytest.approx({"server": 0.5, "client": 0.1, "others": 0.15})
