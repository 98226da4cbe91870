"""Step-time models for the engine that made a record."""

from __future__ import annotations

from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.description import description_from_json
from onbeat.perfmodel.device_spec import find_device
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile_file import read_profile
from onbeat.recording.log import RecordHeader

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""How an engine and how a device name the same format."""


def learning_model(header: RecordHeader) -> StepTimeModel | None:
    """Return the model that the recorded scheduler had, as it was before the first step; None without one.

    Raises
    ------
    ConfigError : this version cannot build it.
    """
    return None if header.step_time is None else description_from_json(header.step_time).predictor()


def recorded_step_time_model(
    header: RecordHeader,
    *,
    kind: str | None = None,
    profile: Path | None = None,
    model: str | None = None,
    device: str | None = None,
) -> StepTimeModel:
    """Return a model of the recorded engine's steps.

    Parameters
    ----------
    kind : see `make_step_time_model`; None is `fitted` with a profile, and `roofline` without.
    profile : what it is made from.
    model, device : in place of the recorded ones. With none of the four it is the model that the engine had.

    Raises
    ------
    ConfigError : an unknown model or device, a profile of something else, or a run with a draft model that
        is to be predicted by another model than its own.
    """
    if kind is None and profile is None and model is None and device is None:
        own = learning_model(header)
        if own is not None:
            return own
    speculation = header.scheduler.get("speculation")
    if speculation is not None and speculation["runs_model"]:
        raise ConfigError(
            "the recorded engine ran a draft model, whose time only the record's own step-time model "
            "knows; leave out --step-time, --profile, --model and --device"
        )
    kind = kind or ("roofline" if profile is None else "fitted")
    if kind == "fitted" and profile is not None and model is None:
        model = read_profile(profile).key.model
    dtype = header.engine.get("dtype")
    if dtype not in PRECISIONS:
        raise ConfigError(
            f"the recorded engine computes in {dtype!r}, for which there are no step-time models; "
            f"known are {', '.join(PRECISIONS)}"
        )
    precision = PRECISIONS[dtype]
    return make_step_time_model(
        kind,
        model=find_model_spec(model or str(header.engine.get("model_name"))),
        device=find_device(device or str(header.engine.get("device"))),
        parallelism=Parallelism(),
        precision=Precision(weights=precision, kv=precision, compute=precision),
        profile=profile,
    )
