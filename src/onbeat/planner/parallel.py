"""Independent tasks in several processes: progress as it happens, and an end that can be asked for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event as ProcessEvent
from typing import Any, NamedTuple, Self, TypeVar

from onbeat.core.errors import OnbeatError

T = TypeVar("T")
R = TypeVar("R")

POLL_SECONDS = 0.1
"""How often the parent looks for news of its workers."""


class TaskContext(NamedTuple):
    """What a task may say and ask while it runs."""

    report: Callable[[Any], None]
    """Tells the caller of some progress; the event must be picklable."""
    is_stopped: Callable[[], bool]
    """Whether the task should end early with what it has."""
    stop: Callable[[], None]
    """Ends this task and all others early: Ctrl-C came here."""


Worker = Callable[[T, TaskContext], R]
"""A function of a module, so that other processes find it."""
OnEvent = Callable[[int, Any], None]
"""Hears (task, what the worker reported)."""
OnResult = Callable[[int, R], None]
"""Hears (task, its result)."""


class Pool:
    """Processes that run independent tasks, for as long as a command has some: leave it by `with`.

    Ctrl-C stops all of it: tasks under way are asked to end with what they have, others do not start.

    Parameters
    ----------
    jobs : most processes; 1 runs the tasks in this one.
    worker : whose modules the processes load while this one still reads its input.
    """

    def __init__(self, jobs: int, worker: Worker[Any, Any] | None = None) -> None:
        self._jobs, self._executor = jobs, None
        self._begun: set[Future[Any]] = set()
        """Tasks of `begin` that have not ended."""
        self._stopped: threading.Event | ProcessEvent = threading.Event()
        if jobs == 1:
            return
        # A fresh interpreter: nothing of the parent's threads or libraries is inherited half-alive.
        processes = multiprocessing.get_context("spawn")
        self._events: SimpleQueue[tuple[int, Any]] = processes.SimpleQueue()
        self._stopped = processes.Event()
        self._executor = ProcessPoolExecutor(
            jobs, mp_context=processes, initializer=_join, initargs=(self._events, self._stopped)
        )
        for _ in range(jobs if worker is not None else 0):
            self._executor.submit(bool, worker)  # to unpickle it is to load its modules

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    @property
    def num_idle(self) -> int:
        """Processes that nobody has given a task; 0 where tasks run in this one."""
        self._begun = {each for each in self._begun if not each.done()}
        return max(0, self._jobs - len(self._begun)) if self._executor is not None else 0

    def begin(self, worker: Worker[T, R], task: T) -> Callable[[], R | None]:
        """Begin a task that reports nothing, and return what waits for its result; None if it was stopped.

        In this process it runs only once its result is asked for.
        """
        if self._executor is None:
            return lambda: self.run(worker, [task])[0]
        future = self._executor.submit(_invoke, worker, task, None)
        self._begun.add(future)
        return lambda: self._results([future])[0]

    def run(
        self,
        worker: Worker[T, R],
        tasks: Sequence[T],
        *,
        on_event: OnEvent = lambda _index, _event: None,
        on_result: OnResult[R] = lambda _index, _result: None,
    ) -> list[R | None]:
        """Run tasks and return their results in the order of the tasks, whatever the number of processes.

        Parameters
        ----------
        worker : runs one task.
        on_result : hears of results in the order in which tasks end.

        Returns
        -------
        One result a task; None for those that did not run.

        Raises
        ------
        OnbeatError : whatever a worker raises; a worker process that was killed.
        """
        if self._executor is not None:
            futures = [
                self._executor.submit(_invoke, worker, task, index) for index, task in enumerate(tasks)
            ]
            return self._results(futures, on_event, on_result)
        results: list[R | None] = [None] * len(tasks)
        for index, task in enumerate(tasks):
            if self._stopped.is_set():
                break
            context = TaskContext(partial(on_event, index), self._stopped.is_set, self._stopped.set)
            try:
                results[index] = result = worker(task, context)
            except KeyboardInterrupt:  # before the task was under way
                self._stopped.set()
                break
            on_result(index, result)
        return results

    def _results(
        self,
        futures: Sequence[Future[R]],
        on_event: OnEvent = lambda _index, _event: None,
        on_result: OnResult[R] = lambda _index, _result: None,
    ) -> list[R | None]:
        """Return the results of tasks; Ctrl-C ends them early."""
        results: dict[Future[R], R] = {}
        left = {future: index for index, future in enumerate(futures)}
        while left:
            try:
                done, _ = wait(left, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                while not self._events.empty():
                    on_event(*self._events.get())
                for future in done:
                    index = left.pop(future)
                    if not future.cancelled():
                        results[future] = future.result()
                        on_result(index, results[future])
            except KeyboardInterrupt:
                self._stopped.set()
                for future in left:
                    future.cancel()
            except BrokenProcessPool as error:
                raise OnbeatError(
                    "a worker process was killed, perhaps for want of memory; use fewer --jobs"
                ) from error
        return [results.get(future) for future in futures]


class _Channel:
    """Where a worker process finds what came with it: queues travel with a process, not with a task."""

    events: SimpleQueue[tuple[int, Any]]
    stopped: ProcessEvent


def _join(events: SimpleQueue[tuple[int, Any]], stopped: ProcessEvent) -> None:
    """Start a worker process. Ctrl-C reaches it too; the parent decides what follows from it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Channel.events, _Channel.stopped = events, stopped
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is gone: nobody would hear of what it does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _invoke(worker: Worker[T, R], task: T, index: int | None) -> R:
    def report(event: Any) -> None:
        if index is not None:  # else nobody empties the queue
            _Channel.events.put((index, event))

    return worker(task, TaskContext(report, _Channel.stopped.is_set, _Channel.stopped.set))
