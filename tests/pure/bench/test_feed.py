from __future__ import annotations

import asyncio

import numpy as np
import pytest

from onbeat.bench.bench_load import Workload
from onbeat.bench.session import PromptFeed
from onbeat.workload.offered import OfferedLoad


class CountingPrompts:
    """Prompts that note how many of them were made."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self, index: int) -> str:
        self.num_made += 1
        return f"prompt {index}"


def workload(count: int, prompts: CountingPrompts | None = None) -> Workload:
    lengths = np.full(count, 2, dtype=np.int64)
    return Workload(
        load=OfferedLoad(name="test", num_prompt_tokens=lengths, num_output_tokens=lengths),
        prompts=prompts or CountingPrompts(),
    )


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 1000])
async def test_every_request_comes_once_and_in_order(count: int) -> None:
    feed = PromptFeed(workload(count), lookahead=100)
    await feed.fill()

    offered = [request async for request in feed]

    assert [request.record.index for request in offered] == list(range(count))
    assert [request.prompt for request in offered] == [f"prompt {i}" for i in range(count)]


async def test_several_readers_share_one_feed() -> None:
    feed = PromptFeed(workload(500), lookahead=70)
    seen: list[int] = []

    async def read() -> None:
        async for request in feed:
            seen.append(request.record.index)
            await asyncio.sleep(0)

    await asyncio.gather(*(read() for _ in range(7)))

    assert sorted(seen) == list(range(500))


async def test_no_more_prompts_than_the_lookahead_wait_in_memory() -> None:
    prompts = CountingPrompts()
    feed = PromptFeed(workload(10_000, prompts), lookahead=128)
    await feed.fill()

    assert prompts.num_made == 128
    for _ in range(300):
        await anext(feed)
    await asyncio.sleep(0.05)
    assert prompts.num_made <= 300 + 2 * 128


async def test_a_limit_ends_the_feed_early() -> None:
    feed = PromptFeed(workload(500), limit=3)

    assert [request.record.index async for request in feed] == [0, 1, 2]
