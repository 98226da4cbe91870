"""What predicts step times in this run: decided once at start, and said.

An engine that starts without a profile times a decode and a prompt, for estimates are several times off.
Every step that ran is judged: what it reached of the device, and whether its time still follows the model.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_stats import StepStats
from onbeat.core.step_time import StepTimeModel
from onbeat.engine.backends.base import CheckpointBackend
from onbeat.engine.loaded_model import LoadedModel, profile_key_of
from onbeat.engine.profiling.batches import TIMES_AT_ONCE, BatchRow, MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer
from onbeat.engine.profiling.profiler import QUICK, limits_of, profile_model
from onbeat.engine.progress import Detail, OnProgress
from onbeat.engine.step_time_spec import device_spec_of, model_spec_of
from onbeat.perfmodel import profile as profiles
from onbeat.perfmodel.fitted import FittedModel
from onbeat.perfmodel.models import AnyDescription, SpeculativeDescription, StepTimeDescription
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.recent import Drift
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.perfmodel.speculative import SpeculativeStepTime
from onbeat.perfmodel.utilisation import BatchOperations, SpeculativeOperations, StepOperations
from onbeat.scheduler.replica.idle_check import ms_text

logger = logging.getLogger("onbeat.engine")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Who predicts steps and who judges them; None where that is off."""

    model: Predictor | SpeculativeStepTime | None
    watch: StepWatch | None
    description: AnyDescription | None = None
    """What the model was made from, for the record of a run."""
    was_busy: bool = False
    """Whether other programs took the processors while it was measured at this start."""
    origin: str = "predicted"
    """How well its times are known, in words."""


def choose_step_time(source: str, loaded: LoadedModel, on_progress: OnProgress) -> StepTime:
    """Find or make the step-time model.

    Parameters
    ----------
    source : `auto`, `calibrate`, `roofline`, `none`, or the file of a profile
        (`EngineConfig.step_time_profile`).
    loaded : the model, not yet in use.
    on_progress : told what was chosen, and why.

    Raises
    ------
    ConfigError : the profile that was asked for cannot be used, or the number format has no step-time model.
    """
    if source == "none":
        on_progress("step times: not predicted")
        return StepTime(None, None)
    if loaded.backend.stands_in_for is not None:
        return _of_stand_in(loaded.backend.stands_in_for)
    precision = loaded.backend.precision()
    if precision is None or loaded.backend.why_whole is not None:
        reason = f"no step-time model knows {loaded.backend.device.dtype.name}"
        if loaded.backend.why_whole is not None:
            reason = f"prompts are computed whole, since {loaded.backend.why_whole}"
        if source != "auto":
            raise ConfigError(f"{reason}; choose --step-time-profile none")
        on_progress(f"step times: not predicted, {reason}")
        return StepTime(None, None)
    return _Chooser(loaded, precision, on_progress).choose(source)


def _of_stand_in(what: StepTimeDescription) -> StepTime:
    """Return the roofline that the steps of a stand-in follow; it learns all the same."""
    model, tensor = what.predictor(), what.parallelism.tensor
    watch = StepWatch(
        StepOperations(what.model, what.precision),
        memory_bandwidth=tensor * what.device.memory_bandwidth,
        peak_flops=tensor * what.device.peak(what.precision.compute),
        drift=lambda: model.drift,
    )
    return StepTime(model, watch, what)


class _Chooser:
    def __init__(self, loaded: LoadedModel, precision: Precision, on_progress: OnProgress) -> None:
        self._loaded = loaded
        self._precision = precision
        self._say = on_progress
        self._key = profile_key_of(loaded, precision)
        self._spec = model_spec_of(loaded.backend.model, loaded.backend.name)

    def choose(self, source: str) -> StepTime:
        match source:
            case "auto":
                return self._from_cache()
            case "calibrate":
                return self._calibrated()
            case "roofline":
                return self._roofline(Detail("as asked for"), is_timed=False)
            case file:
                return self._profiled(profiles.read_profile(Path(file), self._key), Path(file))

    def _from_cache(self) -> StepTime:
        directory = profiles.profiles_dir()
        try:
            profile = profiles.find_profile(directory, self._key)
        except ConfigError as error:  # a file of an older onbeat must not keep the server from starting
            return self._roofline(str(error))
        if profile is not None:
            return self._profiled(profile, profiles.profile_path(directory, self._key))
        return self._roofline(Detail("there is no profile of this model on this machine"))

    def _profiled(self, profile: profiles.Profile, path: Path) -> StepTime:
        self._say(
            Detail(f"step times: from the profile {path} of {profile.created} ({_describe(profile.fitted)})")
        )
        return replace(self._fitted(profile.fitted, profile.limits), origin="as measured by `onbeat profile`")

    def _calibrated(self) -> StepTime:
        self._say(f"step times: calibrating for {QUICK.seconds:g} s")
        start = time.monotonic()
        others = OthersMeter(self._loaded.backend.device.num_threads)
        profile = profile_model(self._loaded, QUICK).profile
        seconds = time.monotonic() - start
        self._say(Detail(f"step times: calibrated in {seconds:.1f} s ({_describe(profile.fitted)})"))
        step_time = replace(self._fitted(profile.fitted, profile.limits), origin="as measured now")
        return self._measured_beside(others, step_time)

    def _fitted(self, fitted: FittedModel, limits: profiles.MachineLimits | None) -> StepTime:
        return self._learning(self._target(limits, fitted))

    def _roofline(self, reason: str, *, is_timed: bool = True) -> StepTime:
        others = OthersMeter(self._loaded.backend.device.num_threads)
        target = self._target(limits_of(self._loaded, self._key.device, self._precision.compute))
        origin, timed = "estimated", ""
        if is_timed:
            steps = time_both(self._loaded, target.predictor())
            target, origin = target.corrected(steps), "timed now"
            took = ", ".join(f"{step.shape.num_new_tokens} in {ms_text(step.seconds)}" for step in steps)
            timed = f"by steps timed now (tokens: {took}) and "
        said = f"step times: estimated from hardware limits, corrected {timed}while serving ({reason})"
        self._say(Detail(said) if isinstance(reason, Detail) else said)
        origin += f"; `onbeat profile {self._loaded.backend.name}` measures it in two minutes"
        return self._measured_beside(others, replace(self._learning(target), origin=origin))

    def _measured_beside(self, others: OthersMeter, step_time: StepTime) -> StepTime:
        """Say so if what was measured is that of a busy machine."""
        found = others.read()
        if self._key.device != "cpu" or found is None or not found.is_busy:
            return step_time
        self._say(
            f"the machine is busy: {found}. Answers are slower for it, and first predictions too long. Stop "
            "these programs if you can"
        )
        return replace(step_time, was_busy=True)

    def _target(
        self, limits: profiles.MachineLimits | None, fitted: FittedModel | None = None
    ) -> StepTimeDescription:
        device = device_spec_of(self._key, limits)
        return StepTimeDescription(model=self._spec, device=device, precision=self._precision, fitted=fitted)

    def _learning(self, target: StepTimeDescription) -> StepTime:
        device, proposer = target.device, self._loaded.proposer
        second = None if proposer is None else proposer.backend
        draft = None if second is None else self._draft_model(second, target)
        description: AnyDescription = target
        operations: BatchOperations = StepOperations(self._spec, self._precision)
        if draft is not None:
            description = SpeculativeDescription(target=target, draft=draft)
            operations = SpeculativeOperations(operations, StepOperations(draft.model, draft.precision))
        model = description.predictor()
        watch = StepWatch(
            operations,
            memory_bandwidth=device.memory_bandwidth,
            peak_flops=device.peak(self._precision.compute),
            drift=lambda: model.drift,
            was_measured=target.fitted is not None,
        )
        return StepTime(model, watch, description)

    def _draft_model(self, draft: CheckpointBackend, target: StepTimeDescription) -> StepTimeDescription:
        """Describe a second model: by its own profile where there is one that fits, else by the roofline."""
        precision = draft.precision()
        assert precision is not None, "the model itself has one, of the same type"
        fitted = self._draft_fit(draft.name, precision, target)
        return replace(
            target, model=model_spec_of(draft.model, draft.name), precision=precision, fitted=fitted
        )

    def _draft_fit(self, name: str, precision: Precision, target: StepTimeDescription) -> FittedModel | None:
        if target.fitted is None:  # then the roofline is asked for, or there is nothing better
            return None
        key = replace(self._key, model=name, precision=precision)
        if key == self._key:
            return target.fitted
        try:
            profile = profiles.find_profile(profiles.profiles_dir(), key)
        except ConfigError as error:  # as in `_from_cache`
            self._say(f"step times of the draft model {name}: estimated from hardware limits ({error})")
            return None
        if profile is None:
            self._say(
                f"step times of the draft model {name}: estimated from hardware limits, corrected while "
                "serving; `onbeat profile` measures them"
            )
            return None
        return profile.fitted


def _describe(fitted: FittedModel) -> str:
    errors = fitted.errors
    return f"{fitted.method} fit, error {errors.p50:.1%} at P50, {errors.p90:.1%} at P90"


PROC_STAT = Path("/proc/stat")
BUSY_CORES = 0.25
"""Cores that others take of those that this process needs, from which on the machine counts as busy."""
_IDLE = slice(3, 5)
"""Among the counts of a core: idle, and idle while something is read."""
_STEAL = 8
"""The counts to the time that other virtual machines took; those behind it are contained in others."""
_SHORTEST = 0.1
"""Seconds; the system counts time in hundredths, and less than some of them says nothing."""


@dataclass(frozen=True, slots=True)
class Others:
    """What other programs took of the processors over a while."""

    num_cores: float
    """As cores that they kept busy all the while."""
    num_allowed: int
    """Cores that this process may run on."""
    num_threads: int
    """Threads that it computes with."""

    @property
    def is_busy(self) -> bool:
        """Whether what others left was too little for all threads: a step waits for its slowest one."""
        return self.num_threads + self.num_cores - self.num_allowed > BUSY_CORES

    def __str__(self) -> str:
        return f"other programs take {self.num_cores:.1f} of {self.num_allowed} cores"


class OthersMeter:
    """Counts from its making on what others than this process take of the cores that it may run on.

    Parameters
    ----------
    num_threads : that this process computes with.
    stat : the system's counts, /proc/stat.
    clock, own_seconds : time that passes, and processor time of this process.
    cores : what this process may run on; None asks the system.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        stat: Path = PROC_STAT,
        clock: Callable[[], float] = time.monotonic,
        own_seconds: Callable[[], float] = time.process_time,
        cores: Set[int] | None = None,
    ) -> None:
        self._num_threads = num_threads
        self._stat = stat
        self._clock = clock
        self._own_seconds = own_seconds
        self._cores = os.sched_getaffinity(0) if cores is None else cores
        self._start = (clock(), own_seconds(), self._all_seconds())

    def read(self) -> Others | None:
        """Return what others took; None where the system does not tell, or too little time has passed."""
        start, own, before = self._start
        wall, after = self._clock() - start, self._all_seconds()
        if before is None or after is None or wall < _SHORTEST:
            return None
        others = max(after - before - (self._own_seconds() - own), 0.0) / wall
        return Others(min(others, float(len(self._cores))), len(self._cores), self._num_threads)

    def _all_seconds(self) -> float | None:
        """Return the time that the cores were not idle, seconds since the machine's start, if known."""
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return None
        ticks, num_cores = 0, 0
        for name, *counts in (line.split() for line in lines if line.startswith("cpu")):
            if name[3:].isdigit() and int(name[3:]) in self._cores:
                values = [int(count) for count in counts[:_STEAL]]
                ticks += sum(values) - sum(values[_IDLE])
                num_cores += 1
        return ticks / os.sysconf("SC_CLK_TCK") if num_cores == len(self._cores) else None


_SETTLED_SECONDS = 60.0
"""A machine that other work disturbs comes and goes; what lasts this long is said."""


class StepWatch:
    """Fills in what a step reached, and says in the log when step times leave their model and come back.

    Parameters
    ----------
    operations : operations and bytes of a batch.
    memory_bandwidth : the device's peak, bytes per second.
    peak_flops : the device's peak in the engine's number format, operations per second.
    drift : asks the step-time model whether it still describes the machine; None where nobody predicts.
    was_measured : whether the model was fitted to this machine. What was only computed is off from the start,
        which is no news.
    """

    def __init__(
        self,
        operations: BatchOperations,
        *,
        memory_bandwidth: float,
        peak_flops: float,
        drift: Callable[[], Drift | None] | None = None,
        was_measured: bool = False,
    ) -> None:
        self._operations = operations
        self._seconds_per_byte = 1.0 / memory_bandwidth
        self._seconds_per_flop = 1.0 / peak_flops
        self._drift = drift
        self._was_measured = was_measured
        self._is_drifting = False
        self._changed: float | None = None

    def judge(self, stats: StepStats) -> None:
        """Set `mbu`, `mfu` and `is_drifting`; the first two stay None for a step that took no time."""
        seconds = stats.end - stats.start
        if seconds > 0:
            stats.mbu = self._operations.bytes_read(stats.shape) * self._seconds_per_byte / seconds
            stats.mfu = self._operations.flops(stats.shape) * self._seconds_per_flop / seconds
        if self._drift is not None and (drift := self._drift()) is not None:
            stats.is_drifting = drift.is_alarming
            if self._was_measured:
                self._follow(drift, stats.end)

    def _follow(self, drift: Drift, now: float) -> None:
        if drift.is_alarming == self._is_drifting:
            self._changed = None
            return
        if self._changed is None:
            self._changed = now
        if now - self._changed < _SETTLED_SECONDS:
            return
        self._is_drifting = drift.is_alarming
        self._changed = None
        if not drift.is_alarming:
            logger.warning("steps take what their profile says again (%.2f times)", drift.ratio)
            return
        cause = "something else loads the machine, or it" if drift.ratio > 1 else "the machine"
        logger.warning(
            "steps take %.2f times what their profile says (before it is corrected): %s has changed; "
            "`onbeat profile` measures it again",
            drift.ratio,
            cause,
        )


_MOST_TOKENS = 2048
"""Of the prompt; a decode reads half as many."""
_LONG_DECODE, _FEW_TOKENS = 0.25, 16
"""Seconds of a decode from which on a prompt has these: nobody knows yet how long more would take."""
_SHORTEST_PROMPT, _DECODES = 0.03, 2
"""Seconds, and decodes: a prompt that is to take as long does not only read weights."""
_RUNS, _SECONDS = 3, 0.4
"""Of a batch at most, where one run is not longer."""


def time_both(loaded: LoadedModel, model: StepTimeModel) -> list[MeasuredStep]:
    """Time a decode and a prompt: about a second in all, and where a decode takes longer, some ten of them.

    Parameters
    ----------
    loaded : the model, not yet in use.
    model : the estimate, which says how long a prompt may be.
    """
    limits, samples = loaded.limits, loaded.backend.model.has_head
    in_model, in_cache = limits.max_model_len - TIMES_AT_ONCE, limits.num_blocks * limits.block_size
    longest = max(min(in_model, in_cache, limits.max_num_batched_tokens, _MOST_TOKENS), 2)
    decode = MeasuredBatch((BatchRow(longest // 2, 1, samples),))
    timer = StepTimer(loaded.runner, num_blocks=-(-longest // limits.block_size))
    try:
        seconds = (first := _time(timer, decode)).seconds
        estimate = max(_SHORTEST_PROMPT, _DECODES * seconds) * model.step_time(decode.shape) / seconds
        most = longest if seconds < _LONG_DECODE else min(longest, _FEW_TOKENS)
        tokens = min(max(model.max_chunk_tokens(BatchShape(), 0, estimate), 2), most)
        return [first, _time(timer, MeasuredBatch((BatchRow(0, tokens, samples),)))]
    finally:
        timer.close()


def _time(timer: StepTimer, batch: MeasuredBatch) -> MeasuredStep:
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while not times or (len(times) < _RUNS and time.perf_counter() < end):
        times.append(timer.time(batch))
    return MeasuredStep(batch.shape, median_low(times))
