"""Step-time models for the engine that made a record.

The steps of this engine's own record files, as those of any other engine.
"""

from __future__ import annotations

from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.files import GZIP_MAGIC
from onbeat.perfmodel import step_log
from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import description_from_json, make_step_time_model
from onbeat.perfmodel.precision import precision_by_weights
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.profile import read_profile
from onbeat.recording.fleet_log import read_header
from onbeat.recording.log import FILE_KIND, RecordHeader
from onbeat.recording.reader import Recording
from onbeat.simulator.replay.history import read_history


def read_steps(path: Path) -> step_log.StepStream:
    """Read recorded steps: a file or a table of them, or a record of `onbeat serve`, perhaps cut short.

    Raises
    ------
    ConfigError : it cannot be read, is none of these, or a line is not as it must be.
    """
    if path.name.lower().endswith(step_log.SUFFIXES):
        return step_log.read_step_table(path)
    if not _is_own_record(path):
        return step_log.read_step_log(path)
    recording = Recording(path, allow_partial=True)
    # What the host does between two steps is apart (--host-overhead-ms), as in a profile of this engine.
    steps = [step_log.LoggedStep(step.shape, step.seconds) for step in read_history(recording).steps]
    return step_log.StepStream(origin_of(recording.header), steps)


def _is_own_record(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == GZIP_MAGIC
    except OSError:
        return False  # whose reader says so
    header = read_header(path) if is_packed else None
    return header is not None and header.get("file") == FILE_KIND


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
    if speculation is not None and speculation.get("runs_model"):
        raise ConfigError(
            "the recorded engine ran a draft model, whose time only the record's own step-time model "
            "knows; leave out --step-time, --profile, --model and --device"
        )
    if (dtype := header.engine.get("dtype")) not in PRECISIONS:
        raise ConfigError(
            f"the recorded engine computes in {dtype!r}, for which there are no step-time models; "
            f"known are {', '.join(PRECISIONS)}"
        )
    return model_of_steps(origin_of(header), kind=kind, profile=profile, model=model, device=device)


def model_of_steps(
    origin: step_log.StepOrigin,
    *,
    kind: str | None = None,
    profile: Path | None = None,
    model: str | None = None,
    device: str | None = None,
) -> Predictor:
    """Return what predicts: a profile's fit, or what is named, of the recorded model where nothing is.

    Raises
    ------
    ConfigError : an unknown model or device, or none is known.
    """
    precision = precision_by_weights(origin.dtype or "bf16")
    parallelism = Parallelism()
    kind = kind or ("roofline" if profile is None else "fitted")
    if kind == "fitted" and profile is not None:
        key = read_profile(profile).key
        # A profile has the name of its model alone; the steps may say where its configuration is.
        model, device = model or origin.model or key.model, device or key.device
        precision, parallelism = key.precision, key.parallelism
    model, device = model or origin.model, device or origin.device
    if model is None or device is None:
        raise ConfigError(
            "nothing names the model and device of these steps; give --profile FILE, or --model and --device"
        )
    target = FitTarget(
        model=find_model_spec(model),
        device=find_device(device),
        parallelism=parallelism,
        precision=precision,
    )
    return make_step_time_model(kind, target, profile=profile)


def origin_of(header: RecordHeader) -> step_log.StepOrigin:
    """Return whose steps a record has."""
    about = header.engine
    return step_log.StepOrigin(
        engine="onbeat",
        engine_version=header.onbeat_version,
        model=str(about.get("model_name")),
        device=str(about.get("device")),
        dtype=PRECISIONS.get(str(about.get("dtype"))),
    )
