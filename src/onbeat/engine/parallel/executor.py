"""An executor that lets go of more than its thread when it is shut down."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from onbeat.core.protocols import Executor
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput


class ClosingExecutor:
    """Runs steps on another executor, and closes what they ran on after the last one.

    Parameters
    ----------
    executor : runs the steps.
    close : ends the other ranks; called once no step runs any more.
    """

    def __init__(self, executor: Executor, close: Callable[[], None]) -> None:
        self._executor = executor
        self._close = close

    def submit(self, scheduled: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._executor.submit(scheduled)

    def shutdown(self) -> None:
        self._executor.shutdown()
        self._close()
