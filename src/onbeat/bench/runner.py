"""Offers requests to a server: closed loop, open loop, or both.

Closed loop: a fixed number of workers, each sending its next request when the last one ended.
Open loop: each request is sent at its scheduled time, whatever became of the others; with a concurrency
limit on top it may wait in the client, and that wait counts, because its clock started at the schedule.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.bench.record import RequestRecord, Status
from onbeat.bench.speculation import DraftCounts

Send = Callable[[str, RequestRecord], Awaitable[RequestRecord]]


@dataclass(slots=True)
class OfferedRequest:
    """A prompt on its way to the server, and the record that goes with it."""

    prompt: str
    record: RequestRecord


class LoadPlan(NamedTuple):
    """When to send."""

    offsets: NDArray[np.float64] | None
    """Scheduled arrivals in seconds from the start, one a request; None sends as fast as slots allow."""
    max_concurrency: int | None
    """Most requests open at once; None sets no limit."""


@dataclass(slots=True, kw_only=True)
class LoadOutcome:
    """The records of a run, in the order in which requests ended."""

    records: list[RequestRecord]
    start: float
    duration: float
    """From the start to the end of the last request, seconds."""
    interrupted: bool
    drafts: DraftCounts | None = None
    """What the server counted of speculation meanwhile; None where it does not say."""


async def until_stopped(
    offer: Callable[[float], Coroutine[None, None, None]],
    records: list[RequestRecord],
    stop: asyncio.Event,
    clock: Callable[[], float],
) -> LoadOutcome:
    """Offer a load; when `stop` is set, cancel what is open.

    Parameters
    ----------
    offer : sends all of it, given when it starts.
    records : gets what is sent.
    """
    start = clock()
    offering = asyncio.create_task(offer(start))
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
    return LoadOutcome(records=records, start=start, duration=max(end - start, 1e-9), interrupted=interrupted)


class LoadRunner:
    """Runs one load plan.

    Parameters
    ----------
    send : sends one request and fills in its record; must not raise.
    on_end : called after each request that ended by itself (for progress).
    """

    def __init__(
        self,
        send: Send,
        plan: LoadPlan,
        *,
        on_end: Callable[[RequestRecord], None] = lambda _record: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._send = send
        self._plan = plan
        self._on_end = on_end
        self._clock = clock
        self._records: list[RequestRecord] = []

    async def run(self, requests: AsyncIterator[OfferedRequest], stop: asyncio.Event) -> LoadOutcome:
        """Offer all requests; when `stop` is set, cancel what is open and return what is there."""
        return await until_stopped(partial(self._offer, requests), self._records, stop, self._clock)

    async def _offer(self, requests: AsyncIterator[OfferedRequest], start: float) -> None:
        if self._plan.offsets is None and self._plan.max_concurrency is not None:
            await self._closed_loop(requests, self._plan.max_concurrency)
        else:
            await self._open_loop(requests, start)

    async def _closed_loop(self, requests: AsyncIterator[OfferedRequest], num_workers: int) -> None:
        async def work() -> None:
            async for offered in requests:
                await self._serve(offered)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(work())

    async def _open_loop(self, requests: AsyncIterator[OfferedRequest], start: float) -> None:
        offsets = self._plan.offsets
        limit = self._plan.max_concurrency
        slots = asyncio.Semaphore(limit) if limit is not None else None
        async with asyncio.TaskGroup() as group:
            position = 0
            async for offered in requests:
                if offsets is not None:
                    scheduled = start + float(offsets[position])
                    offered.record.scheduled = scheduled
                    await asyncio.sleep(max(0.0, scheduled - self._clock()))
                position += 1
                group.create_task(
                    self._serve(offered) if slots is None else self._serve_in_slot(offered, slots)
                )

    async def _serve_in_slot(self, offered: OfferedRequest, slots: asyncio.Semaphore) -> None:
        asked = self._clock()
        async with slots:
            offered.record.slot_wait = self._clock() - asked
            await self._serve(offered)

    async def _serve(self, offered: OfferedRequest) -> None:
        self._records.append(offered.record)
        await self._send(offered.prompt, offered.record)
        self._on_end(offered.record)
