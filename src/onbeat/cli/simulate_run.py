"""Run a simulation with a progress bar and, if asked for, a timeline."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onbeat.core.step import StepStats
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.timeline import Timeline, open_timeline
from onbeat.recording.fleet_log import fleet_record, plain
from onbeat.simulator.observer import Progress as OnProgress
from onbeat.simulator.observer import StepsWanted
from onbeat.simulator.resolve import Resolved
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.virtual_fleet import fleet_rules
from onbeat.workload.offered import OfferedLoad


def run_simulation(
    simulation: Resolved,
    load: OfferedLoad,
    *,
    console: Console,
    is_quiet: bool = False,
    timeline: Path | None = None,
    record: Path | None = None,
) -> SimulationResult:
    """Simulate a load; Ctrl-C gives what had ended by then.

    Parameters
    ----------
    console : where progress is shown.
    timeline : where to write a trace of steps and requests; None writes none.
    record : where to write what the fleet decides; likewise.

    """
    with ExitStack() as stack:
        observer = None
        if timeline is not None:
            observer = TimelineObserver(stack.enter_context(open_timeline(timeline)))
        on_decision = None
        if record is not None:
            on_decision = stack.enter_context(fleet_record(record, _about(simulation.config)))
        on_progress = stack.enter_context(progress_bar(console, is_quiet=is_quiet, num_requests=len(load)))
        return simulate(
            load,
            simulation.config,
            simulation.step_time,
            on_progress=on_progress,
            observer=observer,
            on_decision=on_decision,
        )


def _about(config: SimulationConfig) -> dict[str, Any]:
    """Return what a record says of a fleet."""
    return {"router": config.router, "fleet": plain(fleet_rules(config))}


@contextmanager
def progress_bar(console: Console, *, is_quiet: bool, num_requests: int) -> Iterator[OnProgress]:
    """Show how many requests have ended, and how much virtual time has passed."""
    bar = Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=is_quiet or not console.is_terminal,
        refresh_per_second=4,
    )
    task = bar.add_task("", total=num_requests, note="")

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
