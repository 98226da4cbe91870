"""What predicts step times: the choices at start, what they say, and what every step then carries."""

from __future__ import annotations

import logging
import os
import re
import timeit
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.options import change
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.core.step_stats import StepStats
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.profiling.batches import MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer
from onbeat.engine.profiling.profiler import ProfileSettings, profile_model
from onbeat.engine.progress import Detail
from onbeat.engine.start import build_engine, prepare
from onbeat.engine.step_times import Others, OthersMeter, StepWatch, choose_step_time
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.profile import Profile, profile_path, profiles_dir, write_profile
from onbeat.perfmodel.recent import Drift
from onbeat.perfmodel.utilisation import StepOperations
from tests.busy_loops import busy_loops
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.cpu.engine.tiny_config import tiny_config

SHORT = ProfileSettings(seconds=0.5, num_levels=3, num_mixed=8, num_held_back=4, max_context_tokens=1024)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(
        write_tiny_directory(tmp_path_factory.mktemp("model") / "tiny"),
        max_model_len=256,
        max_num_seqs=64,  # a cache this small is measured for few rows only
    )


@pytest.fixture(scope="module")
def profile(config: EngineConfig) -> Profile:
    return profile_model(prepare(config).load(lambda _: None), SHORT).profile


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(config: EngineConfig) -> tuple[list[StepStats], list[str]]:
    """Serve one request; return its steps and what the start said of step times and speed."""
    said: list[str] = []
    core, _ = build_engine(config, said.append)
    core.add(
        Request(request_id="r", prompt_token_ids=tuple(range(40)), sampling=SamplingParams(max_tokens=5))
    )
    steps = []
    while core.has_work:
        if (outputs := core.step()) is not None and outputs.stats is not None:
            steps.append(outputs.stats)
    core.shutdown()
    return steps, [text for text in said if text.startswith(("step times", "speed"))]


def check_judged(steps: list[StepStats]) -> None:
    assert len(steps) == 5
    for step in steps:
        assert step.predicted_seconds is not None
        assert 0 < step.predicted_seconds < 10
        assert step.mbu is not None
        assert step.mbu > 0
        assert step.mfu is not None
        assert step.mfu > 0


@pytest.mark.parametrize(("source", "origin"), [("auto", "timed now"), ("roofline", "estimated")])
def test_without_a_profile_the_roofline_serves_and_says_how_well_it_is_known(config, source, origin):
    steps, said = run(change(config, step_time_profile=source))
    check_judged(steps)
    detail, speed = said
    assert isinstance(detail, Detail)
    assert "estimated" in detail
    assert ("timed now" in detail) == (source == "auto")
    assert not isinstance(speed, Detail)
    assert re.fullmatch(
        rf"speed: .* [\d.e-]+ ms, .* ms \({origin}.*`onbeat profile {re.escape(config.model.name)}`.*",
        speed,
    )


def test_the_first_verdicts_are_of_what_this_machine_takes(config, monkeypatch):
    """The roofline knows nothing of a machine that takes 12 ms for a decode and 200 for any prompt."""
    timed: list[BatchShape] = []

    def slow(self: StepTimer, batch: MeasuredBatch) -> float:
        timed.append(batch.shape)
        return 0.2 if batch.shape.num_chunks else 0.012

    monkeypatch.setattr(StepTimer, "time", slow)
    said: list[str] = []
    classes = {"chat": SLO(tbt=0.01), "search": SLO(ttft=0.1), "report": SLO(tbt=0.02)}
    core, _ = build_engine(change(config, slo_classes=classes), said.append)
    core.shutdown()
    assert " 12 ms (timed now" in next(line for line in said if line.startswith("speed"))
    misses = [line for line in said if line.startswith("class")]
    assert [line.partition(":")[0] for line in misses] == ["class chat", "class search"]
    assert " 12 ms" in misses[0]
    assert {shape.num_chunks for shape in timed} == {0, 1}
    assert len(timed) <= 6


def test_where_a_decode_takes_long_a_start_waits_for_few_tokens_of_a_prompt(config, monkeypatch):
    """A decode alone says nothing of prompts: 24 billion weights took 14 times as long as it promised."""
    timed: list[BatchShape] = []

    def slow(self: StepTimer, batch: MeasuredBatch) -> float:
        timed.append(batch.shape)
        return 0.15 * max(batch.shape.num_new_tokens, 2)

    monkeypatch.setattr(StepTimer, "time", slow)
    _, said = run(config)
    assert {shape.num_new_tokens for shape in timed if shape.num_chunks} == {16}
    assert " 1 in 300 ms, 16 in 2400 ms" in said[0]


def test_what_was_timed_at_the_start_leaves_nothing_behind(config):
    loaded = prepare(config).load(lambda _: None)
    chosen = choose_step_time("auto", loaded, lambda _: None)
    assert chosen.description is not None
    (decode, prompt) = chosen.description.paces
    assert decode[0] == 1 < prompt[0] <= loaded.limits.max_model_len
    assert not loaded.runner.batch.slots


def test_the_matching_profile_is_found(config, profile):
    path = profile_path(profiles_dir(), profile.key)
    write_profile(path, profile)
    steps, said = run(config)
    check_judged(steps)
    assert str(path) in said[0]
    assert "P90" in said[0]


def test_a_profile_of_other_threads_is_not_taken(config, profile):
    write_profile(profile_path(profiles_dir(), profile.key), profile)
    _, said = run(change(config, threads=2))
    assert "estimated" in said[0]


def test_a_profile_of_another_backend_is_not_taken(config, profile):
    key = replace(profile.key, backend="another")
    write_profile(profile_path(profiles_dir(), key), replace(profile, key=key))
    _, said = run(config)
    assert "estimated" in said[0]


def test_a_profile_of_another_instruction_set_is_named(config, profile):
    key = replace(profile.key, instruction_set="another")
    path = profile_path(profiles_dir(), key)
    write_profile(path, replace(profile, key=key))
    _, said = run(config)
    assert "estimated" in said[0]
    assert re.search(rf"{re.escape(str(path))}.*'another'", said[0])


def test_a_busy_machine_is_said_where_it_was_measured(config, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(OthersMeter, "read", lambda _: Others(1.5, num_allowed=2, num_threads=2))
    classes = {"fast": SLO(tbt=0.001)}
    true_time = Predictor.step_time
    monkeypatch.setattr(Predictor, "step_time", lambda self, shape, q=None: 1e3 * true_time(self, shape, q))
    core, _ = build_engine(change(config, step_time_profile="roofline", slo_classes=classes), said.append)
    core.shutdown()
    (busy,) = [line for line in said if "busy:" in line]
    assert "1.5 of 2 cores" in busy
    (miss,) = [line for line in said if line.startswith("class fast: TBT 1 ms")]
    assert "busy" in miss


@pytest.mark.alone
def test_a_start_beside_loops_on_all_cores_says_so(config):
    said: list[str] = []
    cores = len(os.sched_getaffinity(0))
    with busy_loops(cores):
        core, _ = build_engine(change(config, step_time_profile="roofline", threads=cores), said.append)
    core.shutdown()
    assert [line for line in said if "busy:" in line]


def test_a_profile_in_the_cache_was_measured_at_another_time(config, profile, monkeypatch):
    said: list[str] = []
    write_profile(profile_path(profiles_dir(), profile.key), profile)
    monkeypatch.setattr(OthersMeter, "read", lambda _: Others(1.5, num_allowed=2, num_threads=2))
    core, _ = build_engine(config, said.append)
    core.shutdown()
    assert not [line for line in said if "busy" in line]


def test_a_damaged_profile_in_the_cache_is_named_and_does_not_keep_from_serving(config, profile):
    path = profile_path(profiles_dir(), profile.key)
    write_profile(path, profile)
    path.write_text(path.read_text()[:100])
    steps, said = run(config)
    check_judged(steps)
    assert "estimated" in said[0]
    assert str(path) in said[0]


def test_a_named_profile_must_match(config, profile, tmp_path):
    path = tmp_path / "other.json"
    write_profile(path, replace(profile, key=replace(profile.key, model="other/model")))
    with pytest.raises(ConfigError, match="'other/model', not"):
        run(change(config, step_time_profile=str(path)))
    with pytest.raises(ConfigError, match=r"missing\.json"):
        run(change(config, step_time_profile=str(tmp_path / "missing.json")))


def test_calibration_takes_seconds(config):
    steps, said = run(change(config, step_time_profile="calibrate"))
    check_judged(steps)
    assert "calibrating" in said[0]
    assert "calibrated in" in said[1]


def test_nothing_is_predicted_where_nobody_asks(config):
    steps, said = run(change(config, policy="sarathi", step_time_profile="none"))
    assert {(step.predicted_seconds, step.mbu, step.mfu) for step in steps} == {(None, None, None)}
    assert said == ["step times: not predicted"]


def test_float64_is_served_without_predictions(config):
    config = change(config, policy="sarathi", dtype="float64")
    steps, said = run(config)
    assert steps[0].predicted_seconds is None
    assert "float64" in said[0]
    with pytest.raises(ConfigError, match="float64"):
        run(change(config, step_time_profile="roofline"))


@pytest.mark.parametrize(
    ("lack", "why"),
    [
        ({"step_time_profile": "none"}, "'none'; leave --step-time-profile"),
        ({"dtype": "float64"}, "float64; .*--dtype"),
        ({"dtype": "float64", "step_time_profile": "roofline"}, "float64"),
    ],
)
def test_a_policy_that_needs_predictions_is_not_started_without(config, lack, why):
    said: list[str] = []
    with pytest.raises(ConfigError, match=f"'slo'.* {why}.*--policy sarathi"):
        build_engine(change(config, policy="slo", **lack), said.append)
    assert said == [], "found before anything was loaded"


class OneByteOneFlop(StepOperations):
    def __init__(self) -> None:
        pass

    def flops(self, shape: BatchShape) -> float:
        return 8.0 * shape.num_new_tokens

    def bytes_read(self, shape: BatchShape) -> float:
        return 2.0 * shape.num_new_tokens


def stats(seconds: float, start: float = 10.0) -> StepStats:
    shape = BatchShape()
    shape.add(10, 1, samples=True)
    counts: dict[str, Any] = dict.fromkeys(
        ("num_running", "num_waiting", "num_blocks", "num_used_blocks", "num_preemptions"), 0
    )
    host: dict[str, Any] = {
        "num_prefix_queries": 0,
        "num_prefix_hits": 0,
        "schedule_seconds": 0.0,
        "update_seconds": 0.0,
    }
    return StepStats(0, start, start + seconds, shape, **counts, **host)


def test_a_step_is_judged_by_the_peaks():
    step = stats(0.5)
    StepWatch(OneByteOneFlop(), memory_bandwidth=16.0, peak_flops=32.0).judge(step)
    assert (step.mbu, step.mfu) == (0.25, 0.5)
    stopped = stats(0.0)
    StepWatch(OneByteOneFlop(), memory_bandwidth=16.0, peak_flops=32.0).judge(stopped)
    assert (stopped.mbu, stopped.mfu) == (None, None)


def drift_lines(caplog, alarms: list[tuple[float, bool]], *, ratio=1.5, was_measured=True) -> list[str]:
    """Judge steps that end at given times with the alarm on or off; return what the log says."""
    drifts = iter([Drift(alarm, ratio, 99) for _, alarm in alarms])
    watch = StepWatch(
        OneByteOneFlop(),
        memory_bandwidth=1.0,
        peak_flops=1.0,
        drift=lambda: next(drifts),
        was_measured=was_measured,
    )
    with caplog.at_level(logging.WARNING):
        for end, alarm in alarms:
            step = stats(0.1, start=end - 0.1)
            watch.judge(step)
            assert step.is_drifting is alarm
    return [record.getMessage() for record in caplog.records]


def test_drift_that_lasts_is_said_when_it_comes_and_when_it_goes(caplog):
    steps = [
        (0, False),
        (1, True),
        (40, True),
        (70, True),
        (140, True),
        (150, False),
        (211, False),
        (300, False),
    ]
    came, went = drift_lines(caplog, steps)
    assert ("1.50" in came, "loads" in came) == (True, True)
    assert ("1.50" in went, "loads" in went) == (True, False)


def test_drift_that_comes_and_goes_is_not_said(caplog):
    assert drift_lines(caplog, [(10.0 * i, i % 5 != 0) for i in range(100)]) == []


def test_faster_steps_blame_no_load(caplog):
    (line,) = drift_lines(caplog, [(0, True), (61, True)], ratio=0.4)
    assert "0.40 times" in line
    assert "loads" not in line


def test_what_was_only_computed_cannot_drift(caplog):
    assert drift_lines(caplog, [(0, True), (100, True)], was_measured=False) == []


def test_predicting_and_judging_a_step_costs_microseconds(config):
    loaded = prepare(config).load(lambda _: None)
    chosen = choose_step_time("roofline", loaded, lambda _: None)
    assert chosen.model is not None
    assert chosen.watch is not None
    model, watch, step = chosen.model, chosen.watch, stats(0.01)

    def extra() -> None:
        model.step_time(step.shape)
        watch.judge(step)
        model.observe(step.shape, 0.01)

    assert min(timeit.repeat(extra, number=500, repeat=7)) / 500 < 20e-6
