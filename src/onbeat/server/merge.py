"""Several choices of one answer as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from onbeat.server.choice import ChoiceDelta


async def merge(streams: Sequence[AsyncGenerator[ChoiceDelta, None]]) -> AsyncGenerator[ChoiceDelta, None]:
    """Stream what several generators make, as it comes; the first error ends all of them."""
    # bounded: a client that reads slowly holds the choices back instead of filling memory
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await queue.put(delta)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def held_until_all_begin(
    deltas: AsyncGenerator[ChoiceDelta, None], num_choices: int
) -> AsyncGenerator[ChoiceDelta, None]:
    """Stream deltas, the first one only when each choice has one.

    The engine may refuse a choice after it has begun another; the answer must not have its status by then.
    """
    held: list[ChoiceDelta] = []
    begun: set[int] = set()
    async with aclosing(deltas):
        async for delta in deltas:
            if len(begun) == num_choices:
                yield delta
                continue
            held.append(delta)
            begun.add(delta.choice.index)
            if len(begun) == num_choices:
                for each in held:
                    yield each
                held.clear()
