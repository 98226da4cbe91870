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
    from rich.console import Console

    from onbeat.cli.replay_steps import StepsReplay
    from onbeat.core.step_time import StepTimeModel
    from onbeat.recording.log import RecordHeader
    from onbeat.recording.reader import Recording
    from onbeat.scheduler.scheduler_config import SchedulerConfig
    from onbeat.simulator.replay.decisions import ReplayResult
    from onbeat.simulator.replay.fleet_replay import FleetReplay
    from onbeat.simulator.replay.forecast import Forecast
    from onbeat.simulator.replay.report import ReplayReport


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

    from onbeat.cli.outputs import check_writable, result_console
    from onbeat.cli.replay_steps import replay_steps
    from onbeat.recording.reader import Recording

    check_writable({"--json": args.json})
    options = read_options(args, ReplayOptions)
    console = result_console(highlight=False, soft_wrap=True)
    if (args.file is None) == (options.steps is None):
        raise ConfigError(
            "there is nothing to replay: give a FILE of `onbeat serve --record`, or --steps FILE"
        )
    if options.steps is not None:
        _save(options, replay_steps(options.steps, options))
        return 0
    if _is_of_fleet(args.file):
        return _replay_fleet(console, options, args.file)
    with Console(stderr=True).status(f"replaying {args.file}"):  # seen on a terminal only
        recording = Recording(args.file, allow_partial=options.allow_partial)
        report = _replay(options, recording)
    _show(console, report)
    _save(options, report)
    if report.is_interrupted:
        return INTERRUPTED
    return 0 if report.identity.is_identical else FAILED


def _is_of_fleet(path: Path) -> bool:
    from onbeat.recording.fleet_log import FILE_KIND, read_header

    header = read_header(path)
    return header is not None and header.get("file") == FILE_KIND


def _replay_fleet(console: Console, options: ReplayOptions, path: Path) -> int:
    """Replay the record of a fleet; return 0 where the decisions are identical."""
    from onbeat.recording.fleet_log import FleetRecording
    from onbeat.simulator.replay.fleet_replay import replay_fleet

    if options.names_a_model or options.host_overhead is not None:
        raise ConfigError(
            f"{path} is the record of a fleet, which has no steps: leave out the flags of step times, "
            "or replay the record of one replica"
        )
    recording = FleetRecording(path, allow_partial=options.allow_partial)
    found = replay_fleet(recording)
    version = recording.header.get("onbeat_version")
    console.print(f"{path}: a fleet behind router {found.router}, recorded by onbeat {version}", markup=False)
    if (difference := found.difference) is None:
        console.print(f"decisions: identical in {found.num_calls:,} calls, {found.num_actions:,} actions")
    else:
        console.print(
            f"decisions: DIFFERENT at line {difference.line} ({difference.event}), after "
            f"{found.num_calls - 1:,} calls:\n  recorded: {difference.recorded}\n"
            f"  replayed: {difference.replayed}",
            markup=False,
        )
    for name, counts in (("events", found.events), ("actions", found.actions)):
        console.print(f"{name}: " + ", ".join(f"{kind} {num:,}" for kind, num in sorted(counts.items())))
    if not found.is_complete:
        console.print("note: the record is cut short")
    _save(options, found)
    return 0 if found.is_identical else FAILED


def _replay(options: ReplayOptions, recording: Recording) -> ReplayReport:
    from onbeat.simulator.replay.decisions import Replay, scheduler_config
    from onbeat.simulator.replay.forecast import forecast_with_recorded_times
    from onbeat.simulator.replay.history import read_history
    from onbeat.simulator.replay.model import learning_model
    from onbeat.simulator.replay.report import ReplayReport

    config = scheduler_config(recording.header)
    notes = []
    if not recording.is_complete:
        notes.append(f"the record is cut short: this is of its first {recording.num_calls:,} calls")
    own_model = None
    try:
        own_model = learning_model(recording.header)
    except ConfigError as error:
        notes.append(f"replayed without the step-time model that the scheduler told its steps to: {error}")
    predicted = None
    try:  # before the long work: a flag may be wrong
        predicted = _step_time_model(options, recording.header)
    except ConfigError as error:
        if options.names_a_model:
            raise
        notes.append(f"not simulated with predicted step times: {error}")
    history = read_history(recording)
    replay = Replay(recording, own_model)
    report = ReplayReport(recording, history, replay.result, notes=notes)
    try:
        replay.run()
        report.forecasts["recorded step times"] = forecast_with_recorded_times(recording, history, config)
        _add_forecast(report, options, predicted, config)
    except ConfigError as error:  # the decisions are compared all the same
        notes.append(f"latencies are not compared: {error}")
    except KeyboardInterrupt:
        report.is_interrupted = True
        notes.append(
            f"interrupted: this is a partial result, {replay.result.num_calls:,} of "
            f"{recording.num_calls:,} "
            f"calls and {len(report.forecasts)} simulations"
        )
    return report


def _add_forecast(
    report: ReplayReport,
    options: ReplayOptions,
    predicted: tuple[str, StepTimeModel] | None,
    config: SchedulerConfig,
) -> None:
    """Simulate with predicted step times, if there is what predicts them."""
    from onbeat.simulator.replay.forecast import forecast_with_model

    if predicted is not None:
        name, model = predicted
        history = report.history
        overhead = history.host_overhead if options.host_overhead is None else options.host_overhead
        report.forecasts[name] = forecast_with_model(
            report.recording, history, config, model, host_overhead=overhead
        )


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


def _show(console: Console, report: ReplayReport) -> None:
    header = report.recording.header
    engine = header.engine
    console.print(
        f"{report.recording.path}: {engine.get('model_name')} on {engine.get('device')}, policy "
        f"{header.scheduler['policy']}, recorded {header.created} by onbeat {header.onbeat_version}",
        markup=False,
    )
    _show_identity(console, report.identity)
    console.print(f"host overhead: {report.history.host_overhead * 1e3:.2f} ms a step")
    for name, forecast in report.forecasts.items():
        _show_forecast(console, name, forecast)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)


def _show_identity(console: Console, identity: ReplayResult) -> None:
    found = identity.difference
    if found is None:
        console.print(
            f"decisions: identical in {identity.num_steps:,} steps, {identity.num_rows:,} rows "
            f"({identity.num_requests:,} requests, {identity.num_preemptions:,} preemptions, "
            f"{identity.num_prefix_hits:,} prompt tokens from the prefix cache, "
            f"{identity.num_rejected:,} rejected, {identity.num_expired:,} expired, "
            f"{identity.num_aborted:,} aborted, {identity.num_failed:,} failed)"
        )
        if identity.num_predictions:
            console.print(f"predicted step times: identical in {identity.num_predictions:,} steps")
        return
    where = "" if found.step_id is None else f", step {found.step_id}"
    console.print(
        f"decisions: DIFFERENT at call {found.call_index}{where}, after {identity.num_steps:,} steps: "
        f"{found.what}\n  recorded: {found.recorded}\n  replayed: {found.replayed}",
        markup=False,
    )


def _show_forecast(console: Console, name: str, forecast: Forecast) -> None:
    from onbeat.report.table import filled_table
    from onbeat.simulator.replay.forecast import COMPARED

    columns = ("Metric", "Measured (ms)", "Simulated (ms)", "Error")
    rows = [
        (
            f"{COMPARED[error.metric]} P{error.percentile:g}",
            f"{error.measured * 1e3:,.2f}",
            f"{error.simulated * 1e3:,.2f}",
            f"{error.relative_error:+.1%}",
        )
        for error in forecast.errors
    ]
    console.print(filled_table(f"Simulated with {name}", columns, rows))
    steps = f"{forecast.num_steps:,} steps simulated, {forecast.num_recorded_steps:,} recorded"
    if forecast.num_matched_steps is not None:
        steps += f", {forecast.num_matched_steps:,} with the very same batch"
    console.print(f"{forecast.num_requests:,} requests that ran to their end; {steps}")


def _save(options: ReplayOptions, found: ReplayReport | FleetReplay | StepsReplay) -> None:
    from onbeat.report.result import write_document

    if options.json is not None:
        write_document(options.json, found.as_json())
