"""Waiting for what happens, with bounds in seconds that pass as slowly as the machine runs those who want to.

A bound by the clock says how much else the machine does. Where three processes want the two cores that there
are, a second counts as two thirds of one here. What never happens still ends the wait.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

_LOAD = Path("/proc/loadavg")


class Patience:
    """Counts the seconds of one that would have run all the time, had it been let."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._cores = len(os.sched_getaffinity(0))
        self.seconds = 0.0

    def look(self) -> float:
        """Return the seconds so far; to be called more often than the load changes."""
        now = time.monotonic()
        num_wanting = int(_LOAD.read_text().split()[3].partition("/")[0])
        self.seconds += (now - self._last) * min(1.0, self._cores / max(1, num_wanting))
        self._last = now
        return self.seconds


def wait_for(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Wait until a condition holds; fail after so many seconds in which it could have come to hold."""
    patience = Patience()
    while not condition():
        assert patience.look() < timeout, "waited in vain"
        time.sleep(0.02)


async def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Wait until a condition holds, as `wait_for` does, while the event loop goes on."""
    patience = Patience()
    while not condition():
        assert patience.look() < timeout, "waited in vain"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def at_most(seconds: float) -> AsyncIterator[Patience]:
    """Cancel what the block awaits, with TimeoutError, once it has had so many seconds."""
    patience = Patience()
    loop = asyncio.get_running_loop()

    async def watch(scope: asyncio.Timeout) -> None:
        while patience.look() < seconds:
            await asyncio.sleep(0.02)
        scope.reschedule(loop.time())

    async with asyncio.timeout(None) as scope:
        watcher = asyncio.create_task(watch(scope))
        try:
            yield patience
        finally:
            watcher.cancel()


@contextmanager
def patience() -> Iterator[Patience]:
    """Count the seconds of a block that may hold the thread."""
    counted, has_ended = Patience(), threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.02):
            counted.look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield counted
    finally:
        has_ended.set()
        watcher.join()
        counted.look()
