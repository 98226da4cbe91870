"""What the live study of speculation decides without a server: tasks, ratios, intervals, verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.speculation_live.tasks import DATA, TASK_SETS, Task, copied_share, draw_tasks, read_tasks
from benchmarks.speculation_live.templates import candidates, cut_passages, misspelt, numbered, read_passages
from benchmarks.speculation_live.verdict import (
    ADAPTIVE,
    OFF,
    Cell,
    Interval,
    best_other,
    cells_of,
    is_settled,
    median_interval,
    paired_ratios,
    undisturbed,
)

CELL = Cell("editing", 8)


def run_of(server: str, index: int, tokens_per_s: float, tpot_ms: float | None = 10.0) -> dict[str, Any]:
    return {
        "server": server,
        "task_set": "editing",
        "concurrency": 8,
        "round": index,
        "output_throughput": tokens_per_s,
        "mean_tpot_ms": tpot_ms,
    }


class TestTasks:
    @given(st.integers(1, 30), st.integers(0, 2**32), st.integers(0, 9))
    def test_a_draw_follows_from_its_key_and_repeats_none_before_all_came(
        self, num_tasks: int, seed: int, index: int
    ) -> None:
        tasks = [Task(f"task {number}", 8) for number in range(10)]

        drawn = draw_tasks(tasks, num_tasks, seed, index)

        assert drawn == draw_tasks(tasks, num_tasks, seed, index)
        assert len(drawn) == num_tasks
        assert len(set(drawn[:10])) == min(num_tasks, 10)

    def test_other_rounds_draw_other_tasks(self) -> None:
        tasks = [Task(f"task {number}", 8) for number in range(80)]

        assert draw_tasks(tasks, 8, 1, 0) != draw_tasks(tasks, 8, 1, 1)

    @pytest.mark.parametrize(
        ("prompt", "output", "share"),
        [
            ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 1.0),
            ([1, 2, 3, 4, 5], [2, 3, 4, 5, 9], 0.5),
            ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], 0.0),
            ([1, 2, 3, 4, 5], [1, 2, 3], 0.0),
        ],
    )
    def test_what_is_copied_counts_by_runs_of_four_tokens(
        self, prompt: list[int], output: list[int], share: float
    ) -> None:
        assert copied_share(prompt, output) == share


class TestTaskFiles:
    @pytest.mark.parametrize("task_set", TASK_SETS)
    def test_each_holds_60_to_100_different_tasks(self, task_set: str) -> None:
        tasks = read_tasks(DATA / TASK_SETS[task_set])

        assert 60 <= len(tasks) <= 100
        assert len({task.prompt for task in tasks}) == len(tasks)
        assert all(60 <= task.max_tokens <= 200 for task in tasks)

    def test_editing_tasks_are_what_the_templates_make_of_the_texts(self) -> None:
        made = {candidate.prompt for candidate in candidates()}

        assert {task.prompt for task in read_tasks(DATA / TASK_SETS["editing"])} <= made


class TestTemplates:
    def test_misspelling_exchanges_letters_in_some_words_and_keeps_the_rest(self) -> None:
        text = "A gentleman walked slowly through the gardens behind the castle, whistling cheerfully."

        wrong = misspelt(text)

        changed = [(old, new) for old, new in zip(text.split(), wrong.split(), strict=True) if old != new]
        assert changed
        assert all(sorted(old) == sorted(new) and old[:2] == new[:2] for old, new in changed)

    def test_sentences_are_numbered(self) -> None:
        assert numbered("It rained. Why not; who cares? Nobody!") == (
            "1. It rained.\n2. Why not;\n3. who cares?\n4. Nobody!"
        )

    def test_passages_are_cut_between_paragraphs(self, tmp_path: Path) -> None:
        novel = tmp_path / "novel.txt"
        novel.write_text("one two\nthree\n\nfour five\n\nsix seven eight nine\n\nten\n")

        assert list(cut_passages(novel, 4)) == ["one two three four five", "six seven eight nine"]

    def test_every_passage_names_its_work_and_year(self) -> None:
        assert all(work[-4:].isdigit() and int(work[-4:]) < 1900 for work, _ in read_passages())


class TestRatios:
    def test_they_are_taken_within_a_round_and_above_1_where_adaptive_is_better(self) -> None:
        # The machine was twice as fast in the second round: the ratios stay.
        runs = [run_of("off", 0, 100, 20.0), run_of("adaptive", 0, 150, 10.0)]
        runs += [run_of("off", 1, 200, 10.0), run_of("adaptive", 1, 300, 5.0)]

        assert paired_ratios(runs, "off", CELL, "output_throughput") == [1.5, 1.5]
        assert paired_ratios(runs, "off", CELL, "mean_tpot_ms") == [2.0, 2.0]

    def test_rounds_that_lack_one_side_or_have_no_value_are_left_out(self) -> None:
        runs = [run_of("adaptive", 0, 100), run_of("adaptive", 1, 100, 5.0), run_of("off", 1, 100, 10.0)]
        runs += [run_of("adaptive", 2, 100), run_of("off", 2, 100, None)]

        assert paired_ratios(runs, "off", CELL, "mean_tpot_ms") == [2.0]

    def test_a_round_that_others_disturbed_does_not_count_for_any_server(self) -> None:
        runs = [
            run_of(server, index, 100.0) | {"cpu": {"others": 0.3 if (server, index) == (OFF, 1) else 0.02}}
            for index in range(3)
            for server in (OFF, ADAPTIVE)
        ]
        left = undisturbed(runs)
        assert [(run["server"], run["round"]) for run in left] == [
            (OFF, 0),
            (ADAPTIVE, 0),
            (OFF, 2),
            (ADAPTIVE, 2),
        ]

    @pytest.mark.parametrize(
        ("num_rounds", "spread", "settled"), [(4, 0.0, False), (5, 0.01, True), (5, 0.2, False)]
    )
    def test_a_load_is_settled_by_rounds_and_width_alone(
        self, num_rounds: int, spread: float, settled: bool
    ) -> None:
        runs = [run_of(OFF, index, 100.0) for index in range(num_rounds)]
        for index in range(num_rounds):
            factor = 0.5 * (1.0 + spread * (-1) ** index)  # far worse, and yet settled
            runs.append(run_of(ADAPTIVE, index, 100.0 * factor, 10.0 / factor))
        assert is_settled(runs, CELL) is settled

    def test_other_loads_do_not_count(self) -> None:
        runs = [run_of("off", 0, 100), run_of("adaptive", 0, 100)]

        assert paired_ratios(runs, "off", Cell("chat", 8), "output_throughput") == []
        assert cells_of(runs) == [CELL]

    def test_the_best_other_server_is_so_in_the_median_and_never_the_adaptive_one(self) -> None:
        runs = [run_of("adaptive", index, 900.0, 1.0) for index in range(3)]
        runs += [
            run_of("off", index, rate, tpot)
            for index, (rate, tpot) in enumerate([(100, 9), (100, 9), (500, 1)])
        ]
        runs += [run_of("fixed 1", index, 200, 10.0) for index in range(3)]

        assert best_other(runs, CELL, "output_throughput") == "fixed 1"
        assert best_other(runs, CELL, "mean_tpot_ms") == "off"


class TestIntervals:
    @given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
    def test_they_hold_the_median_and_lie_within_the_values(self, values: list[float]) -> None:
        found = median_interval(values)

        assert min(values) <= found.low <= found.median <= found.high <= max(values)

    def test_one_odd_round_widens_an_interval_and_leaves_the_median(self) -> None:
        found = median_interval([1.0, 1.0, 1.0, 1.0, 0.5])

        assert found.median == 1.0
        assert found.low == 0.5
        assert found.high == 1.0

    @pytest.mark.parametrize(
        ("interval", "keeps_up"),
        [
            (Interval(0.96, 0.90, 0.99), True),
            (Interval(0.94, 0.90, 1.10), False),
            (Interval(0.96, 0.95, 0.97), False),
        ],
    )
    def test_a_server_keeps_up_if_the_interval_and_the_median_reach_far_enough(
        self, interval: Interval, keeps_up: bool
    ) -> None:
        assert interval.keeps_up is keeps_up
