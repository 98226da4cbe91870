"""Runs planned steps on a model runner, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from onbeat.core.step import ModelRunnerOutput, SchedulerOutput


class StepRunner(Protocol):
    """Something that can run a step here and now."""

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput: ...


class ThreadExecutor:
    """One worker thread: steps run in order, and the host may plan the next one meanwhile.

    Torch lets go of the interpreter lock inside its operators, so planning overlaps with them.

    Parameters
    ----------
    runner : runs the steps.
    check_alive : raises `EngineDead` if what they run on is gone; called while no step runs.
    on_shutdown : lets go of what they ran on; called once no step runs any more.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        check_alive: Callable[[], None] = lambda: None,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._check_alive = check_alive
        self._on_shutdown = on_shutdown
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onbeat-step")

    def submit(self, scheduled: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._pool.submit(self._runner.execute, scheduled)

    def check_alive(self) -> None:
        self._check_alive()

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True)
        self._on_shutdown()
