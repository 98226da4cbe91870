"""`onbeat replay`: a recorded run's decisions once more, and its latencies in a simulation."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onbeat.cli.args import FAILED, INTERRUPTED, checked
from onbeat.cli.options import add_options, read_options
from onbeat.core.errors import ConfigError
from onbeat.core.options import option

if TYPE_CHECKING:
    from onbeat.core.step_time import StepTimeModel
    from onbeat.perfmodel.logged_step import StepOrigin
    from onbeat.perfmodel.predictor import Predictor
    from onbeat.recording.log import RecordHeader
    from onbeat.recording.reader import Recording
    from onbeat.report.result import Result


_option = partial(option, group="options")
_STEP_TIME = "step time"
_step_time = partial(option, group=_STEP_TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a record is replayed; what is None is as recorded."""

    allow_partial: bool = _option(
        default=False, is_switch=True, help="use the whole part of a file that was cut short"
    )
    json: Path | None = _option(None, metavar="FILE", help="write all results")
    steps: Path | None = _option(
        None,
        metavar="FILE",
        help="compare each recorded step of any engine with its prediction, instead of a replay",
    )
    step_time: str | None = _step_time(
        None,
        metavar="KIND",
        help="model of step times: roofline, fitted (default: by --profile)",
    )
    profile: Path | None = _step_time(None, metavar="FILE", help="a profile of `onbeat profile`")
    model: str | None = _step_time(None, help="a known model or a config.json (default: the recorded one)")
    device: str | None = _step_time(
        None, metavar="ID", help="device, such as h100-sxm, cpu (default: the recorded one)"
    )
    host_overhead: float | None = _step_time(
        None,
        flag="--host-overhead-ms",
        unit="ms",
        parse=checked(float, "milliseconds"),
        metavar="MS",
        help="host time of a step (default: as recorded)",
    )
    """Seconds."""

    def __post_init__(self) -> None:
        if self.host_overhead is not None and not self.host_overhead >= 0:
            raise ConfigError(f"--host-overhead-ms is {self.host_overhead * 1e3:g}; it must be at least 0")

    @property
    def names_a_model(self) -> bool:
        """Whether a flag says what predicts step times."""
        return bool(self.step_time or self.profile or self.model or self.device)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=Path,
        help="file of `onbeat serve --record FILE`; not with --steps",
    )
    parser.add_argument_group(_STEP_TIME, "what the simulation predicts steps with")
    add_options(parser, ReplayOptions)


def run(args: argparse.Namespace) -> int:
    """Replay; return 0 where the decisions are identical."""
    from rich.console import Console

    from onbeat.cli.outputs import check_writable, deliver
    from onbeat.recording.reader import Recording

    check_writable({"--json": args.json})
    options = read_options(args, ReplayOptions)
    console = Console(stderr=True, highlight=False)
    if (args.file is None) == (options.steps is None):
        raise ConfigError(
            "there is nothing to replay: give a FILE of `onbeat serve --record`, or --steps FILE"
        )
    if options.steps is not None:
        result, is_identical = _replay_steps(options.steps, options), True
    elif _is_of_fleet(args.file):
        result, is_identical = _replay_fleet(options, args.file)
    else:
        with console.status(f"replaying {args.file}"):  # seen on a terminal only
            recording = Recording(args.file, allow_partial=options.allow_partial)
            result, is_identical = _replay(options, recording)
    deliver(result, console, json=options.json)
    if result.is_interrupted:
        return INTERRUPTED
    return 0 if is_identical else FAILED


def _is_of_fleet(path: Path) -> bool:
    from onbeat.recording.fleet_log import FILE_KIND, read_header

    header = read_header(path)
    return header is not None and header.get("file") == FILE_KIND


def _replay_fleet(options: ReplayOptions, path: Path) -> tuple[Result, bool]:
    """Replay the record of a fleet; also return whether the decisions are identical."""
    from onbeat.cli.replay_output import fleet_result
    from onbeat.recording.fleet_log import FleetRecording
    from onbeat.simulator.replay.fleet_replay import replay_fleet

    if options.names_a_model or options.host_overhead is not None:
        raise ConfigError(
            f"{path} is the record of a fleet, which has no steps: leave out the flags of step times, "
            "or replay the record of one replica"
        )
    recording = FleetRecording(path, allow_partial=options.allow_partial)
    found = replay_fleet(recording)
    return fleet_result(recording, found), found.is_identical


def _replay(options: ReplayOptions, recording: Recording) -> tuple[Result, bool]:
    """Replay the record of a replica; also return whether the decisions are identical."""
    from onbeat.cli.replay_output import replay_result
    from onbeat.simulator.replay.decisions import Replay, scheduler_config
    from onbeat.simulator.replay.forecast import Forecast, forecast_with_model, forecast_with_recorded_times
    from onbeat.simulator.replay.history import read_history

    config = scheduler_config(recording.header)
    notes = []
    if not recording.is_complete:
        notes.append(f"the record is cut short: this is of its first {recording.num_calls:,} calls")
    own_model, predicted = _models(options, recording.header, notes)
    history = read_history(recording)
    replay = Replay(recording, own_model)
    forecasts: dict[str, Forecast] = {}
    is_interrupted = False
    try:
        replay.run()
        forecasts["recorded step times"] = forecast_with_recorded_times(recording, history, config)
        if predicted is not None:
            name, model = predicted
            overhead = history.host_overhead if options.host_overhead is None else options.host_overhead
            forecasts[name] = forecast_with_model(recording, history, config, model, host_overhead=overhead)
    except ConfigError as error:  # the decisions are compared all the same
        notes.append(f"latencies are not compared: {error}")
    except KeyboardInterrupt:
        is_interrupted = True
        notes.append(
            f"interrupted: this is a partial result, {replay.result.num_calls:,} of "
            f"{recording.num_calls:,} "
            f"calls and {len(forecasts)} simulations"
        )
    found = replay_result(
        recording, history, replay.result, forecasts, notes=notes, is_interrupted=is_interrupted
    )
    return found, replay.result.is_identical


def _models(
    options: ReplayOptions, header: RecordHeader, notes: list[str]
) -> tuple[StepTimeModel | None, tuple[str, StepTimeModel] | None]:
    """Return the model that the scheduler had, and what predicts steps, with its name.

    Parameters
    ----------
    notes : say why one is None.
    """
    from onbeat.simulator.replay.model import learning_model

    own_model, predicted = None, None
    try:
        own_model = learning_model(header)
    except ConfigError as error:
        notes.append(f"replayed without the step-time model that the scheduler told its steps to: {error}")
    try:  # before the long work: a flag may be wrong
        predicted = _step_time_model(options, header)
    except ConfigError as error:
        if options.names_a_model:
            raise
        notes.append(f"not simulated with predicted step times: {error}")
    return own_model, predicted


def _step_time_model(options: ReplayOptions, header: RecordHeader) -> tuple[str, StepTimeModel]:
    """Return the model that the flags ask for, and what to call it."""
    from onbeat.simulator.replay.model import recorded_step_time_model

    model = recorded_step_time_model(
        header, kind=options.step_time, profile=options.profile, model=options.model, device=options.device
    )
    return _step_time_name(options, header), model


def _step_time_name(options: ReplayOptions, header: RecordHeader) -> str:
    if options.profile:
        return f"{options.step_time or 'fitted'} ({options.profile})"
    if options.step_time or options.model or options.device or header.step_time is None:
        return str(options.step_time or "roofline")
    own = header.step_time.get("target", header.step_time)  # beside that of a draft model
    return f"{'roofline' if own['fitted'] is None else 'fitted'} (the engine's own)"


def _replay_steps(path: Path, options: ReplayOptions) -> Result:
    """Predict each step of a file.

    Raises
    ------
    ConfigError : the file cannot be read, or the flags name no model of its steps.
    """
    from onbeat.cli.replay_output import steps_result
    from onbeat.perfmodel.logged_step import step_times
    from onbeat.simulator.replay.recorded_steps import read_steps

    if options.host_overhead is not None:
        raise ConfigError("--host-overhead-ms is for simulated steps; with --steps leave it out")
    stream = read_steps(path)
    return steps_result(path, _model_of_steps(path, options, stream.origin), step_times(stream.steps))


def _model_of_steps(path: Path, options: ReplayOptions, origin: StepOrigin) -> Predictor:
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
