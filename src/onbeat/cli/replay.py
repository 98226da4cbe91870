"""`onbeat replay`: a recorded run's decisions once more, and its latencies in a simulation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from onbeat.cli.args import FAILED, INTERRUPTED, checked
from onbeat.cli.options import add_options, read_options
from onbeat.cli.outputs import check_writable, deliver
from onbeat.cli.profile_from import error_table
from onbeat.core.errors import ConfigError
from onbeat.core.options import check, option
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.fitted import errors_by_kind
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.step_log import step_times
from onbeat.recording.fleet_log import FILE_KIND, FleetRecording, read_header
from onbeat.recording.log import RecordHeader
from onbeat.recording.reader import Recording
from onbeat.report.result import Column, Lines, Part, Result, Section, Table
from onbeat.simulator.replay.decisions import (
    FleetReplay,
    Replay,
    ReplayResult,
    replay_fleet,
    scheduler_config,
)
from onbeat.simulator.replay.forecast import (
    COMPARED,
    Forecast,
    forecast_with_model,
    forecast_with_recorded_times,
)
from onbeat.simulator.replay.history import RunHistory, read_history
from onbeat.simulator.replay.model import learning_model, model_of_steps, read_steps, recorded_step_time_model

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
        at_least=0,
        help="host time of a step (default: as recorded)",
    )
    """Seconds."""

    def __post_init__(self) -> None:
        check(self, ReplayOptions)

    @property
    def predictor(self) -> dict[str, Any]:
        """What the flags say of what predicts step times."""
        return {
            "kind": self.step_time,
            "profile": self.profile,
            "model": self.model,
            "device": self.device,
        }

    @property
    def names_a_model(self) -> bool:
        """Whether a flag says what predicts step times."""
        return any(self.predictor.values())


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
    check_writable(args, {"--json": args.json})
    options = read_options(args, ReplayOptions)
    console = Console(stderr=True, highlight=False)
    if (args.file is None) == (options.steps is None):
        raise ConfigError("give one thing to replay: a FILE of `onbeat serve --record`, or --steps FILE")
    if options.steps is not None:
        result, is_identical = _replay_steps(options.steps, options), True
    elif (read_header(args.file) or {}).get("file") == FILE_KIND:
        result, is_identical = _replay_fleet(options, args.file)
    else:
        with console.status(f"replaying {args.file}"):  # seen on a terminal only
            recording = Recording(args.file, allow_partial=options.allow_partial)
            result, is_identical = _replay(options, recording)
    deliver(result, console, json=options.json)
    if result.is_interrupted:
        return INTERRUPTED
    return 0 if is_identical else FAILED


def _replay_fleet(options: ReplayOptions, path: Path) -> tuple[Result, bool]:
    """Replay the record of a fleet; also return whether the decisions are identical."""
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
            f"{recording.num_calls:,} calls and {len(forecasts)} simulations"
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
    own_model, predicted = None, None
    try:
        own_model = learning_model(header)
    except ConfigError as error:
        notes.append(f"replayed without the step-time model that the scheduler told its steps to: {error}")
    try:  # before the long work: a flag may be wrong
        model = recorded_step_time_model(header, **options.predictor)
        predicted = _step_time_name(options, header), model
    except ConfigError as error:
        if options.names_a_model:
            raise
        notes.append(f"not simulated with predicted step times: {error}")
    return own_model, predicted


def _step_time_name(options: ReplayOptions, header: RecordHeader) -> str:
    if options.profile:
        return f"{options.step_time or 'fitted'} ({options.profile})"
    if options.step_time or options.model or options.device or header.step_time is None:
        return str(options.step_time or "roofline")
    own = header.step_time.get("target", header.step_time)  # beside that of a draft model
    return f"{'roofline' if own.get('fitted') is None else 'fitted'} (the engine's own)"


def _replay_steps(path: Path, options: ReplayOptions) -> Result:
    """Predict each step of a file.

    Raises
    ------
    ConfigError : the file cannot be read, or the flags name no model of its steps.
    """
    if options.host_overhead is not None:
        raise ConfigError("--host-overhead-ms is for simulated steps; with --steps leave it out")
    stream = read_steps(path)
    return steps_result(path, model_of_steps(stream.origin, **options.predictor), step_times(stream.steps))


# ---- what was found ----


_FORECAST = (
    *(Column("name", "Metric", str), Column("measured_ms", "Measured (ms)", "{:,.2f}".format)),
    *(Column("simulated_ms", "Simulated (ms)", "{:,.2f}".format), Column("error", "Error", "{:+.1%}".format)),
)


def replay_result(
    recording: Recording,
    history: RunHistory,
    identity: ReplayResult,
    forecasts: Mapping[str, Forecast],
    *,
    notes: list[str],
    is_interrupted: bool,
) -> Result:
    """Return whether the decisions are the same, and how well simulations tell the latencies.

    Parameters
    ----------
    forecasts : by where their step times came from.
    notes : what was left out, and why.
    is_interrupted : whether Ctrl-C ended it; what was found by then is here.
    """
    header = recording.header
    title = (
        f"{recording.path}: {header.engine.get('model_name')} on {header.engine.get('device')}, policy "
        f"{header.scheduler['policy']}, recorded {header.created} by onbeat {header.onbeat_version}"
    )
    overhead_ms = history.host_overhead * 1e3
    lines = Lines([title, *_identity_lines(identity), f"host overhead: {overhead_ms:.2f} ms a step"])
    compared = {name: _forecast_values(each) for name, each in forecasts.items()}
    parts = [part for name, each in forecasts.items() for part in _forecast_parts(name, each, compared[name])]
    return Result(
        kind="replay",
        title=title,
        sections=[Section("", [lines, *parts])],
        warnings=notes,
        is_interrupted=is_interrupted,
        values={
            "record": {
                "file": str(recording.path),
                "is_complete": recording.is_complete,
                "num_calls": recording.num_calls,
                "onbeat_version": header.onbeat_version,
                "created": header.created,
                "scheduler": dict(header.scheduler),
                "engine": dict(header.engine),
                "max_in_flight_steps": header.max_in_flight_steps,
            },
            "identity": {"is_identical": identity.is_identical, **asdict(identity)},
            "host_overhead_ms": overhead_ms,
            "forecasts": compared,
            "notes": notes,
        },
    )


def _identity_lines(identity: ReplayResult) -> Iterator[str]:
    found = identity.difference
    if found is None:
        yield (
            f"decisions: identical in {identity.num_steps:,} steps, {identity.num_rows:,} rows "
            f"({identity.num_requests:,} requests, {identity.num_preemptions:,} preemptions, "
            f"{identity.num_prefix_hits:,} prompt tokens from the prefix cache, "
            f"{identity.num_rejected:,} rejected, {identity.num_expired:,} expired, "
            f"{identity.num_aborted:,} aborted, {identity.num_failed:,} failed)"
        )
        if identity.num_predictions:
            yield f"predicted step times: identical in {identity.num_predictions:,} steps"
        return
    where = "" if found.step_id is None else f", step {found.step_id}"
    yield (
        f"decisions: DIFFERENT at call {found.call_index}{where}, after {identity.num_steps:,} steps: "
        f"{found.what}\n  recorded: {found.recorded}\n  replayed: {found.replayed}"
    )


def _forecast_values(forecast: Forecast) -> dict[str, Any]:
    errors = [
        {
            "metric": each.metric,
            "percentile": each.percentile,
            "measured_ms": each.measured * 1e3,
            "simulated_ms": each.simulated * 1e3,
            "relative_error": each.relative_error,
        }
        for each in forecast.errors
    ]
    return asdict(forecast) | {"errors": errors}


def _forecast_parts(name: str, forecast: Forecast, values: Mapping[str, Any]) -> Iterator[Part]:
    rows = [
        {**row, "name": f"{COMPARED[row['metric']]} P{row['percentile']:g}", "error": row["relative_error"]}
        for row in values["errors"]
    ]
    yield Table(f"Simulated with {name}", _FORECAST, rows)
    steps = f"{forecast.num_steps:,} steps simulated, {forecast.num_recorded_steps:,} recorded"
    if forecast.num_matched_steps is not None:
        steps += f", {forecast.num_matched_steps:,} with the very same batch"
    yield Lines([f"{forecast.num_requests:,} requests that ran to their end; {steps}"])


def fleet_result(recording: FleetRecording, found: FleetReplay) -> Result:
    """Return whether the decisions of a fleet are the same."""
    version, difference = recording.header.get("onbeat_version"), found.difference
    title = f"{recording.path}: a fleet behind router {found.router}, recorded by onbeat {version}"
    decided = f"decisions: identical in {found.num_calls:,} calls, {found.num_actions:,} actions"
    if difference is not None:
        decided = (
            f"decisions: DIFFERENT at line {difference.line} ({difference.event}), after "
            f"{found.num_calls - 1:,} calls:\n  recorded: {difference.recorded}\n"
            f"  replayed: {difference.replayed}"
        )
    counts = [
        f"{name}: " + ", ".join(f"{kind} {num:,}" for kind, num in sorted(own.items()))
        for name, own in (("events", found.events), ("actions", found.actions))
    ]
    return Result(
        kind="replay",
        title=title,
        sections=[Section("", [Lines([title, decided, *counts])])],
        warnings=() if found.is_complete else ["the record is cut short"],
        values={
            "is_identical": found.is_identical,
            **{each.name: getattr(found, each.name) for each in fields(found)},
        },
    )


def steps_result(path: Path, model: Predictor, timed: Any) -> Result:
    """Return how far predictions of recorded steps are off.

    Parameters
    ----------
    path : file of the steps.
    timed : the steps, with what their times are.
    """
    errors = errors_by_kind(timed.steps, [model.step_time(step.shape) for step in timed.steps])
    seen = model.shape_range
    beyond = 0 if seen is None else sum(seen.inflation(step.shape) > 1 for step in timed.steps)
    warning = (
        f"{beyond:,} steps are outside of what the profile saw ({seen and seen.describe()}); predictions "
    )
    title = f"{path}: {len(timed.steps):,} steps; their times: {timed.basis}"
    table = error_table("Predicted against recorded steps", errors)
    return Result(
        kind="replay",
        title=title,
        sections=[Section("", [Lines([title]), table])],
        warnings=[f"{warning}of these are extrapolated"] if beyond else (),
        values={"times": timed.basis, "num_beyond": beyond},
    )
