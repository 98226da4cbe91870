"""The progress of a capacity search."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onbeat.planner.cases import Labels, case_name
from onbeat.planner.frontier import FrontierPoint
from onbeat.planner.search import Trial


class CapacityProgress:
    """Shows how many searches are done, and the latest run.

    Parameters
    ----------
    labels : case of each task.
    is_quiet : show nothing.
    """

    def __init__(self, console: Console, labels: Sequence[Labels], *, is_quiet: bool) -> None:
        self._labels = labels
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=is_quiet or not console.is_terminal,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("searching", total=len(labels), note="")

    def __enter__(self) -> CapacityProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_event(self, index: int, event: Trial | FrontierPoint) -> None:
        if isinstance(event, Trial):
            met = "kept" if event.verdict.is_met else "missed"
            note = f"{event.rate:.3g} requests/s {met}: {event.verdict.reason}"
        elif event.run is not None:  # one that cannot run is not reported
            note = f"{event.level.name}: {event.run.output_throughput_per_gpu:,.0f} tokens/s per GPU"
        self._bar.update(self._task, note=f"{case_name(self._labels[index])}: {note}")

    def on_result(self, _index: int, _result: object) -> None:
        self._bar.advance(self._task)
