"""Objectives, refusals and requests given up: they are recorded, and a replay finds them again."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError, Overloaded, SLOUnattainable
from onbeat.core.request import Request, SamplingParams, WholeRequest
from onbeat.core.slo import SLO, ShedMode
from onbeat.recording.log import AddCall, RecordedRefusal, ScheduleCall
from onbeat.recording.reader import Recording
from onbeat.simulator.replay import decisions as replay_module
from onbeat.simulator.replay.decisions import Replay
from onbeat.simulator.replay.history import read_history
from tests.fake_step_time import LinearStepTime
from tests.pure.recording import recorded as recorded_module
from tests.pure.recording.recorded import RecordedRun, start_run
from tests.pure.scheduler.driver import make_config
from tests.pure.simulator.shedding import PATIENCE, SheddingScheduler

SLO_REJECT = SLO(ttft=1.0, tbt=0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.gz"


@pytest.fixture
def shedding(monkeypatch):
    monkeypatch.setattr(recorded_module, "Scheduler", SheddingScheduler)
    monkeypatch.setattr(replay_module, "Scheduler", SheddingScheduler)


def make_request(name: str, arrival: float, **fields) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=range(40),
        sampling=SamplingParams(max_tokens=20),
        arrival=arrival,
        **fields,
    )


def shedding_run(path: Path) -> RecordedRun:
    """More than one at a time is too much: some are refused, some wait in vain."""
    run = start_run(path, make_config(max_num_seqs=1))
    for index in range(30):
        run.add(make_request(str(index), run.now, slo=SLO_REJECT, shed=ShedMode.REJECT))
        for _ in range(3 * (index % 3 == 0)):
            run.step()
    run.finish()
    return run


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def test_objectives_read_back(path: Path) -> None:
    run = start_run(path, make_config())
    run.add(make_request("plain", 1.0, shed=ShedMode.OFF))
    run.add(
        make_request(
            "rich",
            2.0,
            slo=SLO(ttft=0.5, e2e=9.0),
            slo_class="gold",
            weight=3.0,
            tenant="half \ud800",
            shed=ShedMode.RELEGATE,
        )
    )
    run.finish()
    plain, rich = (call for call in Recording(path).calls() if isinstance(call, AddCall))
    assert (plain.slo, plain.slo_class, plain.weight, plain.tenant) == (None, None, 1.0, None)
    assert plain.shed is ShedMode.OFF
    assert rich.slo == (0.5, None, 9.0)
    assert (rich.slo_class, rich.weight, rich.tenant) == ("gold", 3.0, "half \\ud800")
    assert rich.shed is ShedMode.RELEGATE
    assert Replay(Recording(path)).run().is_identical
    written = lines_of(path)[1]
    assert not written.keys() & {"slo", "slo_class", "tenant", "shed", "refused"}
    records = [request.record for request in read_history(Recording(path)).requests]
    assert [(record.slo, record.request_class, record.tenant) for record in records] == [
        (None, None, None),
        (SLO(ttft=0.5, e2e=9.0), "gold", "half \\ud800"),
    ]


def test_a_full_queue_is_recorded_and_found_again(path: Path) -> None:
    run = start_run(path, make_config(max_num_seqs=1, max_num_queued_reqs=1))
    for index in range(8):
        run.add(make_request(str(index), run.now))
        run.step()
    run.finish()
    assert all(isinstance(error, Overloaded) for error in run.refused.values())
    adds = [call for call in Recording(path).calls() if isinstance(call, AddCall)]
    assert {call.request_id for call in adds if call.refused} == run.refused.keys() != set()
    assert {call.refused for call in adds} == {None, RecordedRefusal("server_overloaded")}
    result = Replay(Recording(path)).run()
    assert result.is_identical
    assert (result.num_requests, result.num_rejected) == (8, len(run.refused))


def test_choices_that_the_queue_takes_together_are_found_again(path: Path) -> None:
    run = start_run(path, make_config(max_num_seqs=2, max_num_queued_reqs=1))
    for name in ("half \ud800", "b"):
        whole = WholeRequest(name, 3, 120)
        for index in range(3):
            run.add(make_request(f"{name}-{index}", run.now, whole=whole))
    run.finish()
    adds = [call for call in Recording(path).calls() if isinstance(call, AddCall)]
    assert [call.refused is None for call in adds] == [True] * 3 + [False] * 3
    assert adds[0].whole == WholeRequest("half \\ud800", 3, 120)
    assert Replay(Recording(path)).run().is_identical


def test_a_prompt_that_is_scored_takes_nothing_from_the_cache_again(path: Path) -> None:
    run = start_run(path, make_config())
    for index, num in enumerate((None, 3, None)):
        run.add(make_request(str(index), run.now, num_prompt_logprobs=num))
        while run.scheduler.num_unfinished:
            run.step()
    run.finish()
    adds = [call for call in Recording(path).calls() if isinstance(call, AddCall)]
    assert [call.is_scored for call in adds] == [False, True, False]
    assert Replay(Recording(path)).run().is_identical
    history = read_history(Recording(path))
    assert [request.record.num_cached_tokens > 0 for request in history.requests] == [False, False, True]
    assert sum(step.shape.num_lm_head_rows for step in history.steps) == 20 + (40 + 19) + 20


def test_a_queue_that_is_too_long_is_recorded_and_found_again(path: Path) -> None:
    from tests.pure.recording.test_identity import step_time_model

    config = make_config(policy="slo", max_num_seqs=2, max_queue_seconds=0.1)
    run = start_run(path, config, model=step_time_model())
    for index in range(80):
        late = index % 2 == 1
        run.add(
            make_request(
                str(index),
                run.now,
                slo=SLO(ttft=1.2) if late else None,
                shed=ShedMode.RELEGATE,
            )
        )
        if index % 4 == 0:
            run.step()
    run.finish()
    assert all(isinstance(error, Overloaded) and error.retry_after for error in run.refused.values())
    assert {reason.value for reason in run.finished.values()} > {"expired"}
    result = Replay(Recording(path), step_time_model()).run()
    assert result.is_identical, result.difference
    assert result.num_rejected == len(run.refused) > 0
    assert result.num_expired > 0


@pytest.mark.usefixtures("shedding")
class TestShedding:
    def test_refusals_and_expiries_are_found_again(self, path: Path) -> None:
        run = shedding_run(path)
        recording = Recording(path)
        adds = [call for call in recording.calls() if isinstance(call, AddCall)]
        refused = {call.request_id: call.refused for call in adds if call.refused}
        assert refused.keys() == run.refused.keys() != set()
        assert set(refused.values()) == {RecordedRefusal("slo_unattainable", float(PATIENCE), 0.0)}
        expired = [
            adds[number].request_id
            for call in recording.calls()
            if isinstance(call, ScheduleCall)
            for number in call.expired
        ]
        assert expired == [name for name, reason in run.finished.items() if reason == "expired"] != []
        result = Replay(recording).run()
        assert result.is_identical
        assert (result.num_rejected, result.num_expired) == (len(refused), len(expired))
        assert len(run.writer._open) <= 1

    def test_each_has_a_record_of_its_own(self, path: Path) -> None:
        run = shedding_run(path)
        requests = read_history(Recording(path)).requests
        assert len(requests) == 30
        for request in requests:
            record = request.record
            error = run.refused.get(record.request_id)
            assert record.is_rejected == (error is not None)
            if isinstance(error, SLOUnattainable):
                assert record.finish_reason == "rejected"
                assert record.predicted_ttft == record.predicted_wait == error.predicted_ttft
                assert record.scheduled is None
            else:
                assert record.finish_reason == run.finished[record.request_id]
            assert record.end >= record.arrival

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            (lambda line: line.pop("refused"), "refusal of"),
            (lambda line: line.__setitem__("refused", ["slo_unattainable", 2.5, 0.0]), "refusal of"),
            (lambda line: line.__setitem__("refused", ["server_overloaded"]), "refusal of"),
        ],
    )
    def test_another_refusal_is_a_difference(self, path: Path, change, what: str) -> None:
        shedding_run(path)
        lines = lines_of(path)
        change(next(line for line in lines if "refused" in line))
        write_lines(path, lines)
        difference = Replay(Recording(path)).run().difference
        assert difference is not None
        assert difference.what.startswith(what)

    def test_a_refusal_of_a_request_that_was_taken_is_a_difference(self, path: Path) -> None:
        shedding_run(path)
        lines = lines_of(path)
        next(line for line in lines if line.get("call") == "add")["refused"] = ["slo_unattainable", 3.0, 0.0]
        write_lines(path, lines)
        difference = Replay(Recording(path)).run().difference
        assert difference is not None
        assert (difference.call_index, difference.replayed) == (0, "nothing")

    def test_another_expiry_is_a_difference(self, path: Path) -> None:
        shedding_run(path)
        lines = lines_of(path)
        del next(line for line in lines if "expired" in line)["expired"]
        write_lines(path, lines)
        difference = Replay(Recording(path)).run().difference
        assert difference is not None
        assert difference.what == "expired requests"


class TestVersions:
    def test_files_of_version_1_are_read(self, path: Path) -> None:
        """They lack what later versions added: fields of the configuration too."""
        run = start_run(path, make_config())
        for index in range(5):
            run.add(make_request(str(index), run.now))
            run.step()
        run.finish()
        lines = lines_of(path)
        assert lines[0]["schema_version"] == 13
        lines[0]["schema_version"] = 1
        later = (
            *("slo_mode", "shed_order", "max_num_queued_reqs", "max_num_queued_tokens"),
            *("max_queue_seconds", "speculation"),
        )
        for name in later:
            del lines[0]["scheduler"][name]
        write_lines(path, lines)
        assert Replay(Recording(path)).run().is_identical

    def test_in_files_of_version_5_a_stream_that_moved_may_have_late_tokens_as_a_new_one(
        self, path: Path
    ) -> None:
        run = start_run(path, make_config(policy="slo"), model=LinearStepTime())
        run.add(make_request("a", run.now, slo=SLO(tbt=0.5)))
        for _ in range(5):
            run.step()
        run.scheduler.handover.detach("a")
        run.writer.handover("detach", "a", run.tick())
        run.take_detached()
        run.adopt("one", "a", run.tick())
        run.has_handovers = True
        run.finish()
        assert run.num_adopted == 1
        lines = lines_of(path)
        lines[0]["schema_version"] = 5
        adoption = next(line for line in lines if "adoption" in line)["adoption"]
        assert adoption[-1].pop() == 0, "late tokens that it may have"
        write_lines(path, lines)
        adds = [call for call in Recording(path).calls() if isinstance(call, AddCall)]
        (adopted,) = [call.adoption for call in adds if call.adoption is not None]
        assert adopted.deadlines is not None
        assert adopted.deadlines.num_late_allowed is None
        assert Replay(Recording(path), LinearStepTime()).run().is_identical

    @pytest.mark.parametrize(
        "changes", [{"num_external_tokens": 7}, {"keeps_kv": True}, {"call": "handover", "verb": "fetch"}]
    )
    def test_kv_that_came_after_the_admission_is_not_replayed(
        self, path: Path, changes: dict[str, object]
    ) -> None:
        """Older records could have it."""
        run = start_run(path, make_config())
        run.add(make_request("a", run.now))
        run.finish()
        lines = lines_of(path)
        next(line for line in lines if line.get("call") == "add").update(changes)
        write_lines(path, lines)
        with pytest.raises(ConfigError, match=r"2\b.*'\d"):
            Recording(path)

    def test_files_of_another_version_are_not(self, path: Path) -> None:
        start_run(path, make_config()).finish()
        lines = lines_of(path)
        lines[0]["schema_version"] = 14
        write_lines(path, lines)
        with pytest.raises(
            ConfigError,
            match=r"version 14.*1 to 13",
        ):
            Recording(path)


def test_with_a_step_time_model_every_idle_plan_is_recorded(path: Path) -> None:
    """A policy that plans by time may care when it is asked."""
    from tests.pure.recording.test_identity import step_time_model

    run = start_run(path, make_config(), model=step_time_model())
    for _ in range(7):
        run.step()
    run.finish()
    assert Recording(path).num_calls == 7


def test_a_replay_leaves_behind_whom_the_record_did(path: Path) -> None:
    """A long prompt waits, and short ones come that are in time only without it."""
    model = LinearStepTime(fixed=0.02, per_token=5e-3)
    config = make_config("slo", shed_order="longest-wait", max_num_batched_tokens=256)
    run = start_run(path, config, model=model)
    for name, num_tokens in (("long", 200), *((f"short {index}", 40) for index in range(4))):
        request = make_request(name, run.now, slo=SLO(ttft=1.7))
        run.add(replace(request, prompt_token_ids=range(num_tokens)))
    run.finish()
    assert Replay(Recording(path), model).run().is_identical
    lines = lines_of(path)
    assert lines[0]["scheduler"].pop("shed_order") == "longest-wait"
    write_lines(path, lines)  # as of a version without a choice
    assert not Replay(Recording(path), model).run().is_identical
