"""A live engine keeps a record that replays to the very same decisions."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.protocols import StepOutputs
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import ThreadExecutor
from onbeat.recording.reader import Recording
from onbeat.recording.writer import create_record
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.replay import decisions as replay_module
from onbeat.simulator.replay.decisions import Replay
from onbeat.simulator.replay.forecast import forecast_with_recorded_times
from onbeat.simulator.replay.history import read_history
from tests.cpu.core.shedding import SheddingScheduler, shedding_core
from tests.fake_runner import FakeRunner
from tests.pure.recording.recorded import make_header

NUM_STEPS = 500


def recorded_core(
    path: Path, config: SchedulerConfig, *, depth: int = 1, step_seconds: float = 0.0
) -> EngineCore:
    return EngineCore(
        Scheduler(config),
        ThreadExecutor(FakeRunner(step_seconds)),
        max_in_flight_steps=depth,
        recorder=create_record(path)(make_header(config, max_in_flight_steps=depth)),
    )


def mixed_requests(core: EngineCore, seed: int) -> Iterator[Request]:
    """Together more than the cache holds; many with a common start, some that stop, some that fail."""
    chance = random.Random(seed)
    number = 0
    while True:
        kind = chance.random()
        start = 0 if kind < 0.5 else chance.randrange(1, 97)
        length = chance.randrange(1, 300)
        yield Request(
            request_id=f"bad{number}" if kind > 0.97 else f"r{number}",
            prompt_token_ids=tuple(1000 + start + i for i in range(length)),
            sampling=SamplingParams(
                max_tokens=chance.randrange(1, 200),
                stop_token_ids=(chance.randrange(97),) if chance.random() < 0.3 else (),
            ),
            arrival=core._clock(),
        )
        number += 1


def run_mixed(core: EngineCore, seed: int) -> None:
    """Serve until `NUM_STEPS` steps are back, at times idle; then to the end. Some output is fetched late."""
    chance = random.Random(seed)
    requests = mixed_requests(core, seed)
    open_ids: dict[str, int] = {}
    """Output tokens of each."""
    num_steps = 0
    while num_steps < NUM_STEPS or core.has_work:
        if num_steps < NUM_STEPS and (not core.has_work or chance.random() < 0.1):
            for _ in range(chance.randrange(1, 6)):
                request = next(requests)
                core.add(request)
                open_ids[request.request_id] = 0
        if open_ids and chance.random() < 0.01:
            for output in core.abort([chance.choice(list(open_ids))]):
                del open_ids[output.request_id]
        if open_ids and chance.random() < 0.3:
            some = chance.sample(list(open_ids), -(-len(open_ids) // 3))
            core.on_fetched({request_id: open_ids[request_id] for request_id in some})
        outputs = core.step()
        if outputs is not None:
            num_steps += 1
            for output in outputs.outputs:
                open_ids[output.request_id] += len(output.new_token_ids)
                if output.finish_reason is not None:
                    del open_ids[output.request_id]


@pytest.mark.parametrize(
    ("policy", "depth", "window_tokens"),
    [
        *(("sarathi", 1, 8), ("sarathi", 2, None), ("prefill-first", 1, None), ("static", 2, 8)),
        # A window at the other depth, and none: each part of these is in a case above.
        pytest.param("sarathi", 1, None, marks=pytest.mark.slow),
        pytest.param("sarathi", 2, 8, marks=pytest.mark.slow),
        pytest.param("prefill-first", 1, 8, marks=pytest.mark.slow),
        pytest.param("static", 2, None, marks=pytest.mark.slow),
    ],
)
def test_a_long_run_replays_identically(
    tmp_path: Path, policy: str, depth: int, window_tokens: int | None
) -> None:
    config = SchedulerConfig(
        num_blocks=64,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128 if policy == "sarathi" else 512,
        policy=policy,
        window_tokens=window_tokens,
    )
    path = tmp_path / "run.gz"
    core = recorded_core(path, config, depth=depth)
    run_mixed(core, seed=depth)
    core.shutdown()
    recording = Recording(path)
    replay = Replay(recording)
    result = replay.run()
    assert result.difference is None
    assert result.num_steps == recording.num_steps >= NUM_STEPS
    assert result.num_aborted > 5
    assert result.num_failed > 0
    assert result.num_prefix_hits == core.scheduler.table.num_prefix_hits > 1000
    assert result.num_preemptions == core.scheduler.table.num_preemptions
    if policy in ("sarathi", "prefill-first"):
        assert result.num_preemptions > 20


@pytest.mark.parametrize("policy", ["sarathi", "prefill-first", "static"])
def test_embeddings_replay_identically(tmp_path: Path, policy: str) -> None:
    config = SchedulerConfig(
        policy=policy, num_blocks=64, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=512
    )
    path = tmp_path / "run.gz"
    core = recorded_core(path, config)
    for number in range(200):
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(range(number % 7, number % 7 + 1 + 17 * number % 300)),
            sampling=SamplingParams(max_tokens=1 if number % 2 else 1 + number % 30),
            arrival=core._clock(),
            pooling=(None, "last", None, "mean")[number % 4],
            slo=SLO(ttft=60.0) if number % 3 else None,
        )
        core.add(request)
        core.step()
    while core.has_work:
        core.step()
    core.scheduler.check_invariants()
    core.shutdown()
    recording = Recording(path)
    replay = Replay(recording)
    result = replay.run()
    assert result.difference is None
    assert result.num_requests == 200
    history = read_history(recording)
    sizes = [list(each.record.delivery_sizes) for each in history.requests if each.record.is_embedding]
    assert sizes == [[0]] * 100
    assert {each.record.finish_reason for each in history.requests} == {"stop", "length"}


def test_the_history_tells_what_the_replay_delivers(tmp_path: Path) -> None:
    config = SchedulerConfig(
        policy="sarathi", num_blocks=64, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=128
    )
    path = tmp_path / "run.gz"
    core = recorded_core(path, config, depth=2)
    run_mixed(core, seed=7)
    core.shutdown()
    recording = Recording(path)
    history = read_history(recording)
    times: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    for delivery in Replay(recording).deliveries():
        for output in delivery.outputs:
            times.setdefault(output.request_id, []).extend([delivery.now] * len(output.new_token_ids))
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason.value
    assert len(history.requests) == len(reasons)
    for request in history.requests:
        record = request.record
        assert list(record.delivery_times) == times[record.request_id]
        assert record.num_output_tokens == sum(record.delivery_sizes) == len(record.delivery_times)
        assert record.finish_reason == reasons[record.request_id]
    assert sum(request.record.num_preemptions for request in history.requests) > 0


def run_paced(core: EngineCore) -> int:
    """Serve 60 requests that come one by one, at times to an idle engine; return how many."""
    chance = random.Random(3)
    requests = (request for request in mixed_requests(core, 3) if not request.request_id.startswith("bad"))
    num_added = 0
    while num_added < 60 or core.has_work:
        if num_added < 60 and (not core.has_work or chance.random() < 0.05):
            core.add(next(requests))
            num_added += 1
        core.step()
    core.shutdown()
    return num_added


@pytest.mark.parametrize(("num_blocks", "prefix"), [(64, False), (512, True)])
def test_with_recorded_times_the_simulator_repeats_the_run(
    tmp_path: Path, num_blocks: int, prefix: bool
) -> None:
    config = SchedulerConfig(
        policy="sarathi",
        num_blocks=num_blocks,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        enable_prefix_caching=prefix,
    )
    path = tmp_path / "run.gz"
    core = recorded_core(path, config, step_seconds=0.0005)
    num_added = run_paced(core)
    recording = Recording(path)
    history = read_history(recording)
    forecast = forecast_with_recorded_times(recording, history, config)
    assert forecast.num_requests == num_added
    assert forecast.num_steps == forecast.num_recorded_steps == len(history.steps)
    assert forecast.num_matched_steps == forecast.num_steps
    assert (core.scheduler.table.num_prefix_hits > 0) == prefix
    assert (core.scheduler.table.num_preemptions > 0) != prefix
    for error in forecast.errors:
        assert error.simulated == pytest.approx(error.measured, rel=1e-6), error


def test_a_run_planned_ahead_is_simulated_closely(tmp_path: Path) -> None:
    """The simulator plans each step when the one before ends; the engine planned while that ran."""
    config = SchedulerConfig(
        policy="sarathi", num_blocks=512, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=128
    )
    path = tmp_path / "run.gz"
    run_paced(recorded_core(path, config, depth=2, step_seconds=0.0005))
    recording = Recording(path)
    forecast = forecast_with_recorded_times(recording, read_history(recording), config)
    assert forecast.num_matched_steps is not None
    assert forecast.num_matched_steps > 0.95 * forecast.num_steps
    for error in forecast.errors:
        assert error.simulated == pytest.approx(error.measured, rel=0.05), error


def test_refusals_and_expiries_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SchedulerConfig(
        policy="sarathi",
        num_blocks=64,
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        max_num_queued_reqs=2,
    )
    path = tmp_path / "run.gz"
    recorder = create_record(path)(make_header(config))
    ticks = itertools.count()
    core = shedding_core(config, clock=lambda: next(ticks) * 0.005, recorder=recorder)
    outcomes: Counter[str] = Counter()
    for index in range(24):
        slo = SLO(ttft=0.01 if index % 4 == 0 else 0.06)
        request = Request(
            request_id=f"r{index}",
            prompt_token_ids=range(20),
            sampling=SamplingParams(max_tokens=10),
            arrival=core._clock(),
            slo=slo,
            shed=ShedMode.REJECT,
        )
        try:
            core.add(request)
        except (Overloaded, SLOUnattainable) as error:
            outcomes[str(error.code)] += 1
        outcomes.update(ended(core.step()))
    while core.has_work:
        outcomes.update(ended(core.step()))
    core.shutdown()
    assert outcomes.keys() == {"slo_unattainable", "server_overloaded", "expired", "length"}
    assert outcomes.total() == 24
    monkeypatch.setattr(replay_module, "Scheduler", SheddingScheduler)
    result = Replay(Recording(path)).run()
    assert result.is_identical
    assert result.num_rejected == outcomes["slo_unattainable"] + outcomes["server_overloaded"]
    assert result.num_expired == outcomes["expired"]


def ended(message: StepOutputs | None) -> list[str]:
    outputs = message.outputs if message is not None else []
    return [output.finish_reason.value for output in outputs if output.finish_reason is not None]
