"""The whole of a profile: measure limits and batches on a loaded model, fit, test.

Batches are measured against noise: in interleaved rounds of random order, and by the median of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.engine.forward import GivesProducts
from onbeat.engine.loaded_model import LoadedModel, profile_key_of
from onbeat.engine.profiling.batches import (
    BatchLimits,
    MeasuredBatch,
    corner_batches,
    mixed_batches,
    random_batches,
    verify_batches,
)
from onbeat.engine.profiling.limits import best_limits, cpu_limits, gpu_limits
from onbeat.engine.profiling.measure import StepTimer, num_blocks_for
from onbeat.engine.step_time_spec import FORMATS, device_spec_of, model_spec_of
from onbeat.perfmodel.fitted import MIN_DISTINCT_SHAPES, FitTarget, fit_best
from onbeat.perfmodel.profile import MachineLimits, Profile
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.version import __version__

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
    seed : of the held-back batches.
    """

    seconds: float
    num_levels: int
    num_mixed: int
    num_held_back: int
    max_context_tokens: int
    seed: int = 0


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
    """Mean; under `campaign.MIN_RUNS` the medians still follow disturbances."""


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
            "fit; give it more time"
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
        onbeat_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        steps=(*fitted_steps, *held_back),
        fitted=fit_best(target, fitted_steps, held_back),
        limits=limits,
        engine=_engine_settings(loaded, len(held_back), runs_per_batch),
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
        return cpu_limits(device.num_threads, forward.products(), number_format)
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
    num_to_fit = len(batches)
    batches |= dict.fromkeys(random_batches(limits, settings.num_held_back, settings.seed))
    timer = StepTimer(loaded.runner, num_blocks=num_blocks_for([*batches], loaded.limits.block_size))
    try:
        steps = Campaign(settings.seconds).measure(timer.time, [*batches], on_run)
    finally:
        timer.close()
    fitted_steps = [step for step in steps[:num_to_fit] if step is not None]
    held_back = [step for step in steps[num_to_fit:] if step is not None]
    return fitted_steps, held_back, timer.num_runs / len(batches)


def _engine_settings(
    loaded: LoadedModel, num_held_back: int, runs_per_batch: float
) -> dict[str, str | int | float | bool | None]:
    limits = loaded.limits
    return {
        **loaded.runner.forward.settings,
        "block_size": limits.block_size,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "num_held_back": num_held_back,
        "runs_per_batch": round(runs_per_batch, 1),
    }


@dataclass(frozen=True, slots=True)
class Campaign:
    """How long to measure.

    Parameters
    ----------
    seconds : the budget; measuring ends with the first run beyond it. Batches that had no run by then are
        left out.
    max_rounds : runs of each batch at most.
    """

    seconds: float
    max_rounds: int = 15
    seed: int = 0

    def measure(
        self,
        run: Callable[[MeasuredBatch], float],
        batches: Sequence[MeasuredBatch],
        on_run: OnRun = lambda _: None,
    ) -> list[MeasuredStep | None]:
        """Return the median time of each batch, in their order; None where the time did not suffice.

        Every round goes through the batches in another order, so that neither the batch before nor a slow
        minute of the machine is always the same batch's lot.
        """
        rng = np.random.default_rng(self.seed)
        times: list[list[float]] = [[] for _ in batches]
        start = time.perf_counter()
        fair_share = self.seconds / max(len(batches), 1)
        for round_index in range(self.max_rounds):
            for index in rng.permutation(len(batches)).tolist():
                if round_index >= MIN_RUNS and sum(times[index]) > _COSTLY_SHARE * fair_share:
                    continue
                elapsed = time.perf_counter() - start
                if elapsed >= self.seconds:
                    return _medians(batches, times)
                times[index].append(run(batches[index]))
                by_time = elapsed / self.seconds
                by_rounds = round_index / self.max_rounds
                on_run(min(max(by_time, by_rounds), 1.0))
        return _medians(batches, times)


def _medians(batches: Sequence[MeasuredBatch], times: list[list[float]]) -> list[MeasuredStep | None]:
    return [
        MeasuredStep(batch.shape, median(runs)) if runs else None
        for batch, runs in zip(batches, times, strict=True)
    ]
