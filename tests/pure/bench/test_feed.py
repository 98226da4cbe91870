from __future__ import annotations

import asyncio

import numpy as np
import pytest

from onbeat.bench.session import LOOKAHEAD, RequestOffer
from onbeat.workload.offered import OfferedLoad


class CountingPrompts:
    """Prompts that note how many of them were made."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self, index: int) -> str:
        self.num_made += 1
        return f"prompt {index}"


def offer(count: int, prompts: CountingPrompts | None = None) -> RequestOffer:
    lengths = np.full(count, 2, dtype=np.int64)
    load = OfferedLoad(name="test", num_prompt_tokens=lengths, num_output_tokens=lengths)
    return RequestOffer(load, prompts or CountingPrompts())


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 1000, LOOKAHEAD + 65])
async def test_every_request_comes_once_and_in_order(count: int) -> None:
    planned = [request async for request in await offer(count).items()]

    assert [request.record.index for request in planned] == list(range(count))
    assert [request.prompt for request in planned] == [f"prompt {i}" for i in range(count)]


async def test_few_more_prompts_than_the_lookahead_wait_in_memory() -> None:
    prompts = CountingPrompts()
    requests = await offer(10_000, prompts).items()

    assert prompts.num_made == LOOKAHEAD
    for _ in range(300):
        await anext(requests)
    await asyncio.sleep(0.05)
    assert prompts.num_made <= 300 + LOOKAHEAD + 64


async def test_a_limit_ends_the_requests_early() -> None:
    assert [request.record.index async for request in await offer(500).items(3)] == [0, 1, 2]
