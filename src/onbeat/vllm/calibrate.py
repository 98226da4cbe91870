"""Where step times inside vLLM come from: a profile, a measurement at the start, or a guess."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.description import MeasuredDescription
from onbeat.perfmodel.device_spec import known_device
from onbeat.perfmodel.fitted import MIN_DISTINCT_SHAPES, FittedModel, NNLSForm, fit_form
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
_FORMATS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "fp8": "fp8"}
"""Of weights; of others the user says what they are."""


def profile_key(vllm_config: Any) -> ProfileKey:
    """Return whose steps they are, as vLLM says of itself."""
    import vllm
    from vllm.platforms import current_platform

    model, name = vllm_config.model_config, str(current_platform.get_device_name())
    device = known_device(name) or re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if current_platform.is_cpu():
        device = "cpu"
    try:
        model_name = find_model_spec(str(model.model)).name
    except ConfigError:
        model_name = str(model.model)  # simulations do not know it
    return ProfileKey(
        model=model_name,
        device=device,
        device_name=name,
        precision=precision_by_weights(_FORMATS.get(str(model.quantization or model.dtype), "bf16")),
        parallelism=Parallelism(tensor=int(vllm_config.parallel_config.tensor_parallel_size)),
        threads=len(os.sched_getaffinity(0)) if device == "cpu" else 1,
        backend="vllm",
        engine_version=str(vllm.__version__),
    )


def settings(scheduler: Any) -> dict[str, EngineValue]:
    """Return what vLLM is set to and step times hang on, beside what the key says."""
    config = scheduler.vllm_config
    compilation = getattr(config, "compilation_config", None)
    drafts = getattr(config, "speculative_config", None)
    speculation: dict[str, EngineValue] = {}
    if drafts is not None:
        names = (drafts.method, drafts.num_speculative_tokens, getattr(drafts, "model", None))
        speculation["drafts"] = " ".join(str(each) for each in names)
    return speculation | {
        "max_num_batched_tokens": int(scheduler.max_num_scheduled_tokens),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "steps_ahead": int(bool(config.scheduler_config.async_scheduling)),
        "cuda_graphs": str(getattr(compilation, "cudagraph_mode", None)),
        "capture_sizes": ",".join(str(size) for size in capture_sizes(scheduler)),
        "kv_dtype": str(getattr(getattr(config, "cache_config", None), "cache_dtype", "auto")),
        "is_eager": bool(getattr(config.model_config, "enforce_eager", False)),
    }


def capture_sizes(scheduler: Any) -> list[int]:
    """Return the batch sizes for which vLLM has CUDA graphs: others are padded to the next."""
    compilation = getattr(scheduler.vllm_config, "compilation_config", None)
    return sorted(int(size) for size in getattr(compilation, "cudagraph_capture_sizes", None) or ())


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """The steps that an earlier start of the same engine has measured.

    Attributes
    ----------
    settings : of vLLM; what was measured with others is no use.
    """

    key: ProfileKey
    settings: Mapping[str, EngineValue]

    @property
    def path(self) -> Path:
        """Where they are kept: one file for each model and machine."""
        return profile_path(profiles_dir() / "vllm", self.key)

    def read(self) -> Profile | None:
        """Return them; None where there are none, or none of use."""
        if not self.path.is_file():
            return None
        try:
            profile = read_profile(self.path, self.key)
        except ConfigError as error:
            logger.warning("step times: measured again, because the kept ones cannot be used: %s", error)
            return None
        return profile if profile.engine == self.settings else None

    def keep(self, steps: Sequence[MeasuredStep], seconds: float) -> FittedModel:
        """Fit measured steps, keep them for later starts and return what was fitted.

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
            server=ServerTerms(steps_ahead=int(self.settings["steps_ahead"] or 0)),
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
        return fitted


def step_times(
    config: PluginConfig, kept: KeptSteps, hindrance: str | None
) -> tuple[FittedModel | None, bool]:
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
        return _fit(read_profile(Path(config.profile)).steps, f"the profile {config.profile}"), False
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
        return _fit(profile.steps, f"the profile {kept.path}"), False
    logger.info(
        "step times: guessed at first, and measured by requests of our own while nobody is served, in "
        "about half a minute"
    )
    return None, True


def predictor(known: FittedModel | None) -> Predictor:
    """Return what predicts steps and learns from each one.

    Parameters
    ----------
    known : what it begins with; None for no machine in particular: it learns the pace of the real one.
    """
    if known is not None:
        return MeasuredDescription(fitted=known).predictor()
    return Predictor(_guessed_seconds, ResidualModel.log_normal(_GUESSED_SPREAD)).with_learning()


def _fit(steps: Sequence[MeasuredStep], what: str) -> FittedModel:
    """Return a model of measured steps that needs to know neither model nor device."""
    shapes = [step.shape for step in steps]
    if not steps or len(np.unique(shape_matrix(shapes), axis=0)) < MIN_DISTINCT_SHAPES:
        raise ConfigError(
            f"{what} has fewer than {MIN_DISTINCT_SHAPES} steps that differ; measure more of them"
        )
    return fit_form(NNLSForm(), "nnls", shapes, [step.seconds for step in steps])


def _guessed_seconds(shape: BatchShape) -> float:
    pairs = shape.query_key_pairs + shape.decode_context_tokens
    return 0.01 + 1e-4 * shape.num_new_tokens + 1e-8 * pairs
