"""Independent tasks in several processes: progress as it happens, and an end that can be asked for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event as ProcessEvent
from typing import Any, Generic, Protocol, TypeVar

from onbeat.core.errors import ConfigError, OnbeatError

T = TypeVar("T")
R = TypeVar("R")

POLL_SECONDS = 0.1
"""How often the parent looks for news of its workers."""


class TaskContext(Protocol):
    """What a task may say and ask while it runs."""

    def report(self, event: Any, /) -> None:
        """Tell the caller of some progress; the event must be picklable."""
        ...

    def is_stopped(self) -> bool:
        """Whether the task should end early with what it has."""
        ...

    def stop(self) -> None:
        """End this task and all others early: Ctrl-C came here."""
        ...


Worker = Callable[[T, TaskContext], R]
"""A function of a module, so that other processes find it."""


class _LocalContext:
    def __init__(self, index: int, on_event: Callable[[int, Any], None]) -> None:
        self._index = index
        self._on_event = on_event
        self._is_stopped = False

    def report(self, event: Any) -> None:
        self._on_event(self._index, event)

    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        self._is_stopped = True


class _RemoteContext:
    def __init__(self, index: int, events: SimpleQueue[tuple[int, Any]], stopped: ProcessEvent) -> None:
        self._index = index
        self._events = events
        self._stopped = stopped

    def report(self, event: Any) -> None:
        self._events.put((self._index, event))

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()


class _Channel:
    """Where a worker process finds what came with it: queues travel with a process, not with a task."""

    events: SimpleQueue[tuple[int, Any]]
    stopped: ProcessEvent


def run_tasks(
    worker: Worker[T, R],
    tasks: Sequence[T],
    *,
    jobs: int = 1,
    on_event: Callable[[int, Any], None] = lambda _index, _event: None,
    on_result: Callable[[int, R], None] = lambda _index, _result: None,
) -> list[R | None]:
    """Run independent tasks and return their results in the order of the tasks, whatever `jobs` is.

    Ctrl-C stops it: tasks under way are asked to end with what they have, others do not start.

    Parameters
    ----------
    worker : runs one task.
    jobs : most processes; 1 runs the tasks in this one.
    on_event : hears (task, what the worker reported).
    on_result : hears (task, its result), in the order in which tasks end.

    Returns
    -------
    One result a task; None for those that did not run.

    Raises
    ------
    OnbeatError : whatever a worker raises; a worker process that was killed.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be at least 1")
    if jobs == 1 or len(tasks) <= 1:
        return _run_here(worker, tasks, on_event, on_result)
    try:
        return _Pool(worker, tasks, min(jobs, len(tasks)), on_event, on_result).run()
    except KeyboardInterrupt:  # before the first task was under way, or again
        return [None] * len(tasks)


def _run_here(
    worker: Worker[T, R],
    tasks: Sequence[T],
    on_event: Callable[[int, Any], None],
    on_result: Callable[[int, R], None],
) -> list[R | None]:
    results: list[R | None] = [None] * len(tasks)
    for index, task in enumerate(tasks):
        context = _LocalContext(index, on_event)
        try:
            result = worker(task, context)
        except KeyboardInterrupt:
            break
        results[index] = result
        on_result(index, result)
        if context.is_stopped():
            break
    return results


class _Pool(Generic[T, R]):
    def __init__(
        self,
        worker: Worker[T, R],
        tasks: Sequence[T],
        num_processes: int,
        on_event: Callable[[int, Any], None],
        on_result: Callable[[int, R], None],
    ) -> None:
        self._worker = worker
        self._tasks = tasks
        self._on_event = on_event
        self._on_result = on_result
        # A fresh interpreter: nothing of the parent's threads or libraries is inherited half-alive.
        processes = multiprocessing.get_context("spawn")
        self._events: SimpleQueue[tuple[int, Any]] = processes.SimpleQueue()
        self._stopped = processes.Event()
        self._executor = ProcessPoolExecutor(
            num_processes, mp_context=processes, initializer=_join, initargs=(self._events, self._stopped)
        )
        self._results: list[R | None] = [None] * len(tasks)

    def run(self) -> list[R | None]:
        with self._executor:
            futures = {
                self._executor.submit(_invoke, self._worker, task, index): index
                for index, task in enumerate(self._tasks)
            }
            try:
                self._collect(futures)
            except KeyboardInterrupt:
                self._stopped.set()
                self._collect({future: index for future, index in futures.items() if not future.cancel()})
            except BaseException:
                self._stopped.set()
                self._executor.shutdown(wait=False, cancel_futures=True)
                raise
        return self._results

    def _collect(self, futures: dict[Future[R], int]) -> None:
        waiting = {future for future, index in futures.items() if self._results[index] is None}
        while waiting:
            done, waiting = wait(waiting, timeout=POLL_SECONDS)
            self._hear_events()
            for future in done:
                try:
                    result = future.result()
                except BrokenProcessPool as error:
                    raise OnbeatError(
                        "a worker process was killed, perhaps for want of memory; use fewer --jobs"
                    ) from error
                index = futures[future]
                self._results[index] = result
                self._on_result(index, result)

    def _hear_events(self) -> None:
        while not self._events.empty():
            self._on_event(*self._events.get())


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


def _invoke(worker: Worker[T, R], task: T, index: int) -> R:
    return worker(task, _RemoteContext(index, _Channel.events, _Channel.stopped))
