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
from typing import Any, NamedTuple, TypeVar

from onbeat.core.errors import ConfigError, OnbeatError

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


def run_tasks(
    worker: Worker[T, R],
    tasks: Sequence[T],
    *,
    jobs: int = 1,
    on_event: OnEvent = lambda _index, _event: None,
    on_result: OnResult[R] = lambda _index, _result: None,
) -> list[R | None]:
    """Run independent tasks and return their results in the order of the tasks, whatever `jobs` is.

    Ctrl-C stops it: tasks under way are asked to end with what they have, others do not start.

    Parameters
    ----------
    worker : runs one task.
    jobs : most processes; 1 runs the tasks in this one.
    on_result : hears of results in the order in which tasks end.

    Returns
    -------
    One result a task; None for those that did not run.

    Raises
    ------
    OnbeatError : whatever a worker raises; a worker process that was killed.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be at least 1")
    results: dict[int, R] = {}

    def keep(index: int, result: R) -> None:
        results[index] = result
        on_result(index, result)

    try:
        if jobs == 1 or len(tasks) <= 1:
            _run_here(worker, tasks, on_event, keep)
        else:
            _run_there(worker, tasks, min(jobs, len(tasks)), on_event, keep)
    except KeyboardInterrupt:  # before the first task was under way, or again
        pass
    return [results.get(index) for index in range(len(tasks))]


def _run_here(worker: Worker[T, R], tasks: Sequence[T], on_event: OnEvent, keep: OnResult[R]) -> None:
    stopped = threading.Event()
    for index, task in enumerate(tasks):
        report = partial(on_event, index)
        keep(index, worker(task, TaskContext(report, stopped.is_set, stopped.set)))
        if stopped.is_set():
            return


def _run_there(
    worker: Worker[T, R], tasks: Sequence[T], num_processes: int, on_event: OnEvent, keep: OnResult[R]
) -> None:
    # A fresh interpreter: nothing of the parent's threads or libraries is inherited half-alive.
    processes = multiprocessing.get_context("spawn")
    events: SimpleQueue[tuple[int, Any]] = processes.SimpleQueue()
    stopped = processes.Event()
    executor = ProcessPoolExecutor(
        num_processes, mp_context=processes, initializer=_join, initargs=(events, stopped)
    )
    with executor:
        futures = {executor.submit(_invoke, worker, task, index): index for index, task in enumerate(tasks)}
        try:
            _collect(futures, events, on_event, keep)
        except KeyboardInterrupt:
            stopped.set()
            _collect({each: i for each, i in futures.items() if not each.cancel()}, events, on_event, keep)
        except BaseException:
            stopped.set()
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _collect(
    futures: dict[Future[R], int],
    events: SimpleQueue[tuple[int, Any]],
    on_event: OnEvent,
    keep: OnResult[R],
) -> None:
    """Keep results as they come, and forget their futures."""
    while futures:
        done, _ = wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        while not events.empty():
            on_event(*events.get())
        for future in done:
            try:
                result = future.result()
            except BrokenProcessPool as error:
                raise OnbeatError(
                    "a worker process was killed, perhaps for want of memory; use fewer --jobs"
                ) from error
            keep(futures.pop(future), result)


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


def _invoke(worker: Worker[T, R], task: T, index: int) -> R:
    stopped = _Channel.stopped
    return worker(
        task, TaskContext(lambda event: _Channel.events.put((index, event)), stopped.is_set, stopped.set)
    )
