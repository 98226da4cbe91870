"""How long the event loop of a server computes without a pause."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import orjson
import pytest

from onbeat.core.settled_memory import settled_memory
from tests.cpu.server.running import Answer, Served

LONGEST_TURN = 0.02
"""Seconds of processor time that the loop may take at a stretch, of a core whose caches are its own."""
KNOWN_BODY = orjson.dumps({str(number): number for number in range(65_000)})
LONGEST_IN_BODIES = 2.5
"""The same in times that this body takes to parse, beside others that use the processor's caches."""
KEY = "key"
TRIES = 3
"""What holds the loop does so each time."""


class Turns:
    """Measures the longest time that the event loop computed without a look at what has come.

    Processor time of the loop's thread, so that a busy machine makes no difference. A task that wakes in each
    turn would see as much, but keep a core busy that the engine and the client need.
    """

    longest = 0.0

    def __init__(self, select: Callable[[float | None], Any]) -> None:
        self._select = select
        self._began = time.thread_time()

    def select(self, timeout: float | None = None) -> Any:
        self.end()
        try:
            return self._select(timeout)
        finally:
            self._began = time.thread_time()

    def end(self) -> None:
        self.longest = max(self.longest, time.thread_time() - self._began)


@contextmanager
def watched_loop() -> Iterator[Turns]:
    """Watch the event loop, without what garbage collection of the test run itself would add."""
    selector = cast(Any, asyncio.get_running_loop())._selector
    with settled_memory(), pytest.MonkeyPatch.context() as patch:
        turns = Turns(selector.select)
        patch.setattr(selector, "select", turns.select)
        yield turns
        turns.end()


def seconds_of_known_body() -> float:
    start = time.thread_time()
    orjson.loads(KNOWN_BODY)
    return time.thread_time() - start


async def quickly(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return an answer; check that no turn of the event loop took long meanwhile."""
    longest = []
    for _ in range(TRIES):
        with watched_loop() as turns:
            answer = await ask()
        longest.append(turns.longest)
        if turns.longest < max(LONGEST_TURN, LONGEST_IN_BODIES * seconds_of_known_body()):
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
