"""Times of steps on any forward pass, as the engine's own loop runs them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gpu_check.record import IS_REHEARSAL
from onbeat.core.request import SamplingParams
from onbeat.engine.forward import ForwardPass
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.profiling.batches import BatchRow, MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer
from onbeat.engine.sampler import Sampler

BLOCK_SIZE = 16


class KernelTimes(NamedTuple):
    """What the device did in one step."""

    device_ms: float
    """Sum of the kernels' times."""
    num_kernels: float
    largest: list[tuple[str, float, float]]
    """Name, milliseconds a step, calls a step."""


def decodes(rows: int, context: int) -> MeasuredBatch:
    """Return decodes that see `context` tokens each, the new one included."""
    return MeasuredBatch((BatchRow(context - 1, 1),) * rows)


def prompt(num_tokens: int) -> MeasuredBatch:
    """Return a prompt that is computed at once."""
    return MeasuredBatch((BatchRow(0, num_tokens),))


def runner_of(forward: ForwardPass, *, num_blocks: int, max_rows: int, max_len: int) -> ModelRunner:
    """Return what runs steps."""
    return ModelRunner(
        forward=forward,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_rows,
        max_model_len=max_len,
        sampler=Sampler(forward.config.vocab_size, forward.device),
    )


@contextmanager
def step_timer(runner: ModelRunner, num_blocks: int) -> Iterator[StepTimer]:
    """Time greedy steps on a runner that does nothing else meanwhile."""
    timer = StepTimer(runner, num_blocks=num_blocks, sampling=SamplingParams(temperature=0.0))
    try:
        yield timer
    finally:
        timer.close()


def wall_ms(timer: StepTimer, batch: MeasuredBatch, *, seconds: float = 0.6) -> float:
    """Return the median wall time of a step, planned, computed and sampled on its own."""
    for _ in range(2):
        timer.time(batch)
    times: list[float] = []
    deadline = time.monotonic() + seconds
    while len(times) < 3 or (time.monotonic() < deadline and len(times) < 40):
        times.append(timer.time(batch))
    return statistics.median(times) * 1e3


def kernel_times(timer: StepTimer, batch: MeasuredBatch, num_steps: int = 3) -> KernelTimes | None:
    """Profile some steps; None where there is no device to profile, or its profiler does not work."""
    if IS_REHEARSAL:
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    timer.time(batch)
    try:
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(num_steps):
                timer.time(batch)
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the profiler does not work: {error}", flush=True)
        return None
    kernels = [each for each in profiler.key_averages() if each.device_type == torch.autograd.DeviceType.CUDA]
    totals = [
        (each.key, each.self_device_time_total / 1e3 / num_steps, each.count / num_steps) for each in kernels
    ]
    totals.sort(key=lambda each: -each[1])
    return KernelTimes(sum(each[1] for each in totals), sum(each[2] for each in totals), totals[:12])
