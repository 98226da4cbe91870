"""Runs planned steps on a model runner, in threads of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from onbeat.core.request import Adapter
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput


class PendingStep(Protocol):
    """A step that was launched, as a `Future` is one."""

    def done(self) -> bool:
        """Return whether `result` returns at once."""

    def result(self) -> ModelRunnerOutput:
        """Return what came of it, once it is done; any thread may ask, more than once."""


def done_step(output: ModelRunnerOutput) -> PendingStep:
    """Return a step that ran while it was launched."""
    step: Future[ModelRunnerOutput] = Future()
    step.set_result(output)
    return step


class StepRunner(Protocol):
    """Something that runs steps in the order in which they are launched."""

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Run a step, or see to it that it runs; called by one thread."""


@runtime_checkable
class TakesAdapters(Protocol):
    """A runner that computes requests with LoRA adapters."""

    adapters: Set[int]
    """Numbers of those that are loaded."""

    def load_adapter(self, adapter: Adapter, others: Collection[int]) -> None:
        """Load one, unless it is loaded; called by the thread that launches steps.

        Parameters
        ----------
        others : numbers of those that must stay; no request has any that is not among them.

        Raises
        ------
        ConfigError : it cannot be loaded; the others are as they were.
        """


class ThreadExecutor:
    """Two threads: one launches the steps in order, the other waits for those that are still to be done.

    The host may plan the next step meanwhile. Torch and native code let go of the interpreter lock inside
    their operators, so planning overlaps with them.

    Parameters
    ----------
    runner : runs the steps.
    on_shutdown : lets go of what they ran on; called once no step runs any more.
    """

    def __init__(self, runner: StepRunner, *, on_shutdown: Callable[[], None] = lambda: None) -> None:
        self._runner = runner
        self._on_shutdown = on_shutdown
        self._launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onbeat-step")
        # Its thread starts with the first step that is not done when it has been launched.
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onbeat-step-end")

    def submit(self, scheduled: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step; steps run one after another in the order of submission."""
        future: Future[ModelRunnerOutput] = Future()
        self._launcher.submit(self._launch, scheduled, future)
        return future

    @property
    def adapters(self) -> Set[int]:
        """Numbers of the LoRA adapters that are loaded."""
        return self._runner.adapters if isinstance(self._runner, TakesAdapters) else frozenset()

    def load_adapter(self, adapter: Adapter, others: Collection[int]) -> Future[None]:
        """Load a LoRA adapter behind the steps that were submitted; see `TakesAdapters`."""
        assert isinstance(self._runner, TakesAdapters), "whoever asks has looked at EngineInfo.max_loras"
        return self._launcher.submit(self._runner.load_adapter, adapter, others)

    def shutdown(self) -> None:
        """Wait for running work and let go of threads and memory."""
        self._launcher.shutdown(wait=True)
        self._waiter.shutdown(wait=True)
        self._on_shutdown()

    def _launch(self, scheduled: SchedulerOutput, future: Future[ModelRunnerOutput]) -> None:
        try:
            step = self._runner.launch(scheduled)
        except BaseException as error:
            future.set_exception(error)
            return
        if step.done():
            _settle(future, step)
        else:
            self._waiter.submit(_settle, future, step)


def _settle(future: Future[ModelRunnerOutput], step: PendingStep) -> None:
    """Give a future what comes of a step."""
    try:
        output = step.result()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(output)
