"""A frame of `onbeat top`, from a state of a server as it was stored."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.step_stats import DraftStats
from onbeat.report.live_frame import LONG_GAPS, State, StateHistory, live_frame
from tests.pure.metrics.fake_server import FakeServer

STORED = orjson.loads((Path(__file__).parents[2] / "data" / "top_state.json").read_bytes())


def draw(
    state: State = STORED,
    *,
    width: int = 80,
    console: dict[str, Any] | None = None,
    note: str = "",
) -> str:
    history = StateHistory()
    history.add(state)
    file = StringIO()
    Console(file=file, width=width, highlight=False, **(console or {})).print(
        live_frame(history, url="http://localhost:8000", note=note)
    )
    return file.getvalue()


def lines(state: State = STORED, **options: Any) -> list[str]:
    return [line.rstrip() for line in draw(state, **options).splitlines()]


def test_a_frame_shows_queues_classes_steps_and_decisions() -> None:
    assert lines() == [
        "onbeat 0.1.0  smollm2-135m-instruct  slo stream",
        "http://localhost:8000  up 68 s",
        "─" * 80,
        "requests     9 running   9 waiting   2 best effort",
        "load         0.56 req/s in   0.29 req/s out   420 ms predicted wait",
        "tokens       48.9 prompt/s   10.1 output/s   0 % of prompts cached",
        "KV cache     15.4 % used   112 of 728 blocks",
        "",
        "class         req/s  good/s  attained  TTFT P50         TTFT P99         TBT P99",
        "─" * 80,
        "interactive    0.16       0       0 %    650 ms  14,675 > 500 ms   1,515 > 50 ms",
        "standard       0.10    0.01    14.3 %    1.75 s       2.48 > 2 s  1,070 > 100 ms",
        "batch          0.03    0.03     100 %       4 s      7.96 ≤ 10 s  3,894 > 500 ms",
        LONG_GAPS,
        "",
        "step         161 ms actual   109 ms predicted   299 ms budget P50   4.49 /s",
        "batch        2.18 decodes   11.4 chunk tokens   1.95 ms planner P99",
        "plan         27.8 % prediction error P50   74.2 % P99   16.1 % over budget",
        "decisions    2 refused   3 relegated   1 missed   0 preempted",
        "refused for  2 slo_unattainable",
        "─" * 80,
        "Since the server started.",
    ]


def test_jobs_fit_the_width() -> None:
    jobs = {
        "jobs_open": 1,
        "jobs_total": dict.fromkeys(("kept", "late", "abandoned", "refused"), 1234),
    }
    shown = lines({**STORED, **jobs})
    assert shown[4] == "jobs         1 open   1,234 abandoned   1,234 kept   1,234 late   1,234 refused"


def test_gaps_over_the_objective_beside_full_attainment_are_explained() -> None:
    gaps = FakeServer()
    gaps.serve("a", 0.0, [0.1, 0.12, 0.3])
    state = gaps.state(1.0)
    assert LONG_GAPS in lines(state)
    assert LONG_GAPS not in lines({**state, "server_info": {**state["server_info"], "slo_mode": "gap"}})
    even = FakeServer()
    even.serve("a", 0.0, [0.1, 0.12, 0.14])
    assert LONG_GAPS not in lines(even.state(1.0))


def test_a_note_stands_at_the_foot() -> None:
    assert lines(note="Out of date since noon")[-1] == "Out of date since noon"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_nothing_is_wider_than_the_terminal_or_cut_off(width: int) -> None:
    drawn = lines(width=width)
    assert max(map(len, drawn)) == width
    assert not [line for line in drawn if "…" in line]


def test_a_narrow_terminal_cuts_lines_off() -> None:
    assert max(map(len, lines(width=50))) <= 50


def test_a_server_without_requests_or_objectives_has_a_frame() -> None:
    drawn = lines(FakeServer().state(0.0))
    assert "no request with objectives so far" in drawn
    assert "requests     0 running   0 waiting   0 best effort" in drawn
    assert "step         0 /s" in drawn
    assert not [line for line in drawn if line.startswith(("batch", "plan", "refused for"))]


def test_a_full_queue_is_a_reason_to_refuse() -> None:
    server = FakeServer()
    for name in ("a", "b", "c"):
        server.open(name, 0.0, slo=None)
    for name in ("a", "b"):
        server.tracker.refuse(name, Overloaded("the queue is full", code="server_overloaded"), 0.1)
    server.tracker.refuse("c", SLOUnattainable("too late", predicted_ttft=5.0), 0.1)
    drawn = lines(server.state(1.0))
    assert "decisions    3 refused   0 relegated   0 missed   0 preempted" in drawn
    assert "refused for  1 slo_unattainable   2 queue_full" in drawn


def test_the_worst_decile_has_a_line_below_the_classes() -> None:
    server = FakeServer()
    for place in range(19):
        server.serve(f"short {place}", 0.0, [0.5], num_prompt_tokens=7_000)
    server.serve("long", 0.0, [30.0], num_prompt_tokens=138_072)
    drawn = lines(server.state(59.0))
    at = drawn.index("worst decile 50 % good, 7,000 to 138,072 tokens   30 s longest wait of all")
    assert drawn[at - 1].startswith("chat")
    assert drawn[at + 2].startswith("step")
    assert not [line for line in lines(server.state(80.0)) if line.startswith("worst decile")]


def test_colour_adds_nothing_and_can_be_left_out() -> None:
    terminal = {"force_terminal": True, "color_system": "truecolor"}
    assert "\x1b[1;31m" in draw(console=terminal)  # attainment of 0 % is red
    without = draw(console={**terminal, "no_color": True})
    assert not [code for code in ("\x1b[31m", "[1;31m", "[33m", "[36m", "38;5", "38;2") if code in without]


def test_drafts_have_lines_of_their_own() -> None:
    server = FakeServer(proposer="ngram")
    assert "drafts       ngram proposes" in lines(server.state(0.0))
    steps = DraftStats([1, 0, 0, 1], [1, 1, 1], [1, 1, 0], num_tokens=4, expected_tokens=3.5)
    server.step(0.0, 0.1, drafts=steps, predicted_seconds=0.1)
    drawn = lines(server.state(1.0))
    at = drawn.index("drafts       ngram proposes   66.7 % accepted   2 tokens a row   40 tokens/s")
    assert drawn[at + 1].startswith("decisions")


def test_grammars_have_a_line_once_a_request_had_one() -> None:
    server = FakeServer()
    server.step(0.0, 0.1)
    assert not [line for line in lines(server.state(1.0)) if line.startswith("grammars")]
    work = {"num_guided_tokens": 8, "num_redrawn_tokens": 2, "guide_seconds": 0.003}
    server.step(0.1, 0.2, **work)
    drawn = lines(server.state(2.0))
    assert "grammars     25 % drawn again   1.50 % of the step's time" in drawn


def test_requests_of_no_class_are_called_so() -> None:
    server = FakeServer()
    server.serve("own terms", 0.0, [0.5], slo_class=None)
    drawn = lines(server.state(1.0))
    assert any(line.startswith("no class ") for line in drawn)
    assert not any("unnamed" in line for line in drawn)


def test_a_single_replica_is_shown_where_there_can_be_more() -> None:
    fleet = {
        "fleet_replicas": {"starting": 1, "ready": 1},
        "fleet_requests_waiting": 0,
        "replica_lives": {"r0": 1},
        "replica_state": {"r0": {"starting": 0, "ready": 1}},
    }
    scaling = {
        "fleet_replicas_wanted": 2,
        "fleet_replicas_min": 1,
        "fleet_replicas_max": 4,
        "fleet_load_share": 0.9,
    }
    assert not any(line.startswith("fleet") for line in lines({**STORED, **fleet}))
    drawn = lines({**STORED, **fleet, **scaling}, width=140)
    assert "fleet        1 starting   1 ready   0 waiting for one   0 moved" in drawn
    assert "size         2 wanted of 1 to 4   90 % load" in drawn
    assert any(line.startswith("r0") and " ready " in line for line in drawn)
