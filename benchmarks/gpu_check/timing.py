"""Times of steps on any forward pass, as the engine's own loop runs them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_check.record import IS_REHEARSAL
from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.forward import ForwardPass
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.profiling.batches import TIMES_AT_ONCE, BatchRow, MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer
from onbeat.engine.sampler import Sampler
from onbeat.scheduler.scheduler_config import SchedulerConfig

BLOCK_SIZE = 64
GREEDY = SamplingParams(temperature=0.0)


class KernelTime(NamedTuple):
    """What one kernel took of a step."""

    name: str
    ms: float
    calls: float
    """A step."""


def decodes(rows: int, context: int) -> MeasuredBatch:
    """Return decodes that see `context` tokens each, the new one included."""
    return MeasuredBatch((BatchRow(context - 1, 1),) * rows)


def prompt(num_tokens: int) -> MeasuredBatch:
    """Return a prompt that is computed at once."""
    return MeasuredBatch((BatchRow(0, num_tokens),))


def runner_of(forward: ForwardPass, *, num_blocks: int, max_rows: int, max_len: int) -> ModelRunner:
    """Return what runs steps."""
    limits = SchedulerConfig(
        policy="sarathi",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_rows,
        max_num_batched_tokens=max(max_rows, max_len),
        max_model_len=max_len,
    )
    return ModelRunner(limits, forward, Sampler(forward.config.vocab_size))


@contextmanager
def step_timer(
    runner: ModelRunner, num_blocks: int, sampling: SamplingParams = GREEDY
) -> Iterator[StepTimer]:
    """Time steps on a runner that does nothing else meanwhile."""
    timer = StepTimer(runner, num_blocks=num_blocks, sampling=sampling)
    try:
        yield timer
    finally:
        timer.close()


def wall_ms(timer: StepTimer, batch: MeasuredBatch, *, seconds: float = 0.6) -> float:
    """Return the median wall time of a step, as `StepTimer` takes it."""
    for _ in range(2):
        timer.time(batch)
    times: list[float] = []
    deadline = time.monotonic() + seconds
    while len(times) < 3 or (time.monotonic() < deadline and len(times) < 40):
        times.append(timer.time(batch))
    return statistics.median(times) * 1e3


def kernel_times(timer: StepTimer, batch: MeasuredBatch, num_steps: int = 3) -> list[KernelTime]:
    """Profile some steps, and return all kernels, the longest first; on a CPU torch's operators.

    Returns
    -------
    Nothing where the profiler does not work.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    options: dict[str, Any] = {"activities": activities}
    if IS_REHEARSAL:  # the operators run in another thread
        options = {"experimental_config": torch._C._profiler._ExperimentalConfig(profile_all_threads=True)}
    timer.time(batch)
    try:
        with torch.profiler.profile(**options) as profiler:
            for _ in range(num_steps):
                timer.time(batch)
            if not IS_REHEARSAL:
                torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the profiler does not work: {error}", flush=True)
        return []
    kind, took = ("CPU", "self_cpu_time_total") if IS_REHEARSAL else ("CUDA", "self_device_time_total")
    runs = num_steps * (TIMES_AT_ONCE if timer._runner.overlaps else 1)
    found = [
        KernelTime(each.key, getattr(each, took) / 1e3 / runs, each.count / runs)
        for each in profiler.key_averages()
        if each.device_type.name == kind
    ]
    return sorted(found, key=lambda each: -each.ms)


class DecodeStream:
    """Decodes of the same requests, step after step, as a scheduler would plan them."""

    def __init__(self, runner: ModelRunner, rows: int, context: int, num_steps: int) -> None:
        self._runner = runner
        self._context = context
        self._blocks = -(-(context + num_steps + 1) // BLOCK_SIZE)
        prompt_ids = tuple(range(1, context))
        self.admitted = tuple(
            AdmittedRequest(
                Request(request_id=f"loop-{row}", prompt_token_ids=prompt_ids, sampling=GREEDY),
                (7,),
                tuple(range(row * self._blocks, (row + 1) * self._blocks)),
            )
            for row in range(rows)
        )
        self._ids = [each.request.request_id for each in self.admitted]

    def enter(self) -> SchedulerOutput:
        """Return a step that takes the requests in; they are as if their prompts were computed."""
        return SchedulerOutput(0, (), self.admitted, (), BatchShape())

    def step(self, index: int) -> SchedulerOutput:
        """Return the decode step of an index."""
        computed = self._context - 1 + index
        rows = tuple(ScheduledRequest(each, computed, 1, (), samples=True) for each in self._ids)
        return SchedulerOutput(index + 1, rows, (), (), BatchShape())

    def leave(self) -> SchedulerOutput:
        """Return a step that forgets them."""
        return SchedulerOutput(0, (), (), tuple(self._ids), BatchShape())


def loop_ms(runner: ModelRunner, rows: int, context: int, num_steps: int = 40) -> float:
    """Return the time of a decode step while one is always planned ahead, as the engine's loop does."""
    stream = DecodeStream(runner, rows, context, num_steps)
    executor = ThreadExecutor(runner)
    executor.submit(stream.enter()).result()
    planned = [stream.step(index) for index in range(num_steps)]
    for scheduled in planned[:5]:
        executor.submit(scheduled).result()
    start = time.perf_counter()
    in_flight = [executor.submit(scheduled) for scheduled in planned[5:7]]
    for scheduled in planned[7:]:
        in_flight.pop(0).result()
        in_flight.append(executor.submit(scheduled))
    for pending in in_flight:
        pending.result()
    took = time.perf_counter() - start
    executor.submit(stream.leave()).result()
    executor.shutdown()
    return took * 1e3 / (num_steps - 5)


def host_us(runner: ModelRunner, rows: int, context: int, num_steps: int = 20) -> float | None:
    """Return the host's time to launch a decode step; None where the runner launches none ahead."""
    if not hasattr(runner, "launch"):
        return None
    times: list[float] = []
    launch = _timed(runner.launch, times)
    _launch_steps(runner, launch, rows, context, num_steps)
    return statistics.median(times) * 1e6


def times_of_parts(
    runner: ModelRunner, rows: int, context: int, parts: dict[str, tuple[Any, str]], num_steps: int = 20
) -> dict[str, float]:
    """Return the microseconds that a launch spends in methods, each with all that it calls.

    Parameters
    ----------
    parts : for each name an object and its method.
    """
    times: dict[str, list[float]] = {name: [] for name in parts}
    for name, (owner, method) in parts.items():
        setattr(owner, method, _timed(getattr(owner, method), times[name]))
    try:
        _launch_steps(runner, runner.launch, rows, context, num_steps)
    finally:
        for owner, method in parts.values():
            delattr(owner, method)
    return {name: statistics.median(each) * 1e6 for name, each in times.items() if each}


def _timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **options)
        times.append(time.perf_counter() - start)
        return result

    return timed


def _launch_steps(
    runner: ModelRunner, launch: Callable[..., Any], rows: int, context: int, num_steps: int
) -> None:
    """Launch decode steps, each when the one before it is done."""
    stream = DecodeStream(runner, rows, context, num_steps)
    runner.launch(stream.enter()).result()
    for index in range(num_steps):
        launch(stream.step(index)).result()
    runner.launch(stream.leave()).result()
