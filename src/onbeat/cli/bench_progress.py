"""The progress bar of a load test."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import TaskID

from onbeat.bench.bench_load import RunConfig
from onbeat.bench.record import SentRequest
from onbeat.bench.result import BenchRun
from onbeat.cli.outputs import progress_bar


class BenchProgress:
    """Shows phases, a bar per run, and failures as they come.

    Parameters
    ----------
    is_quiet : show nothing.
    """

    def __init__(self, console: Console, *, is_quiet: bool, num_runs: int) -> None:
        self._bar = progress_bar(console, is_quiet=is_quiet, refresh_per_second=2)
        self._num_runs = num_runs
        self._num_started = 0
        self._num_not_completed = 0
        self._task: TaskID = self._bar.add_task("", total=None, note="")

    @property
    def is_measuring(self) -> bool:
        """Whether a run has begun, so that there is something to keep."""
        return self._num_started > 0

    def __enter__(self) -> BenchProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self.is_measuring:
            self._bar.update(self._task, visible=False)  # the error says all
        self._bar.stop()

    def on_phase(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def on_start(self, run: RunConfig, num_requests: int) -> None:
        self._num_started += 1
        self._num_not_completed = 0
        position = f"[{self._num_started}/{self._num_runs}] " if self._num_runs > 1 else ""
        self._bar.reset(self._task, total=num_requests, description=f"{position}{run.title}", note="")

    def on_request(self, record: SentRequest) -> None:
        if not record.is_completed:
            self._num_not_completed += 1
            self._bar.update(self._task, note=f"{self._num_not_completed} not completed ({record.cause})")
        self._bar.advance(self._task)

    def on_result(self, result: BenchRun) -> None:
        rate = result.summary.counts.output_throughput
        self._bar.update(self._task, note=f"{rate:,.0f} output tok/s")
