"""`onbeat replay --steps FILE`: what is predicted of each recorded step, against what it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onbeat.cli.outputs import result_console
from onbeat.core.errors import ConfigError

if TYPE_CHECKING:
    from onbeat.cli.replay import ReplayOptions
    from onbeat.perfmodel.logged_step import StepOrigin
    from onbeat.perfmodel.predictor import Predictor
    from onbeat.perfmodel.stream_fit import KindErrors


@dataclass(frozen=True, slots=True)
class StepsReplay:
    """What was found."""

    basis: str
    errors: list[KindErrors]
    num_beyond: int
    """Steps outside of what the model was fitted to."""

    def as_json(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {
            "times": self.basis,
            "num_beyond": self.num_beyond,
            "errors": [asdict(each) for each in self.errors],
        }


def replay_steps(path: Path, options: ReplayOptions) -> StepsReplay:
    """Predict each step of a file, and show the errors by kind of step.

    Raises
    ------
    ConfigError : the file cannot be read, or the flags name no model of its steps.
    """
    from onbeat.cli.profile_from import error_table
    from onbeat.perfmodel.logged_step import step_times
    from onbeat.perfmodel.stream_fit import errors_by_kind
    from onbeat.simulator.replay.recorded_steps import read_steps

    if options.host_overhead is not None:
        raise ConfigError("--host-overhead-ms is for simulated steps; with --steps leave it out")
    stream = read_steps(path)
    model = _model(path, options, stream.origin)
    timed = step_times(stream.steps)
    predicted = [model.step_time(step.shape) for step in timed.steps]
    seen = model.shape_range
    beyond = 0 if seen is None else sum(seen.inflation(step.shape) > 1 for step in timed.steps)
    found = StepsReplay(timed.basis, errors_by_kind(timed.steps, predicted), beyond)
    console = result_console(highlight=False, soft_wrap=True)
    console.print(f"{path}: {len(timed.steps):,} steps; their times: {timed.basis}", markup=False)
    console.print(error_table("Predicted against recorded steps", found.errors))
    if seen is not None and beyond:
        console.print(
            f"note: {beyond:,} steps are outside of what the profile saw ({seen.describe()}); predictions of "
            "these are extrapolated",
            markup=False,
        )
    return found


def _model(path: Path, options: ReplayOptions, origin: StepOrigin) -> Predictor:
    """Return what predicts: a profile's fit, or what the flags name, of the recorded model where none do."""
    from onbeat.perfmodel.device_spec import find_device
    from onbeat.perfmodel.model_spec import find_model_spec
    from onbeat.perfmodel.models import make_step_time_model
    from onbeat.perfmodel.parallelism import Parallelism
    from onbeat.perfmodel.precision import precision_by_weights
    from onbeat.perfmodel.profile_file import read_profile

    model, device = options.model or origin.model, options.device or origin.device
    precision = precision_by_weights(origin.dtype or "bf16")
    parallelism = Parallelism(tensor=origin.tensor_parallel or 1, pipeline=origin.pipeline_parallel or 1)
    profile = options.profile
    kind = options.step_time or ("roofline" if profile is None else "fitted")
    if kind == "fitted" and profile is not None:
        key = read_profile(profile).key
        # A profile has the name of its model alone; the steps may say where its configuration is.
        model, device = model or key.model, options.device or key.device
        precision, parallelism = key.precision, key.parallelism
    if model is None or device is None:
        raise ConfigError(
            f"{path} does not name the model and device of its steps; give --profile FILE, or --model "
            "and --device"
        )
    return make_step_time_model(
        kind,
        model=find_model_spec(model),
        device=find_device(device),
        parallelism=parallelism,
        precision=precision,
        profile=profile,
    )
