"""How long the event loop of a server computes without a pause."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from onbeat.core.settled_memory import settled_memory
from tests.cpu.server.running import Answer, Served

LONGEST_TURN = 0.02
"""Seconds of processor time that the loop may take at a stretch."""
KEY = "key"
TRIES = 3
"""What holds the loop does so each time; what others do to the processor's caches does not."""


class Turns:
    """Measures the longest time that the event loop computed without a pause.

    Processor time of the loop's thread, so that a busy machine makes no difference.
    """

    longest = 0.0

    async def watch(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest, last = max(self.longest, now - last), now


@asynccontextmanager
async def watched_loop() -> AsyncIterator[Turns]:
    """Watch the event loop, without what garbage collection of the test run itself would add."""
    turns = Turns()
    with settled_memory():
        task = asyncio.create_task(turns.watch())
        try:
            yield turns
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def quickly(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return an answer; check that no turn of the event loop took long meanwhile."""
    longest = []
    for _ in range(TRIES):
        async with watched_loop() as turns:
            answer = await ask()
        longest.append(turns.longest)
        if turns.longest < LONGEST_TURN:
            return answer
    raise AssertionError(f"the event loop was held for {longest} s")


async def post_from_outside(served: Served, path: str, body: bytes | None) -> Answer:
    """Post a body, or get a path, in another thread, so that the loop has the server's work alone."""

    def ask() -> Answer:
        address = urlsplit(served.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        try:
            headers = {"authorization": f"Bearer {KEY}"}
            if body is not None:
                headers["content-type"] = "application/json"
            connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    return await asyncio.to_thread(ask)
