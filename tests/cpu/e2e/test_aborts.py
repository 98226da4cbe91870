"""Many clients, some of which leave at a random moment: nothing is lost, leaked or hung."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.cpu.e2e.program import SMALL, ServerProgram, read_metrics, serving
from tests.waiting import at_most, wait_for

NUM_REQUESTS = 200
CONCURRENCY = 64


@dataclass
class Plan:
    """What one client does."""

    body: dict[str, Any]
    leaves_after_seconds: float | None = None
    leaves_after_events: int | None = None


@dataclass
class Outcome:
    has_left: bool = False
    events: list[Any] = field(default_factory=list)
    answer: dict[str, Any] | None = None


def make_plans(seed: int) -> list[Plan]:
    dice = random.Random(seed)
    plans = []
    for _ in range(NUM_REQUESTS):
        num_prompt = dice.choice([1, 17, 60, 300])
        body = {
            "prompt": [dice.randrange(1, 250) for _ in range(num_prompt)],
            "max_tokens": dice.randrange(1, 120),
            "ignore_eos": True,
            "stream": dice.random() < 0.6,
            "n": dice.choice([1, 1, 1, 2]),
        }
        plan = Plan(body)
        if dice.random() < 0.4:
            plan.leaves_after_seconds = dice.choice([0.0, 0.002, 0.02, 0.1, 0.3])
            if body["stream"] and dice.random() < 0.5:
                plan.leaves_after_events, plan.leaves_after_seconds = dice.randrange(1, 30), None
        plans.append(plan)
    return plans


async def run_client(session: aiohttp.ClientSession, url: str, plan: Plan) -> Outcome:
    outcome = Outcome()

    async def ask() -> None:
        async with session.post(f"{url}/v1/completions", json=plan.body) as reply:
            assert reply.status == 200, await reply.text()
            if not plan.body["stream"]:
                outcome.answer = await reply.json()
                return
            async for line in reply.content:
                if line.strip():
                    outcome.events.append(line.removeprefix(b"data: ").strip())
                if len(outcome.events) == plan.leaves_after_events:
                    outcome.has_left = True
                    return

    try:
        async with asyncio.timeout(plan.leaves_after_seconds):
            await ask()
    except TimeoutError:
        outcome.has_left = True
    return outcome


async def run_clients(url: str, plans: list[Plan]) -> list[Outcome]:
    seats = asyncio.Semaphore(CONCURRENCY)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def seated(plan: Plan) -> Outcome:
            async with seats:
                return await run_client(session, url, plan)

        async with at_most(120):
            return await asyncio.gather(*(seated(plan) for plan in plans))


def check_complete(plan: Plan, outcome: Outcome) -> None:
    """An answer that its client waited for has all of its tokens."""
    num_choices, max_tokens = plan.body["n"], plan.body["max_tokens"]
    if not plan.body["stream"]:
        assert outcome.answer is not None
        assert outcome.answer["usage"]["completion_tokens"] == num_choices * max_tokens
        assert [c["finish_reason"] for c in outcome.answer["choices"]] == ["length"] * num_choices
        return
    assert outcome.events[-1] == b"[DONE]"
    chunks = [orjson.loads(event) for event in outcome.events[:-1]]
    assert not any("error" in chunk for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert sum(reason == "length" for reason in reasons) == num_choices


def check_idle(server: ServerProgram) -> None:
    def is_idle() -> bool:
        values = server.metrics()
        names = ("onbeat_requests_running", "onbeat_requests_waiting", "onbeat_kv_blocks_used")
        return all(values[name] == 0 for name in names)

    wait_for(is_idle, timeout=5)


async def check_no_block_is_leaked(server: ServerProgram) -> None:
    """While one request runs alone, the blocks in use are those it needs and no more."""
    for _ in range(20):  # a client that is held up asks when the request has ended
        values = await metrics_beside_one(server)
        if values["onbeat_requests_running"]:
            break
    assert values["onbeat_requests_running"] == 1
    assert 2 <= values["onbeat_kv_blocks_used"] <= 1 + (20 + 1000) // 16


async def metrics_beside_one(server: ServerProgram) -> dict[str, float]:
    """Return what is reported after a request's first tokens."""
    body = {"prompt": [5] * 20, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/completions", json=body) as reply,
    ):
        for _ in range(4):
            await reply.content.readline()
        async with session.get(f"{server.url}/metrics") as metrics:
            return read_metrics(await metrics.text())


@contextmanager
def small_server(directory: Path, *flags: str) -> Iterator[ServerProgram]:
    """A server whose cache is too small for all that run at once, so that preemption takes part."""
    common = ("--load-format", "dummy", "--dtype", "float32", *SMALL, "--max-num-seqs", "32")
    with serving(directory, *common, "--kv-cache-memory-bytes", "512K", *flags) as server:
        yield server


async def check_200_requests_with_random_aborts(server: ServerProgram, seed: int) -> None:
    engine = server.engine_pid
    plans = make_plans(seed)
    outcomes = await run_clients(server.url, plans)
    stayed = [(p, o) for p, o in zip(plans, outcomes, strict=True) if not o.has_left]
    assert 100 < len(stayed) < 180, "the test needs both kinds of clients"
    for plan, outcome in stayed:
        check_complete(plan, outcome)
    check_idle(server)
    await check_no_block_is_leaked(server)
    check_idle(server)
    values = server.metrics()
    assert values["onbeat_requests_total{abort}"] > 10
    assert values["onbeat_requests_total{error}"] == 0
    assert server.engine_pid == engine  # its idle checks found queues and blocks in order
    assert not any("Traceback" in line for line in server.lines)


async def test_200_requests_with_random_aborts(tiny_directory: Path) -> None:
    """Under `slo`, which lets requests wait rather than preempt them, clients leave in the short soak."""
    with small_server(tiny_directory, "--policy", "sarathi") as server:
        await check_200_requests_with_random_aborts(server, seed=0)
        assert server.metrics()["onbeat_preemptions_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["--no-async-scheduling", "--async-scheduling"])
@pytest.mark.parametrize("policy", ["static", "orca", "prefill-first", "sarathi", "slo"])
async def test_aborts_under_every_policy(tiny_directory: Path, policy: str, mode: str) -> None:
    with small_server(tiny_directory, "--policy", policy, mode) as server:
        await check_200_requests_with_random_aborts(server, seed=1)


@pytest.mark.slow
async def test_when_all_stay_all_are_answered(tiny_directory: Path) -> None:
    plans = [Plan(plan.body) for plan in make_plans(seed=2)]
    with small_server(tiny_directory) as server:
        for plan, outcome in zip(plans, await run_clients(server.url, plans), strict=True):
            check_complete(plan, outcome)
        check_idle(server)
