"""Offers a load to a server: closed loop, open loop, or both.

Closed loop: the next item begins where a request could be sent.
Open loop: each item begins at its scheduled time, whatever became of the others; with a concurrency limit on
top its requests may wait in the client, and that wait counts, because its clock started at the schedule.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.bench.record import Prompt, SentRequest, Status
from onbeat.bench.speculation import Drafts

Send = Callable[[Prompt, SentRequest], Awaitable[SentRequest]]
"""Sends one request and fills in its record; must not raise."""
OnEnd = Callable[[SentRequest], None]
"""Hears of each request that ended by itself (for progress)."""


@dataclass(slots=True, kw_only=True)
class LoadOutcome:
    """The records of a run, in the order in which requests ended."""

    records: list[SentRequest]
    start: float
    duration: float
    """From the start to the end of the last request, seconds."""
    interrupted: bool
    drafts: Drafts = field(default_factory=Drafts)
    """What the server counted of speculation meanwhile; empty where it does not say."""


class LoadRunner:
    """Begins items, which are requests or what sends several, and sends their requests.

    Parameters
    ----------
    offsets : when items begin, in seconds from the start; None begins them as slots come free.
    max_concurrency : most requests open at once; None sets no limit.
    """

    def __init__(
        self,
        send: Send,
        *,
        offsets: NDArray[np.float64] | None,
        max_concurrency: int | None,
        on_end: OnEnd = lambda _record: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._send, self._offsets, self._on_end = send, offsets, on_end
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._records: list[SentRequest] = []

    async def run(
        self,
        items: AsyncIterable[Any],
        begin: Callable[[LoadRunner, Any, float], Coroutine[None, None, None]],
        stop: asyncio.Event,
    ) -> LoadOutcome:
        """Offer all items; when `stop` is set, cancel what is open and return what is there.

        Parameters
        ----------
        begin : sends an item by the runner's `serve`, given when it is due.
        """
        clock, records = self.clock, self._records
        start = clock()
        offering = asyncio.create_task(self._offer(items, begin, start))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({offering, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            interrupted = not offering.done()
            for task in (offering, stopping):
                task.cancel()
            results = await asyncio.gather(offering, stopping, return_exceptions=True)
        if not interrupted and isinstance(results[0], BaseException):
            raise results[0]
        ended = [record.end for record in records if record.status is not Status.INTERRUPTED]
        end = clock() if interrupted else max(ended, default=start)
        return LoadOutcome(
            records=records, start=start, duration=max(end - start, 1e-9), interrupted=interrupted
        )

    async def serve(self, prompt: Prompt, record: SentRequest) -> None:
        """Send one request, once there is a slot for it."""
        if self._slots is None:
            await self._exchange(prompt, record)
            return
        asked = self.clock()
        async with self._slots:
            record.slot_wait = self.clock() - asked
            await self._exchange(prompt, record)

    async def _offer(
        self,
        items: AsyncIterable[Any],
        begin: Callable[[LoadRunner, Any, float], Coroutine[None, None, None]],
        start: float,
    ) -> None:
        position, due = 0, start
        async with asyncio.TaskGroup() as group:
            async for item in items:
                if self._offsets is not None:
                    due = start + float(self._offsets[position])
                    await asyncio.sleep(max(0.0, due - self.clock()))
                elif self._slots is not None:
                    await self._slots.acquire()  # an item begins where a request could be sent
                    self._slots.release()
                    due = self.clock()
                position += 1
                group.create_task(begin(self, item, due))
                await asyncio.sleep(0)  # let it take its slot

    async def _exchange(self, prompt: Prompt, record: SentRequest) -> None:
        self._records.append(record)
        await self._send(prompt, record)
        self._on_end(record)
