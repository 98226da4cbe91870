"""A replay finds what differs; a simulation of a record is compared with what was recorded."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.record import RequestRecord
from onbeat.perfmodel.predictor import OnlineCorrection, Predictor
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.recording.reader import Recording
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.scheduler_config import SpeculationConfig
from onbeat.simulator.replay import forecast as replay_forecast
from onbeat.simulator.replay.decisions import Replay, scheduler_config
from onbeat.simulator.replay.forecast import (
    RecordedStepTimes,
    forecast_with_model,
    forecast_with_recorded_times,
    step_cycles,
)
from onbeat.simulator.replay.history import (
    RecordedRequest,
    RecordedStep,
    RunHistory,
    measured_acceptance,
    read_acceptance,
    read_history,
)
from onbeat.simulator.simulate import simulate
from onbeat.simulator.speculation import Acceptance, KnownDrafts
from onbeat.workload.slo_classes import check_classes
from tests.pure.recording.recorded import RecordedRun, make_header, start_run
from tests.pure.scheduler.driver import make_config, make_request
from tests.pure.simulator.loads import ShapeTime


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.gz"


def run_some(path: Path, *, model: StepTimeModel | None = None) -> RecordedRun:
    run = start_run(path, make_config(num_blocks=24), model=model)
    for index in range(8):
        run.add(make_request(f"r{index}", 30 + 7 * index, 40, arrival=run.now))
        for _ in range(3):
            run.step()
    run.finish()
    return run


def tamper(path: Path, call: str, change) -> None:
    """Change one line of a kind in the middle of a record."""
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    chosen = [line for line in lines if line.get("call") == call and len(line.get("rows", "wide")) > 3]
    change(chosen[len(chosen) // 2])
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def test_the_same_decisions_are_counted(path: Path) -> None:
    run = run_some(path)
    result = Replay(Recording(path)).run()
    assert result.is_identical
    assert result.num_steps == len(run.steps)
    assert result.num_preemptions == run.scheduler.table.num_preemptions > 0


@pytest.mark.parametrize(
    ("call", "change", "what"),
    [
        ("schedule", lambda line: line["rows"].__setitem__(1, line["rows"][1] + 1), "row 0 of"),
        ("schedule", lambda line: line.__setitem__("rows", line["rows"][:-4]), "number of rows"),
        ("schedule", lambda line: line.__setitem__("released", ["r7"]), "released requests"),
        ("schedule", lambda line: line.__setitem__("new_block_ids", {"0": [99]}), "new blocks by row"),
        (
            "schedule",
            lambda line: line.__setitem__("admitted", [[line["rows"][0], 1, [3]]]),
            "admitted requests",
        ),
        ("schedule", lambda line: line.__setitem__("step_id", 999), "step"),
        ("update", lambda line: line.__setitem__("finished", {"1": "length"}), "requests that ended"),
    ],
)
def test_the_first_difference_is_shown(path: Path, call: str, change, what: str) -> None:
    run_some(path)
    tamper(path, call, change)
    recording = Recording(path)
    result = Replay(recording).run()
    assert not result.is_identical
    assert result.difference is not None
    assert result.difference.what.startswith(what)
    assert result.difference.recorded != result.difference.replayed
    assert result.num_calls == result.difference.call_index < recording.num_calls


def test_a_changed_configuration_is_noticed(path: Path) -> None:
    run_some(path)
    recording = Recording(path)
    config = replace(make_config(num_blocks=24), max_num_batched_tokens=40)
    recording.header = make_header(config)
    difference = Replay(recording).run().difference
    assert difference is not None
    assert difference.step_id is not None


def test_an_unknown_scheduler_field_names_the_version(path: Path) -> None:
    header = make_header(make_config())
    header = replace(header, scheduler={**header.scheduler, "lookahead": 3})
    with pytest.raises(ConfigError, match=r"0.0.test"):
        scheduler_config(header)


def test_the_step_time_model_is_told_of_every_step(path: Path) -> None:
    class Listener(ShapeTime):
        def __init__(self) -> None:
            super().__init__(lambda shape: 1.0)
            self.observed: list[tuple[BatchShape, float]] = []

        def observe(self, shape: BatchShape, seconds: float) -> None:
            self.observed.append((shape, seconds))

    run_some(path)
    recording, listener = Recording(path), Listener()
    assert Replay(recording, listener).run().is_identical
    steps = read_history(recording).steps
    assert [shape for shape, _ in listener.observed] == [step.shape for step in steps]
    assert [seconds for _, seconds in listener.observed] == pytest.approx(
        [
            step.end - (step.planned if index == 0 else max(step.planned, steps[index - 1].end))
            for index, step in enumerate(steps)
        ]
    )


def learning_model() -> Predictor:
    return Predictor(lambda shape: 0.01 + 1e-3 * shape.num_new_tokens, correction=OnlineCorrection())


def test_a_model_that_learns_predicts_the_same_again(path: Path) -> None:
    model = learning_model()
    run = run_some(path, model=model)
    replayed = learning_model()
    result = Replay(Recording(path), replayed).run()
    assert result.difference is None
    assert result.num_predictions == len(run.steps)
    shapes = [step.shape for step in run.steps]
    learned = [replayed.step_time(shape) for shape in shapes]
    assert learned == [model.step_time(shape) for shape in shapes]
    assert learned != [learning_model().step_time(shape) for shape in shapes], "it learned something"


def test_a_model_that_learns_otherwise_is_noticed(path: Path) -> None:
    run_some(path, model=learning_model())
    difference = Replay(Recording(path), Predictor(lambda shape: 0.02)).run().difference
    assert difference is not None
    assert difference.what == "predicted seconds"


def a_step(number: int, *, planned: float, end: float, seconds: float, idle: bool = False) -> RecordedStep:
    shape = BatchShape()
    shape.add(number, 1, samples=True)
    return RecordedStep(number, shape, planned, end, seconds, idle)


STEPS = [
    a_step(0, planned=10.0, end=11.0, seconds=0.9, idle=True),
    a_step(1, planned=11.1, end=12.0, seconds=0.8),
    a_step(2, planned=20.0, end=21.0, seconds=0.9, idle=True),
]


def test_host_overhead_is_the_mean_gap_where_there_was_work() -> None:
    assert RunHistory([], STEPS).host_overhead == pytest.approx(0.2)
    assert RunHistory([], STEPS[:1]).host_overhead == 0.0


def test_cycles_go_from_end_to_end_or_from_an_idle_plan() -> None:
    assert [cycle.seconds for cycle in step_cycles(STEPS)] == pytest.approx([1.0, 1.0, 1.0])


def test_recorded_times_are_played_in_order() -> None:
    times = RecordedStepTimes([MeasuredStep(step.shape, step.end) for step in STEPS])
    assert [times.step_time(step.shape) for step in STEPS] == [11.0, 12.0, 21.0]
    assert times.num_matched == times.num_asked == 3
    assert times.step_time(BatchShape()) == 21.0, "beyond the record the last one stays"
    assert times.num_matched == 3


def test_another_batch_takes_the_next_time_and_the_very_batch_its_own() -> None:
    times = RecordedStepTimes([MeasuredStep(step.shape, step.end) for step in STEPS])
    assert times.step_time(BatchShape()) == 11.0
    assert times.step_time(STEPS[2].shape) == 21.0


def test_recorded_times_answer_nothing_else() -> None:
    times = RecordedStepTimes([MeasuredStep(STEPS[0].shape, 1.0)])
    with pytest.raises(ConfigError, match="no quantiles"):
        times.step_time(BatchShape(), q=0.9)
    with pytest.raises(ConfigError, match="--profile"):
        times.max_chunk_tokens(BatchShape(), 0, 1.0)
    with pytest.raises(ConfigError, match="no steps"):
        RecordedStepTimes([])


def timed_run(path: Path, seconds, *, num_requests: int = 40, **changes) -> Recording:
    """Record a virtual engine whose steps take what a function of the shape says, and the host 1 ms."""
    config = make_config(**changes)
    run = start_run(path, config)
    arrivals = [0.11 * index * (1 + index % 3) for index in range(num_requests)]
    arrivals.sort()
    requests = [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=tuple(range(1000 * index, 1000 * index + 20 + 3 * index)),
            sampling=SamplingParams(max_tokens=5 + index % 20),
            arrival=arrival,
        )
        for index, arrival in enumerate(arrivals)
    ]
    now = 0.0
    while requests or run.scheduler.num_unfinished:
        if not run.scheduler.num_unfinished:
            now = max(now, requests[0].arrival)
        while requests and requests[0].arrival <= now:
            run.scheduler.add(requests[0])
            run.open[requests[0].request_id] = None
            run.writer.add(requests.pop(0), now)
        planned = now
        scheduled = run.scheduler.schedule(planned)
        run.writer.schedule(scheduled, planned, num_preempted=0)
        assert scheduled is not None
        duration = seconds(scheduled.shape)
        now = planned + 1e-3 + duration
        run.update(scheduled, now, seconds=duration)
    run.writer.close()
    return Recording(path)


def test_each_of_many_requests_may_have_an_objective_of_its_own() -> None:
    slos = [SLO(e2e=1 + number / 1000) for number in range(33_000)]  # as calls of jobs have
    records = [RequestRecord(request_id="r", arrival=0.0, num_prompt_tokens=1, slo=slo) for slo in slos]
    recorded = [RecordedRequest(record, 0.0) for record in records]
    classes, class_ids = replay_forecast.group_by_objectives(recorded)
    assert [classes[number].slo for number in class_ids.tolist()] == slos
    check_classes(classes)


def linear(shape: BatchShape) -> float:
    return 0.02 + 1e-3 * shape.num_new_tokens + 1e-5 * shape.decode_context_tokens


def test_with_its_own_times_a_simulation_repeats_the_record(path: Path) -> None:
    recording = timed_run(path, linear)
    history = read_history(recording)
    forecast = forecast_with_recorded_times(recording, history, make_config())
    assert forecast.num_matched_steps == forecast.num_steps == len(history.steps)
    assert {error.metric for error in forecast.errors} == {"ttft", "itl", "e2el"}
    for error in forecast.errors:
        assert error.relative_error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("runs_model", [False, True])
def test_drafts_turn_out_as_they_did_in_the_record(path: Path, *, runs_model: bool) -> None:
    speculation = SpeculationConfig(num_speculative_tokens=4, draft_length="fixed", runs_model=runs_model)
    recording = timed_run(path, linear, speculation=speculation)
    assert scheduler_config(recording.header).speculation == speculation
    assert Replay(recording).run().is_identical
    history = read_history(recording)
    assert any(step.shape.num_draft_tokens for step in history.steps)
    forecast = forecast_with_recorded_times(recording, history, scheduler_config(recording.header))
    assert forecast.num_matched_steps == forecast.num_steps == len(history.steps)
    for error in forecast.errors:
        assert error.relative_error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("call", "name", "what"),
    [("schedule", "drafts", "row 0 of"), ("update", "counts", "requests that ended")],
)
def test_other_drafts_are_a_difference(path: Path, call: str, name: str, what: str) -> None:
    speculation = SpeculationConfig(num_speculative_tokens=4, draft_length="fixed")
    timed_run(path, linear, speculation=speculation)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    line = next(line for line in lines if line.get("call") == call and line.get(name, [0])[0] > 1)
    line[name][0] -= 1
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    difference = Replay(Recording(path)).run().difference
    assert difference is not None
    assert difference.what.startswith((what, "row 0 of", "number of rows"))


def test_the_acceptance_of_a_record_is_that_of_drafts_that_had_a_chance(path: Path) -> None:
    requests = [
        a_request("code", {0: True, 1: True, 2: False, 4: False}, {0: 4, 1: 0}),
        a_request("chat", {3: True}, {0: 2}),
        a_request(None, {}, {5: 0}),
    ]
    assert measured_acceptance(requests) == Acceptance(
        rate=3 / 5, rates=(("chat", 1.0), ("code", 0.5)), hit_rate=0.5
    )
    assert measured_acceptance(requests[2:]).rate == Acceptance().rate


def test_acceptance_is_read_from_a_record(path: Path) -> None:
    timed_run(path, linear, speculation=SpeculationConfig(num_speculative_tokens=4, draft_length="fixed"))
    found = read_acceptance(path)
    assert 0.2 < found.rate < 0.9
    assert found.hit_rate == pytest.approx(0.8, abs=0.05)  # the driver has none at every fifth token
    timed_run(path, linear)
    with pytest.raises(ConfigError, match="verified draft"):
        read_acceptance(path)


def a_request(name: str | None, is_right: dict[int, bool], num_available: dict[int, int]) -> RecordedRequest:
    record = RequestRecord(request_id="a", arrival=0.0, num_prompt_tokens=1, request_class=name)
    return RecordedRequest(record, 0.0, drafts=KnownDrafts(is_right, num_available))


def test_policies_that_plan_by_time_are_simulated_with_the_model_they_had(path: Path, monkeypatch) -> None:
    monkeypatch.setitem(POLICIES, "clairvoyant", replace(POLICIES["sarathi"], needs_step_time=True))
    recording = timed_run(path, linear)
    history = read_history(recording)
    config = replace(make_config(), policy="clairvoyant")
    with pytest.raises(ConfigError, match="step-time model"):
        forecast_with_recorded_times(recording, history, config)
    learner = Predictor(linear).with_learning()
    monkeypatch.setattr(replay_forecast, "learning_model", lambda header: learner)
    assert forecast_with_recorded_times(recording, history, config).num_matched_steps == len(history.steps)


def test_a_simulation_of_a_record_has_the_objectives_of_the_record(path: Path, monkeypatch) -> None:
    """What was refused is left out; limits of the queue refuse nothing a second time."""
    tight = SLO(ttft=0.5, tbt=0.2)
    treatments: list[dict[str, Any]] = [
        {"slo": tight, "slo_class": "a", "weight": 2.0, "shed": ShedMode.RELEGATE},
        {"slo": tight, "weight": 2.0},
        {},
    ]
    config = make_config(max_num_seqs=1, max_num_queued_reqs=2)
    run = start_run(path, config)
    for index in range(9):
        request = make_request(f"r{index}", 20, 10, arrival=run.now)
        run.add(replace(request, **treatments[index % 3]))
        run.step()
    run.finish()
    recording = Recording(path)
    history = read_history(recording)
    seen = []

    def listen(load, settings, *args, **options):
        seen.append((load, settings))
        return simulate(load, settings, *args, **options)

    monkeypatch.setattr(replay_forecast, "simulate", listen)
    forecast = forecast_with_recorded_times(recording, history, config)
    [(load, settings)] = seen
    assert forecast.num_requests == len(load) == 9 - len(run.refused) < 9
    assert settings.shed is ShedMode.RELEGATE
    assert {(each.slo, each.weight) for each in load.classes} == {(tight, 2.0), (SLO(), 1.0)}
    rejected = [request.record.is_rejected for request in history.requests]
    wanted = [treatments[index % 3].get("slo", SLO()) for index in range(9) if not rejected[index]]
    assert [load.slo(row) for row in range(len(load))] == wanted


def test_the_true_model_foretells_the_record(path: Path) -> None:
    recording = timed_run(path, linear)
    history = read_history(recording)
    assert history.host_overhead == pytest.approx(1e-3)
    forecast = forecast_with_model(
        recording, history, make_config(), ShapeTime(linear), host_overhead=history.host_overhead
    )
    assert forecast.num_matched_steps is None
    for error in forecast.errors:
        assert error.relative_error == pytest.approx(0.0, abs=1e-6)


def test_a_slow_model_is_seen(path: Path) -> None:
    recording = timed_run(path, linear)
    history = read_history(recording)
    forecast = forecast_with_model(
        recording, history, make_config(), ShapeTime(lambda shape: 1.2 * linear(shape)), host_overhead=1e-3
    )
    assert all(error.relative_error > 0.1 for error in forecast.errors)


def test_a_record_without_a_finished_request_is_refused(path: Path) -> None:
    run = start_run(path, make_config())
    run.add(make_request("r0", 20, 50))
    run.step()
    run.abort("r0")
    run.finish()
    recording = Recording(path)
    with pytest.raises(ConfigError, match="recorded request"):
        forecast_with_recorded_times(recording, read_history(recording), make_config())
