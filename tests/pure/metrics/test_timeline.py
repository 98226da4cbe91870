from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from onbeat.background_file import BackgroundFile
from onbeat.core.errors import ConfigError, SLOUnattainable
from onbeat.core.protocols import StepOutputs
from onbeat.core.request import FinishReason
from onbeat.core.slo import Fate
from onbeat.metrics.timeline import open_timeline
from onbeat.metrics.tracker import RequestTracker
from tests.pure.metrics.runs import output, request, run_one, stats, step


def events_of(data: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = orjson.loads(data)
    return events


def find(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "run.json"
    with open_timeline(path) as timeline:
        run_one(RequestTracker([timeline]))
    return events_of(path.read_bytes())


def test_steps_carry_their_batch(events: list[dict[str, Any]]) -> None:
    first, second, third = find(events, "step")
    assert (first["ts"], first["dur"]) == (11e6, 1e6)
    assert (first["args"]["tokens"], first["args"]["chunks"], first["args"]["decodes"]) == (6, 1, 0)
    assert (second["args"]["decodes"], third["args"]["preemptions"]) == (1, 1)


def test_a_request_is_queued_prefilled_and_decoded(events: list[dict[str, Any]]) -> None:
    (queued,), (prefill,), (begin, end) = (find(events, name) for name in ("queued", "prefill", "decode"))
    assert (queued["ts"], queued["dur"]) == (10e6, 1e6)
    assert (prefill["ts"], prefill["dur"], prefill["args"]["cached_tokens"]) == (11e6, 1e6, 4)
    assert (begin["ph"], begin["ts"], end["ph"], end["ts"]) == ("B", 12e6, "E", 13.5e6)
    assert end["args"] == {"request": "r", "output_tokens": 4, "finish": "length", "preemptions": 1}


def test_chunks_and_preemptions_are_marked_on_the_requests_track(events: list[dict[str, Any]]) -> None:
    (chunk,), (preempted,) = find(events, "chunk"), find(events, "preempted")
    assert (chunk["ph"], chunk["ts"], preempted["ts"]) == ("i", 11e6, 13.5e6)
    assert chunk["tid"] == preempted["tid"] == find(events, "queued")[0]["tid"]


def test_counters_show_queues_and_kv_use(events: list[dict[str, Any]]) -> None:
    assert find(events, "requests")[0]["args"] == {"running": 1, "waiting": 0}
    assert find(events, "kv blocks")[0]["args"] == {"used": 2}


def test_steps_carry_what_was_expected_of_them(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with open_timeline(path) as timeline:
        timeline.on_step(stats(4.0, 4.02, predicted_seconds=0.019, mbu=0.5, mfu=0.125))
    events = events_of(path.read_bytes())
    args = find(events, "step")[0]["args"]
    names = ("actual_ms", "predicted_ms", "mbu", "mfu")
    assert [args[name] for name in names] == [20.0, 19.0, 0.5, 0.125]
    (times,), (utilisation,) = find(events, "step time (ms)"), find(events, "utilisation")
    assert (times["ph"], times["ts"], times["args"]) == ("C", 4e6, {"actual": 20.0, "predicted": 19.0})
    assert utilisation["args"] == {"mbu": 0.5, "mfu": 0.125}


def test_nothing_is_made_up_where_nobody_predicts(events: list[dict[str, Any]]) -> None:
    assert not find(events, "step time (ms)")
    assert not {"predicted_ms", "mbu", "mfu"} & find(events, "step")[0]["args"].keys()


def test_tracks_are_used_again(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with open_timeline(path) as timeline:
        tracker = RequestTracker([timeline])
        for i in range(20):
            run_one(tracker, f"r{i}", arrival=10.0 * i)
        tracker.open(request("a", arrival=500.0))
        tracker.open(request("b", arrival=500.0))
        tracker.close("a", FinishReason.ABORT, 501.0)
    events = events_of(path.read_bytes())
    assert {event["tid"] for event in events if event["pid"] == 1} == {0, 1}
    (aborted,) = find(events, "no output")
    assert (aborted["dur"], aborted["args"]["finish"]) == (1e6, "abort")


def test_each_replica_has_a_process_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with open_timeline(path) as timeline:
        for number in (0, 2):
            timeline.on_step(stats(1.0, 2.0), number)
    events = events_of(path.read_bytes())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"requests", "engine r0", "engine r2"}
    steps = [event["pid"] for event in events if event["name"] == "step"]
    assert [names[pid] for pid in steps] == ["engine r0", "engine r2"]


def test_a_killed_run_is_one_bracket_away_from_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with open_timeline(path) as timeline:
        run_one(RequestTracker([timeline]))
    assert len(events_of(path.read_bytes().removesuffix(b"\n]\n") + b"]")) > 10


def test_a_full_disk_ends_the_timeline_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with open_timeline(Path("/dev/full")) as timeline:
        run_one(RequestTracker([timeline]))
    (warning,) = caplog.records
    assert "/dev/full" in warning.message


def test_a_simulation_waits_for_a_disk_that_falls_behind(tmp_path: Path) -> None:
    file = BackgroundFile(
        tmp_path / "run.json", "timeline", is_packed=False, waits=True, max_pending_bytes=10
    )
    for _ in range(2):
        file.write(b"more than ten bytes\n")
    file.close()
    assert (tmp_path / "run.json").read_bytes() == b"more than ten bytes\n" * 2


def test_a_file_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"timeline.*/no/run\.json"),
        open_timeline(tmp_path / "no" / "run.json"),
    ):
        pass


def test_steps_carry_their_budget_and_who_set_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with open_timeline(path) as timeline:
        timeline.on_step(stats(0.0, 1.0, predicted_seconds=0.9))
        timeline.on_step(
            stats(
                1.0,
                1.5,
                rows=[(10, 1), (0, 8)],
                predicted_seconds=0.4,
                budget_seconds=0.45,
                budget_request_id="urgent",
            )
        )
        timeline.on_step(stats(2.0, 2.5))
    events = events_of(path.read_bytes())
    free, bound, last = (event["args"] for event in find(events, "step"))
    assert (bound["budget_ms"], bound["budget_set_by"], bound["predicted_ms"]) == (450, "urgent", 400)
    assert bound["chunk_tokens"] == 8
    assert not {"budget_ms", "budget_set_by"} & (free.keys() | last.keys())
    assert [event["args"] for event in find(events, "step time (ms)")] == [
        {"actual": 1000, "predicted": 900},
        {"actual": 500, "predicted": 400, "budget": 450},
        {"actual": 500, "budget": 0},  # falls: nothing bound this step
    ]


def test_relegation_and_refusal_are_marked_on_the_requests_track(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with open_timeline(path) as timeline:
        tracker = RequestTracker([timeline])
        for name in ("slow", "refused", "expired"):
            tracker.open(request(name, arrival=1.0))
        tracker.refuse("refused", SLOUnattainable("no", predicted_ttft=3.5), 1.25)
        ended = output("expired", 0, finish_reason=FinishReason.EXPIRED, fate=Fate.EXPIRED)
        step(tracker, StepOutputs(2.0, [output("slow", fate=Fate.RELEGATED), ended]))
    events = events_of(path.read_bytes())
    (relegated,), (rejected,), (expired,) = (
        find(events, name) for name in ("relegated", "rejected", "expired")
    )
    assert (relegated["ph"], relegated["ts"], relegated["tid"]) == ("i", 2e6, 0)
    assert (rejected["ts"], rejected["tid"]) == (1.25e6, 1)
    assert rejected["args"] == {"reason": "slo_unattainable", "predicted_ttft_ms": 3500}
    assert (expired["tid"], expired["args"]) == (2, {"reason": "deadline_exceeded"})


def test_a_new_timeline_is_for_its_user_alone(tmp_path: Path):
    before = os.umask(0)
    try:
        with open_timeline(tmp_path / "run.json"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600


def test_a_server_does_not_wait_for_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open_timeline(path, is_live=True) as timeline:
        tracker = RequestTracker([timeline])
        for _ in range(200):  # far more than a pipe holds: a write would wait for ever
            run_one(tracker)
        os.set_blocking(reader, True)
        drained = threading.Thread(target=lambda: [None for _ in iter(partial(os.read, reader, 2**16), b"")])
        drained.start()
    drained.join()
    os.close(reader)


def test_a_live_timeline_is_whole(tmp_path: Path) -> None:
    with (
        open_timeline(tmp_path / "live.json", is_live=True) as live,
        open_timeline(tmp_path / "run.json") as other,
    ):
        run_one(RequestTracker([live, other]))
    content = (tmp_path / "live.json").read_bytes()
    assert content == (tmp_path / "run.json").read_bytes()
    assert events_of(content)
