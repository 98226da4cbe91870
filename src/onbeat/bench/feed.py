"""Prompts made ahead of need, within bounded memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import islice

from onbeat.bench.objectives import RequestObjectives
from onbeat.bench.record import RequestRecord
from onbeat.bench.runner import OfferedRequest
from onbeat.workload.workload import Workload

BATCH = 64


class PromptFeed:
    """Hands out the requests of a workload in order, to any number of tasks.

    The first `lookahead` prompts are made before the run, so that short runs are not disturbed at all;
    longer ones are topped up in a thread while the run goes on. Prompts are let go once handed out.

    Parameters
    ----------
    objectives : those that requests are held to; None leaves them without.
    lookahead : prompts that are made before the run.
    limit : hand out this many requests only.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        objectives: RequestObjectives | None = None,
        lookahead: int = 4096,
        limit: int | None = None,
    ) -> None:
        self._workload = workload
        self._objectives = objectives
        self._lookahead = lookahead
        self._indices: Iterator[int] = iter(range(len(workload) if limit is None else limit))
        self._ready: deque[OfferedRequest] = deque()
        self._is_exhausted = False
        self._lock = asyncio.Lock()
        self._refill: asyncio.Task[None] | None = None

    async def fill(self) -> None:
        """Make the first prompts; call before the clock starts."""
        while not self._is_exhausted and len(self._ready) < self._lookahead:
            await self._make_batch()

    def __aiter__(self) -> PromptFeed:
        return self

    async def __anext__(self) -> OfferedRequest:
        while not self._ready:
            if self._is_exhausted:
                raise StopAsyncIteration
            await self._make_batch()
        offered = self._ready.popleft()
        is_low = len(self._ready) < self._lookahead // 2
        if is_low and not self._is_exhausted and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self.fill())
        return offered

    async def _make_batch(self) -> None:
        async with self._lock:  # one batch at a time keeps the order
            batch = await asyncio.to_thread(self._make, list(islice(self._indices, BATCH)))
            self._is_exhausted = len(batch) < BATCH
            self._ready.extend(batch)

    def _make(self, indices: list[int]) -> list[OfferedRequest]:
        return [self._offer(index) for index in indices]

    def _offer(self, index: int) -> OfferedRequest:
        spec = self._workload.request(index)
        record = RequestRecord(
            index=index,
            num_prompt_tokens=spec.num_prompt_tokens,
            max_tokens=spec.max_tokens,
            group=spec.group,
        )
        if self._objectives is not None:
            self._objectives.note(record)
        return OfferedRequest(spec.prompt, record)
