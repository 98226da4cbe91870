"""Threads that their callers share evenly, so that nobody's long work holds up another's short work."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

TURN_SECONDS = 0.002
"""What one request may take of the event loop before all others have their turn."""


class Turns:
    """Gives the event loop back now and then, while one request has much to do."""

    def __init__(self) -> None:
        self._end = time.monotonic() + TURN_SECONDS

    async def rest(self) -> None:
        """Let others go on if this turn is over; call it between two small pieces of work."""
        if time.monotonic() >= self._end:
            await asyncio.sleep(0)
            self._end = time.monotonic() + TURN_SECONDS


MOST_SHORT_WORK = 2**14
"""Characters of work that is short: the threads of short work do no other."""

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Job:
    caller: str
    size: int
    work: Callable[[], Any]
    done: asyncio.Future[Any]
    work_before: int
    """Of others, ended when it came."""


class FairThreads:
    """Threads that do the work of many callers, for one event loop.

    Work waits in proportion to its size and to how much its caller has waiting: next comes what has seen the
    most work of others end, compared with the time that an even share of a thread would take for it. Short
    work so goes before long work, a caller with little before one with much, and nothing waits for ever.

    Parameters
    ----------
    name : of the threads.
    num_threads : that do any work.
    num_short : more threads, for short work alone (`MOST_SHORT_WORK`), which begun long work cannot hold up.

    Notes
    -----
    This is highest response ratio next (P. Brinch Hansen, "An analysis of response ratio scheduling", IFIP
    Congress 1971) with the two departures that the size is taken times the waiting work of the same caller,
    and that waiting is measured by the work of others, not by a clock. Begun work is not interrupted.
    """

    def __init__(self, name: str, *, num_threads: int, num_short: int = 0) -> None:
        self._pool = ThreadPoolExecutor(num_threads + num_short, thread_name_prefix=name)
        self._num_free = num_threads + num_short
        self._num_long_free = num_threads
        self._waiting: list[_Job] = []
        self._work_done = 0

    def close(self) -> None:
        """Let go of the threads; what waits is cancelled."""
        for job in self._waiting:
            job.done.cancel()
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, caller: str, size: int, work: Callable[[], _T]) -> _T:
        """Do work in a thread and return its result; its errors are raised here.

        Parameters
        ----------
        caller : for whom it is.
        size : characters, or what else takes as long.
        work : what to do. If the caller is cancelled while it waits, it is not done.
        """
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        job = _Job(caller, max(size, 1), work, done, self._work_done)
        self._waiting.append(job)
        self._begin()
        try:
            return await done
        except asyncio.CancelledError:
            if job in self._waiting:
                self._waiting.remove(job)
            raise
        finally:
            del done, job  # an error refers to this frame: both would stay until somebody looks for garbage

    def _begin(self) -> None:
        while self._num_free and (job := self._next()) is not None:
            self._waiting.remove(job)
            self._num_free -= 1
            self._num_long_free -= job.size > MOST_SHORT_WORK
            doing = asyncio.get_running_loop().run_in_executor(self._pool, job.work)
            doing.add_done_callback(partial(self._end, job))

    def _next(self) -> _Job | None:
        """Return the work that is to be done next, or None if none may begin."""
        ready = [job for job in self._waiting if self._num_long_free or job.size <= MOST_SHORT_WORK]
        if not ready:
            return None
        num_waiting = Counter(job.caller for job in self._waiting)

        # By the response ratio; one more, so that of what has not waited the shortest goes first.
        done = self._work_done + 1
        return max(ready, key=lambda job: (done - job.work_before) / (job.size * num_waiting[job.caller]))

    def _end(self, job: _Job, doing: asyncio.Future[Any]) -> None:
        self._num_free += 1
        self._num_long_free += job.size > MOST_SHORT_WORK
        self._work_done += job.size
        if doing.cancelled():  # the threads were let go of before it began
            job.done.cancel()
            return
        error = doing.exception()  # asked for always: asyncio logs those that nobody has seen
        if not job.done.cancelled():
            if error is None:
                job.done.set_result(doing.result())
            else:
                job.done.set_exception(error)
        self._begin()
