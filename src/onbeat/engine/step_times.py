"""What predicts step times in this run: decided once at start, and said."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.engine.busy import OthersMeter
from onbeat.engine.loaded_model import LoadedModel, profile_key_of
from onbeat.engine.profiling.first_look import time_both
from onbeat.engine.profiling.profiler import QUICK, limits_of, profile_model
from onbeat.engine.progress import Detail, OnProgress
from onbeat.engine.speculation.build import DraftModelBuilder
from onbeat.engine.step_time_spec import device_spec_of, model_spec_of, precision_of
from onbeat.engine.step_watch import StepWatch
from onbeat.perfmodel.description import AnyDescription, SpeculativeDescription, StepTimeDescription
from onbeat.perfmodel.fitted import FittedModel
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.profile import MachineLimits, Profile
from onbeat.perfmodel.profile_file import find_profile, profile_path, profiles_dir, read_profile
from onbeat.perfmodel.speculative import BatchOperations, SpeculativeOperations, SpeculativeStepTime
from onbeat.perfmodel.utilisation import StepOperations
from onbeat.scheduler.replica.idle_check import ms_text


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
    if loaded.stands_in_for is not None:
        return _of_stand_in(loaded.stands_in_for)
    precision = precision_of(loaded.device.dtype, loaded.weights_format, loaded.embedding_format)
    if precision is None:
        reason = f"no step-time model knows {loaded.device.dtype.name}"
        if source != "auto":
            raise ConfigError(f"{reason}; choose --step-time-profile none, or another dtype")
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
        was_measured=False,
    )
    return StepTime(model, watch, what)


class _Chooser:
    def __init__(self, loaded: LoadedModel, precision: Precision, on_progress: OnProgress) -> None:
        self._loaded = loaded
        self._precision = precision
        self._say = on_progress
        self._key = profile_key_of(loaded, precision)
        self._spec = model_spec_of(loaded.config, loaded.name)

    def choose(self, source: str) -> StepTime:
        match source:
            case "auto":
                return self._from_cache()
            case "calibrate":
                return self._calibrated()
            case "roofline":
                return self._roofline(Detail("as asked for"), is_timed=False)
            case file:
                return self._profiled(read_profile(Path(file), self._key), Path(file))

    def _from_cache(self) -> StepTime:
        directory = profiles_dir()
        try:
            profile = find_profile(directory, self._key)
        except ConfigError as error:  # a file of an older onbeat must not keep the server from starting
            return self._roofline(str(error))
        if profile is not None:
            return self._profiled(profile, profile_path(directory, self._key))
        return self._roofline(Detail("there is no profile of this model on this machine"))

    def _profiled(self, profile: Profile, path: Path) -> StepTime:
        self._say(
            Detail(f"step times: from the profile {path} of {profile.created} ({_describe(profile.fitted)})")
        )
        return replace(self._fitted(profile.fitted, profile.limits), origin="as measured by `onbeat profile`")

    def _calibrated(self) -> StepTime:
        self._say(f"step times: calibrating for {QUICK.seconds:g} s")
        start = time.monotonic()
        others = OthersMeter(self._loaded.device.num_threads)
        profile = profile_model(self._loaded, QUICK).profile
        seconds = time.monotonic() - start
        self._say(Detail(f"step times: calibrated in {seconds:.1f} s ({_describe(profile.fitted)})"))
        step_time = replace(self._fitted(profile.fitted, profile.limits), origin="as measured now")
        return self._measured_beside(others, step_time)

    def _fitted(self, fitted: FittedModel, limits: MachineLimits | None) -> StepTime:
        return self._learning(self._target(limits, fitted))

    def _roofline(self, reason: str, *, is_timed: bool = True) -> StepTime:
        others = OthersMeter(self._loaded.device.num_threads)
        target = self._target(limits_of(self._loaded, self._key.device, self._precision.compute))
        origin, timed = "estimated", ""
        if is_timed:
            steps = time_both(self._loaded, target.predictor())
            target, origin = target.corrected(steps), "timed now"
            took = ", ".join(f"{step.shape.num_new_tokens} in {ms_text(step.seconds)}" for step in steps)
            timed = f"by steps timed now (tokens: {took}) and "
        said = f"step times: estimated from hardware limits, corrected {timed}while serving ({reason})"
        self._say(Detail(said) if isinstance(reason, Detail) else said)
        origin += f"; `onbeat profile {self._loaded.name}` measures it in two minutes"
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

    def _target(self, limits: MachineLimits | None, fitted: FittedModel | None = None) -> StepTimeDescription:
        device = device_spec_of(self._key, limits)
        return StepTimeDescription(model=self._spec, device=device, precision=self._precision, fitted=fitted)

    def _learning(self, target: StepTimeDescription) -> StepTime:
        device, proposer = target.device, self._loaded.proposer
        draft = self._draft_model(proposer, target) if isinstance(proposer, DraftModelBuilder) else None
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

    def _draft_model(self, proposer: DraftModelBuilder, target: StepTimeDescription) -> StepTimeDescription:
        """Describe a second model: by its own profile where there is one that fits, else by the roofline."""
        backend = proposer.backend
        precision = precision_of(self._loaded.device.dtype, backend.weights_format, backend.embedding_format)
        assert precision is not None, "the model itself has one, of the same type"
        spec = model_spec_of(proposer.draft_config, proposer.name)
        return replace(
            target, model=spec, precision=precision, fitted=self._draft_fit(proposer.name, precision, target)
        )

    def _draft_fit(self, name: str, precision: Precision, target: StepTimeDescription) -> FittedModel | None:
        if target.fitted is None:  # then the roofline is asked for, or there is nothing better
            return None
        key = replace(self._key, model=name, precision=precision)
        if key == self._key:
            return target.fitted
        try:
            profile = find_profile(profiles_dir(), key)
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
