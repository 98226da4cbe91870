"""Where step times inside vLLM come from: a profile, a measurement at the start, or a guess."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.description import MeasuredDescription
from onbeat.perfmodel.device_spec import known_device
from onbeat.perfmodel.fitted import MIN_DISTINCT_SHAPES, FittedModel, NNLSForm, fit_form
from onbeat.perfmodel.logged_step import StepOrigin
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import precision_by_weights
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.profile import EngineValue, Profile, ProfileKey, ServerTerms
from onbeat.perfmodel.profile_file import profile_path, profiles_dir, read_profile, write_profile
from onbeat.perfmodel.residual import ResidualModel
from onbeat.perfmodel.shapes import MeasuredStep, shape_matrix
from onbeat.version import __version__
from onbeat.vllm.plugin_config import PluginConfig

logger = logging.getLogger("onbeat.vllm")

_GUESSED_SPREAD = 0.1
"""Standard deviation of the log of measured / predicted, before anything was measured."""
_GUESSED = (
    "step times: guessed, and corrected by the first steps that run (%s). Objectives may be missed until "
    "then; `onbeat profile --from` makes a profile, which --profile names"
)


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """Where steps are kept that were measured at a start, and whose they are.

    Attributes
    ----------
    settings : of vLLM, on which step times hang beside what the key says.
    steps_ahead : that vLLM plans.
    """

    path: Path
    key: ProfileKey
    settings: Mapping[str, EngineValue]
    steps_ahead: int

    def read(self) -> Profile | None:
        """Return what an earlier start has measured; None where there is nothing, or nothing of use."""
        if not self.path.is_file():
            return None
        try:
            return read_profile(self.path, self.key)
        except ConfigError as error:
            logger.warning("step times: measured again, because the kept ones cannot be used: %s", error)
            return None

    def keep(self, steps: Sequence[MeasuredStep], seconds: float) -> MeasuredDescription:
        """Fit measured steps, keep them for later starts and return what predicts steps from now on.

        Parameters
        ----------
        seconds : that measuring has taken.

        Raises
        ------
        ConfigError : too few steps that differ.
        """
        fitted = _fit(steps, "what was measured at the start")
        profile = Profile(
            key=self.key,
            onbeat_version=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            steps=steps,
            fitted=fitted,
            server=ServerTerms(steps_ahead=self.steps_ahead),
            engine=self.settings,
        )
        where = f"kept as {self.path}"
        try:
            write_profile(self.path, profile)
        except OSError as error:
            where = f"not kept, since {self.path} cannot be written ({error.strerror})"
        logger.info(
            "step times: measured in %.0f s by %d steps, median error %.1f %%; %s",
            *(seconds, len(steps), 100 * fitted.errors.p50, where),
        )
        return MeasuredDescription(fitted=fitted)


def kept_steps(origin: StepOrigin, settings: Mapping[str, EngineValue]) -> KeptSteps:
    """Return where the steps of an engine are kept: one file for each model, machine and setting.

    Parameters
    ----------
    origin : whose steps they are.
    """
    name = origin.device_name or "unknown"
    device = origin.device or known_device(name) or re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    key = ProfileKey(
        model=_model_name(str(origin.model)),
        device=device,
        device_name=name,
        precision=precision_by_weights(origin.dtype or "bf16"),
        parallelism=Parallelism(tensor=origin.tensor_parallel or 1),
        threads=len(os.sched_getaffinity(0)) if device == "cpu" else 1,
        backend="vllm",
        engine_version=origin.engine_version,
    )
    path = profile_path(profiles_dir() / "vllm", key)
    steps_ahead = origin.steps_ahead or 0
    text = json.dumps([dict(settings), steps_ahead], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return KeptSteps(path.with_name(f"{path.stem}_{digest}.json"), key, settings, steps_ahead)


def _model_name(model: str) -> str:
    """Return what simulations call a model; its own name where they do not know it."""
    try:
        return find_model_spec(model).name
    except ConfigError:
        return model


def step_times(
    config: PluginConfig, kept: KeptSteps, hindrance: str | None
) -> tuple[MeasuredDescription | None, bool]:
    """Return what predicts steps, None for a guess, and whether steps are to be measured now.

    Parameters
    ----------
    hindrance : why they cannot be measured here; None where they can.

    Raises
    ------
    ConfigError : the profile cannot be read or has too few steps, or steps cannot be measured as asked for.
    """
    if config.profile is not None:
        logger.info("step times: from the profile %s, corrected by the steps that run", config.profile)
        return fitted_to(read_profile(config.profile).steps, config.profile), False
    if config.calibrate == "always" and hindrance is not None:
        raise ConfigError(
            f"calibrate is 'always', but steps cannot be measured at this start: {hindrance}. Leave it out, "
            "and name a profile (`onbeat profile --from` makes one of a running server's steps)"
        )
    if config.calibrate == "off" or hindrance is not None:
        logger.warning(_GUESSED, hindrance or "calibrate is off")
        return None, False
    if config.calibrate == "auto" and (profile := kept.read()) is not None:
        logger.info("step times: as an earlier start measured them (%s), corrected since", kept.path)
        return fitted_to(profile.steps, kept.path), False
    logger.info(
        "step times: guessed at first, and measured by requests of our own while nobody is served, in "
        "about half a minute"
    )
    return None, True


def predictor(known: MeasuredDescription | None) -> Predictor:
    """Return what predicts steps and learns from each one.

    Parameters
    ----------
    known : what it begins with; None for no machine in particular: it learns the pace of the real one.
    """
    if known is not None:
        return known.predictor()
    return Predictor(guessed_seconds, ResidualModel.log_normal(_GUESSED_SPREAD)).with_learning()


def fitted_to(steps: Sequence[MeasuredStep], path: Path) -> MeasuredDescription:
    """Return a model of measured steps that needs to know neither model nor device.

    Raises
    ------
    ConfigError : too few steps that differ.
    """
    return MeasuredDescription(fitted=_fit(steps, f"the profile {path}"))


def _fit(steps: Sequence[MeasuredStep], what: str) -> FittedModel:
    shapes = [step.shape for step in steps]
    if not steps or len(np.unique(shape_matrix(shapes), axis=0)) < MIN_DISTINCT_SHAPES:
        raise ConfigError(
            f"{what} has fewer than {MIN_DISTINCT_SHAPES} steps that differ; measure more of them"
        )
    return fit_form(NNLSForm(), "nnls", shapes, [step.seconds for step in steps])


def guessed_seconds(shape: BatchShape) -> float:
    """Return the step time of no machine in particular: `OnlineCorrection` finds the pace of the real one."""
    pairs = shape.query_key_pairs + shape.decode_context_tokens
    return 0.01 + 1e-4 * shape.num_new_tokens + 1e-8 * pairs
