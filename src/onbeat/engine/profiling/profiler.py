"""The whole of a profile: measure limits and batches on a loaded model, fit, test.

Batches are measured against noise: in interleaved rounds of random order, and by the median of each.

What the device reaches at best is measured, too: the denominators of MBU and MFU, and the rates of products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.engine.device import DeviceConfig, free_memory, run_apart, wait_for
from onbeat.engine.loaded_model import LoadedModel, profile_key_of
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.profiling.batches import (
    MAX_DRAFTS,
    BatchLimits,
    MeasuredBatch,
    corner_batches,
    mixed_batches,
    random_batches,
    verify_batches,
    with_drafts,
)
from onbeat.engine.profiling.measure import StepTimer, num_blocks_for
from onbeat.engine.profiling.products import GivesProducts, RowProducts
from onbeat.engine.step_time_spec import FORMATS, device_spec_of, model_spec_of
from onbeat.perfmodel.device_spec import ROW_COUNTS, best_rates, product_rates, shortest
from onbeat.perfmodel.fitted import MIN_DISTINCT_SHAPES, FitTarget, fit_best
from onbeat.perfmodel.profile import MachineLimits, Profile
from onbeat.perfmodel.shapes import MeasuredStep

MIN_RUNS = 3
"""Runs that even a long batch gets where time allows: the median of fewer follows every disturbance."""
_COSTLY_SHARE = 3.0
"""A batch that took this many times its share of the budget waits until all others have had more runs."""

OnRun = Callable[[float], None]
"""Hears after each run which share of the campaign is done, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """How much to measure.

    Parameters
    ----------
    seconds : for running batches; loading and fitting come on top.
    num_levels : of the grids of plain batches and of those with drafts, see `corner_batches`.
    num_mixed, num_held_back : mixed batches to fit, and others to test the fit.
    max_context_tokens : of a batch's rows together.
    """

    seconds: float
    num_levels: int
    num_mixed: int
    num_held_back: int
    max_context_tokens: int


FULL = ProfileSettings(seconds=80.0, num_levels=6, num_mixed=32, num_held_back=24, max_context_tokens=2**15)
"""What `onbeat profile` does."""
QUICK = ProfileSettings(seconds=3.0, num_levels=3, num_mixed=10, num_held_back=0, max_context_tokens=2**12)
"""What a server does at start when it is told to calibrate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """A profile, and what its report shows beside it."""

    profile: Profile
    target: FitTarget
    fitted_steps: Sequence[MeasuredStep]
    held_back: Sequence[MeasuredStep]
    runs_per_batch: float
    """Mean; under `MIN_RUNS` the medians still follow disturbances."""


def profile_model(
    loaded: LoadedModel, settings: ProfileSettings, on_run: OnRun = lambda _: None
) -> ProfileResult:
    """Measure and fit. The runner must be idle, and has the state it had before when this returns.

    Raises
    ------
    ConfigError : the number format has no step-time model, or the time did not suffice for a fit.
    """
    device = loaded.backend.device
    precision = loaded.backend.precision()
    if precision is None:
        raise ConfigError(
            f"step times of {device.dtype.name} cannot be predicted; choose --dtype {' or '.join(_NAMES)}"
        )
    key = profile_key_of(loaded, precision)
    limits = limits_of(loaded, key.device, precision.compute)
    fitted_steps, held_back, runs_per_batch = _measure(loaded, settings, on_run)
    if len(fitted_steps) < MIN_DISTINCT_SHAPES:
        raise ConfigError(
            f"only {len(fitted_steps)} batches could be measured in {settings.seconds:g} s, too few for a "
            "fit; give it more time (`onbeat profile --seconds`)"
        )
    again = limits_of(loaded, key.device, precision.compute)
    if limits is not None and again is not None:  # a minute ago the machine may have been busy
        limits = best_limits(limits, again)
    target = FitTarget(
        model=model_spec_of(loaded.backend.model, loaded.backend.name),
        device=device_spec_of(key, limits),
        precision=precision,
    )
    profile = Profile(
        key=key,
        steps=(*fitted_steps, *held_back),
        fitted=fit_best(target, fitted_steps, held_back),
        limits=limits,
        engine={
            **loaded.runner.forward.settings,
            **{name: getattr(loaded.limits, name) for name in _SAID_LIMITS},
            "num_held_back": len(held_back),
            "runs_per_batch": round(runs_per_batch, 1),
        },
    )
    return ProfileResult(
        profile=profile,
        target=target,
        fitted_steps=fitted_steps,
        held_back=held_back,
        runs_per_batch=runs_per_batch,
    )


def limits_of(loaded: LoadedModel, device_id: str, number_format: str) -> MachineLimits | None:
    """Return measured limits where the device has no data sheet."""
    if device_id not in ("cpu", "cuda"):
        return None
    device = loaded.backend.device
    if device_id == "cpu":
        forward = loaded.runner.forward
        if not isinstance(forward, GivesProducts):
            raise ConfigError(
                f"the engine {forward.settings['backend']!r} gives no products to time; predict its steps by "
                "--step-time-profile FILE or none"
            )
        return run_apart(lambda: cpu_limits(device.num_threads, forward.products(), number_format))
    return gpu_limits(device, number_format)


_NAMES = [dtype.name for dtype in FORMATS]


def _measure(
    loaded: LoadedModel, settings: ProfileSettings, on_run: OnRun
) -> tuple[list[MeasuredStep], list[MeasuredStep], float]:
    """Return the steps to fit, those held back, and the runs of each batch."""
    limits = BatchLimits.of_scheduler(
        loaded.limits,
        max_context_tokens=settings.max_context_tokens,
        device_type=loaded.backend.device.device.type,
    )
    batches = dict.fromkeys(corner_batches(limits, settings.num_levels))
    batches |= dict.fromkeys(verify_batches(limits, settings.num_levels))
    batches |= dict.fromkeys(mixed_batches(limits, settings.num_mixed))
    to_test = dict.fromkeys(random_batches(limits, settings.num_held_back, seed=0))
    # States have room for as many drafts as were asked for, and no other runner takes those of the timer.
    most_drafts = loaded.limits.most_drafts if loaded.backend.model.state_numbers else MAX_DRAFTS
    most_drafts *= isinstance(loaded.runner, ModelRunner)
    batches, to_test = ({with_drafts(one, most_drafts): None for one in each} for each in (batches, to_test))
    num_to_fit = len(batches)
    batches |= to_test
    timer = StepTimer(loaded.runner, num_blocks=num_blocks_for([*batches], loaded.limits.block_size))
    try:
        steps = measure_in_rounds(timer.time, [*batches], settings.seconds, on_run)
    finally:
        timer.close()
    fitted_steps = [step for step in steps[:num_to_fit] if step is not None]
    held_back = [step for step in steps[num_to_fit:] if step is not None]
    return fitted_steps, held_back, timer.num_runs / len(batches)


_SAID_LIMITS = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


def measure_in_rounds(
    run: Callable[[MeasuredBatch], float],
    batches: Sequence[MeasuredBatch],
    seconds: float,
    on_run: OnRun = lambda _: None,
    *,
    max_rounds: int = 15,
) -> list[MeasuredStep | None]:
    """Return the median time of each batch, in their order; None where the time did not suffice.

    Every round goes through the batches in another order, so that neither the batch before nor a slow minute
    of the machine is always the same batch's lot.

    Parameters
    ----------
    seconds : the budget; measuring ends with the first run beyond it. Batches that had no run by then are
        left out.
    max_rounds : runs of each batch at most.
    """
    rng = np.random.default_rng(0)
    times: list[list[float]] = [[] for _ in batches]
    start = time.perf_counter()
    most_seconds = _COSTLY_SHARE * seconds / max(len(batches), 1)
    turns = ((turn, index) for turn in range(max_rounds) for index in rng.permutation(len(batches)).tolist())
    for turn, index in turns:
        if turn >= MIN_RUNS and sum(times[index]) > most_seconds:
            continue
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            break
        times[index].append(run(batches[index]))
        on_run(min(max(elapsed / seconds, turn / max_rounds), 1.0))
    return [
        MeasuredStep(batch.shape, median(runs)) if runs else None
        for batch, runs in zip(batches, times, strict=True)
    ]


_READ_BYTES = 2**27
"""Several times the largest cache, so that every pass reads memory."""
_quickest = partial(shortest, budget=0.1, least_runs=5)
_ROUNDS = 3
"""Over all numbers of rows: what else the machine does comes and goes."""
_ROWS_SECONDS = 0.01
"""For the products of each number of rows, in a round."""
_LONGEST_PRODUCT = 0.1
"""Seconds of a product from which on those of more rows are taken to cost in proportion."""


def cpu_limits(num_threads: int, products: RowProducts, number_format: str) -> MachineLimits:
    """Measure read bandwidth, and the rates of an engine's own products by their rows.

    Takes three quarters of a second. The best of several runs counts and not their mean: another program can
    only take time away.

    Parameters
    ----------
    num_threads : that read together.
    products : closed here.
    number_format : of the products; the key in the result.
    """
    try:
        bandwidth = _read_bandwidth(num_threads)
        seconds = {num_rows: products.run(num_rows) for num_rows in _counts_in_time(products)}
        for num_rows in (*seconds,) * _ROUNDS:
            seconds[num_rows] = min(seconds[num_rows], _shortest_product(products, num_rows))
    finally:
        products.close()
    peak = products.flops_per_row * max(num_rows / value for num_rows, value in seconds.items())
    rates = product_rates(
        seconds,
        flops_per_row=products.flops_per_row,
        reading_seconds=products.num_bytes / bandwidth,
        peak=peak,
    )
    return MachineLimits(memory_bandwidth=bandwidth, peak_flops={number_format: peak}, product_rates=rates)


def gpu_limits(
    device: DeviceConfig, number_format: str, *, read_bytes: int = 2**31, matrix_size: int = 8192
) -> MachineLimits:
    """Measure what a GPU without a data sheet reaches, in a fraction of a second.

    That is the read bandwidth, and the rate of a square matrix product.

    Parameters
    ----------
    number_format : of the product; the key in the result.
    read_bytes : several times the largest cache, so that every pass reads memory; less where memory is short.
    """
    import torch

    from onbeat.engine.torch.types import Fp8Matrix, torch_device, torch_dtype

    where, dtype = torch_device(device.device), torch_dtype(device.dtype)
    read_bytes = min(read_bytes, free_memory(device.device).num_bytes // 4)
    values = torch.ones(read_bytes // 4, dtype=torch.float32, device=where)
    # Random: tensor cores multiply numbers that are all alike faster than those of a model.
    left = torch.empty(matrix_size, matrix_size, dtype=dtype, device=where).normal_()

    def seconds(work: Callable[[], object]) -> float:
        def done() -> None:
            work()
            wait_for(device.device)

        return _quickest(done)

    with torch.inference_mode():
        read = seconds(lambda: torch.amax(values))
        if number_format == "fp8":
            values, scales = Fp8Matrix.of(left)
            both = values, values.t(), scales, scales.t()
            product = seconds(lambda: torch._scaled_mm(*both, out_dtype=dtype))
        else:
            product = seconds(lambda: torch.mm(left, left))
    return MachineLimits(
        memory_bandwidth=values.nbytes / read, peak_flops={number_format: 2 * matrix_size**3 / product}
    )


def _read_bandwidth(num_threads: int) -> float:
    """Return the bytes per second at which threads look for the largest number; NumPy lets go of the lock."""
    parts = np.array_split(np.ones(_READ_BYTES // 4, np.float32), num_threads)
    with ThreadPoolExecutor(num_threads) as threads:
        return _READ_BYTES / _quickest(lambda: list(threads.map(np.max, parts)))


def _shortest_product(products: RowProducts, num_rows: int) -> float:
    """Return the seconds of the quickest of some runs."""
    best = products.run(num_rows)
    deadline = time.perf_counter() + _ROWS_SECONDS
    while time.perf_counter() < deadline:
        best = min(best, products.run(num_rows))
    return best


def _counts_in_time(products: RowProducts) -> Iterator[int]:
    """Yield numbers of rows, up to the first whose product, which is run to warm up, takes long."""
    for num_rows in ROW_COUNTS:
        yield num_rows
        if products.run(num_rows) > _LONGEST_PRODUCT:
            return


def best_limits(first: MachineLimits, second: MachineLimits) -> MachineLimits:
    """Return the higher of two measurements, each limit by itself; both are of the same number formats."""
    return MachineLimits(
        memory_bandwidth=max(first.memory_bandwidth, second.memory_bandwidth),
        peak_flops={name: max(rate, second.peak_flops[name]) for name, rate in first.peak_flops.items()},
        product_rates=best_rates(first.product_rates, second.product_rates),
    )
