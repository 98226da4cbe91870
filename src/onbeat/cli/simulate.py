"""`onbeat simulate`: what a configuration would do under a load, without the hardware."""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path

from rich.console import Console

from onbeat.cli.args import INTERRUPTED
from onbeat.cli.options import add_options, read_options
from onbeat.cli.outputs import check_writable, deliver, progress_bar, shown_settings
from onbeat.cli.simulate_options import SimulateOptions, add_simulation_arguments, replica_settings
from onbeat.cli.simulate_output import answer_of, as_run
from onbeat.core.step import StepStats
from onbeat.metrics.record import RequestRecord, write_records
from onbeat.metrics.summary import SummaryOptions
from onbeat.metrics.timeline import Timeline, open_timeline
from onbeat.recording.fleet_log import fleet_record, plain
from onbeat.report.run_report import runs_result
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.observer import Progress as OnProgress
from onbeat.simulator.observer import StepsWanted
from onbeat.simulator.resolve import Resolved, resolve_for, step_times_text
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.simulator.virtual_fleet import fleet_rules
from onbeat.workload.load import Load
from onbeat.workload.offered import OfferedLoad


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    add_simulation_arguments(parser)
    add_options(parser, SimulateOptions)


def asked_of(args: argparse.Namespace) -> tuple[Deployment, Resolved, OfferedLoad]:
    """Return what the flags name, what it is, and the load that it gets.

    Raises
    ------
    ConfigError : an unknown name, or settings that do not go together.
    """
    deployment, load = replica_settings(args), read_options(args, Load)
    return deployment, *resolve_for(deployment, load, load.classes())


def run(args: argparse.Namespace) -> int:
    """Simulate; returns the exit code."""
    console = Console(stderr=True, highlight=False)
    options = read_options(args, SimulateOptions)
    check_writable(options.files)
    settings, simulation, load = asked_of(args)
    console.print(_describe(settings, simulation), markup=False, soft_wrap=True)
    result = _simulate(simulation, load, console, options)
    if not result.records:
        console.print("interrupted before any request had ended")
        return INTERRUPTED
    found = as_run(
        settings, simulation, load, result, options=read_options(args, SummaryOptions), label=options.label
    )
    shown = runs_result(
        [found],
        kind="simulation",
        percentiles=(50.0, 90.0, 99.0),
        settings=shown_settings(args),
        answer=answer_of(found),
    )
    others: dict[Path | None, Callable[[Path], None]] = {
        options.records: lambda path: write_records(path, result.records),
        options.timeline: lambda _path: None,  # it was written while the run went on
    }
    deliver(shown, console, json=options.json, report=options.report, others=others)
    return 0 if result.is_complete else INTERRUPTED


def _describe(settings: Deployment, simulation: Resolved) -> str:
    limits, model = simulation.config.scheduler, simulation.model
    parallel = f"TP {settings.tensor_parallel}" + (
        f" PP {settings.pipeline_parallel}" if settings.pipeline_parallel > 1 else ""
    )
    kv_tokens = limits.num_blocks * limits.block_size
    where = f"{simulation.num_devices} x {simulation.device.name}, {parallel}"
    if settings.fleet.kinds:
        where = (
            f"{simulation.num_devices} devices ({'; '.join(map(str, settings.fleet.kinds))}), of the first"
        )
    return (
        f"{model.name} ({settings.dtype}) on {where}: policy {limits.policy}, "
        f"{limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} requests a step, KV cache of "
        f"{kv_tokens:,} tokens a replica, requests up to {limits.max_model_len:,} tokens; step times: "
        f"{step_times_text(settings, simulation.errors)}"
    )


def _simulate(
    simulation: Resolved, load: OfferedLoad, console: Console, options: SimulateOptions
) -> SimulationResult:
    """Simulate a load; Ctrl-C gives what had ended by then."""
    with ExitStack() as stack:
        observer = None
        if options.timeline is not None:
            observer = TimelineObserver(stack.enter_context(open_timeline(options.timeline)))
        on_decision, config = None, simulation.config
        if options.record is not None:
            about = {"router": config.router, "fleet": plain(fleet_rules(config))}
            on_decision = stack.enter_context(fleet_record(options.record, about))
        on_progress = stack.enter_context(
            _progress(console, is_quiet=options.disable_tqdm, num_requests=len(load))
        )
        return simulate(
            load,
            config,
            simulation.step_time,
            on_progress=on_progress,
            observer=observer,
            on_decision=on_decision,
        )


@contextmanager
def _progress(console: Console, *, is_quiet: bool, num_requests: int) -> Iterator[OnProgress]:
    """Show how many requests have ended, and how much virtual time has passed."""
    bar = progress_bar(console, is_quiet=is_quiet or not console.is_terminal)
    task = bar.add_task("simulating", total=num_requests, note="")

    def on_progress(num_finished: int, _num_requests: int, virtual_time: float) -> None:
        bar.update(task, completed=num_finished, note=f"{virtual_time:,.0f} s of virtual time")

    with bar:
        yield on_progress


class TimelineObserver:
    """Writes a simulated run as a live run is written."""

    wanted_steps: StepsWanted = "all"

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def on_request(self, record: RequestRecord) -> None:
        self._timeline.on_request(record)

    def on_step(self, replica: int, stats: StepStats) -> None:
        self._timeline.on_step(stats, replica=replica)

    def on_finish(self, record: RequestRecord) -> None:
        if record.delivery_times:
            first = copy(record)
            first.delivery_times = array("d", record.delivery_times[:1])
            self._timeline.on_delivery(first)
        self._timeline.on_finish(record)
