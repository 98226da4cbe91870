"""`onbeat replay`: a recorded run's decisions once more, and its latencies in a simulation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from onbeat.cli.args import checked
from onbeat.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from onbeat.core.step_time import StepTimeModel
    from onbeat.recording.log import RecordHeader
    from onbeat.recording.reader import Recording
    from onbeat.simulator.replay.decisions import ReplayResult
    from onbeat.simulator.replay.forecast import Forecast
    from onbeat.simulator.replay.report import ReplayReport

NAME = "replay"
HELP = "repeat a recorded run's decisions, and compare its latencies with a simulation"

EXIT_DIFFERS = 1
EXIT_INTERRUPTED = 130

milliseconds = checked(lambda text: float(text) / 1e3, "milliseconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="what `onbeat serve --record FILE` has written"
    )
    parser.add_argument(
        "--allow-partial", action="store_true", help="use a file that was cut short as far as it goes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    group = parser.add_argument_group("step time", "what the simulation predicts steps with")
    group.add_argument(
        "--step-time",
        metavar="KIND",
        help="roofline, fitted, operator-table or linear (default: by --profile)",
    )
    group.add_argument("--profile", type=Path, metavar="FILE", help="of `onbeat profile`, or a table")
    group.add_argument("--model", help="a known model or a config.json (default: the recorded one)")
    group.add_argument("--device", metavar="ID", help="such as h100-sxm, cpu (default: the recorded one)")
    group.add_argument(
        "--host-overhead-ms", type=milliseconds, metavar="MS", help="of a step (default: as recorded)"
    )


def run(args: argparse.Namespace) -> int:
    """Replay; return 0 where the decisions are identical."""
    from rich.console import Console

    from onbeat.cli.outputs import check_writable
    from onbeat.recording.reader import Recording

    check_writable({"--json": args.json})
    if args.host_overhead_ms is not None and not args.host_overhead_ms >= 0:
        raise ConfigError(f"--host-overhead-ms is {args.host_overhead_ms * 1e3:g}; it must be at least 0")
    console = Console(highlight=False, soft_wrap=True)
    with Console(stderr=True).status(f"replaying {args.file}"):  # seen on a terminal only
        recording = Recording(args.file, allow_partial=args.allow_partial)
        report = _replay(args, recording)
    _show(console, report)
    if args.json is not None:
        _write_json(args.json, report)
    if report.is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if report.identity.is_identical else EXIT_DIFFERS


def _replay(args: argparse.Namespace, recording: Recording) -> ReplayReport:
    from onbeat.simulator.replay.decisions import Replay, scheduler_config
    from onbeat.simulator.replay.forecast import forecast_with_model, forecast_with_recorded_times
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
        predicted = _step_time_model(args, recording.header)
    except ConfigError as error:
        if args.step_time or args.profile or args.model or args.device:
            raise
        notes.append(f"not simulated with predicted step times: {error}")
    history = read_history(recording)
    replay = Replay(recording, own_model)
    report = ReplayReport(recording, history, replay.result, notes=notes)
    try:
        replay.run()
        report.forecasts["recorded step times"] = forecast_with_recorded_times(recording, history, config)
        if predicted is not None:
            name, model = predicted
            overhead = history.host_overhead if args.host_overhead_ms is None else args.host_overhead_ms
            report.forecasts[name] = forecast_with_model(
                recording, history, config, model, host_overhead=overhead
            )
    except ConfigError as error:  # the decisions are compared all the same
        notes.append(f"latencies are not compared: {error}")
    except KeyboardInterrupt:
        report.is_interrupted = True
        notes.append(
            f"interrupted: this is a partial result, {replay.result.num_calls:,} of {recording.num_calls:,} "
            f"calls and {len(report.forecasts)} simulations"
        )
    return report


def _step_time_model(args: argparse.Namespace, header: RecordHeader) -> tuple[str, StepTimeModel]:
    """Return the model that the flags ask for, and what to call it."""
    from onbeat.simulator.replay.model import recorded_step_time_model

    model = recorded_step_time_model(
        header, kind=args.step_time, profile=args.profile, model=args.model, device=args.device
    )
    return _step_time_name(args, header), model


def _step_time_name(args: argparse.Namespace, header: RecordHeader) -> str:
    if args.profile:
        return f"{args.step_time or 'fitted'} ({args.profile})"
    if args.step_time or args.model or args.device or header.step_time is None:
        return str(args.step_time or "roofline")
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
    from rich.table import Table

    from onbeat.simulator.replay.forecast import COMPARED

    table = Table(title=f"Simulated with {name}", title_justify="left")
    table.add_column("Metric")
    for column in ("Measured (ms)", "Simulated (ms)", "Error"):
        table.add_column(column, justify="right")
    for error in forecast.errors:
        table.add_row(
            f"{COMPARED[error.metric]} P{error.percentile:g}",
            f"{error.measured * 1e3:,.2f}",
            f"{error.simulated * 1e3:,.2f}",
            f"{error.relative_error:+.1%}",
        )
    console.print(table)
    steps = f"{forecast.num_steps:,} steps simulated, {forecast.num_recorded_steps:,} recorded"
    if forecast.num_matched_steps is not None:
        steps += f", {forecast.num_matched_steps:,} with the very same batch"
    console.print(f"{forecast.num_requests:,} requests that ran to their end; {steps}")


def _write_json(path: Path, report: ReplayReport) -> None:
    import orjson

    try:
        path.write_bytes(
            orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another file") from error
