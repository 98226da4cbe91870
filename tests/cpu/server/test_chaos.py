"""`onbeat bench chaos` finds the fault of a server that has one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import orjson
import pytest
from aiohttp import web

from onbeat.bench.chaos import Chaos, ChaosPlan
from onbeat.bench.history import counts, violations
from onbeat.core.errors import ConfigError
from tests.waiting import Patience

TOKENS = [f"t{number} " for number in range(20)]
PLAN = ChaosPlan(
    seconds=0.5,
    concurrency=4,
    num_prompts=2,
    max_tokens=20,
    seed=1,
    cancel_share=0.3,
    whole_share=0.2,
    kill_command="true",
    kill_every=0.2,
)  # fmt: skip


@asynccontextmanager
async def faulty_server(fault: str) -> AsyncIterator[str]:
    """A server that is sound while answers are learnt, and has a fault from then on."""
    asked = itertools.count()

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = next(asked)
        usage = {"completion_tokens": 20 if fault != "usage" or number < 4 else 19}
        if not body["stream"]:
            text = "".join(TOKENS) + (str(number) if fault == "unsteady" else "")
            choice = {"text": text, "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": usage})
        sent = {"lost": TOKENS[:7] + TOKENS[8:], "doubled": TOKENS[:8] + TOKENS[7:]}.get(fault, TOKENS)
        answer = web.StreamResponse()
        await answer.prepare(request)
        for token in sent[: 9 if fault == "cut" else None]:
            await answer.write(b"data: %b\n\n" % orjson.dumps({"choices": [{"text": token}]}))
            await asyncio.sleep(0)
        if fault != "cut":
            end = [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
            await answer.write(
                b"".join(b"data: %b\n\n" % orjson.dumps(each) for each in end) + b"data: [DONE]\n\n"
            )
        return answer

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    await runner.cleanup()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", None),
        ("cut", None),
        ("lost", "lost from character"),
        ("doubled", "doubled from character"),
        ("usage", "usage told [19] output tokens, not once 20"),
    ],
)
async def test_a_fault_is_found(fault: str, said: str | None) -> None:
    async with faulty_server(fault) as url, aiohttp.ClientSession() as session:
        chaos = Chaos(session, url, "m", PLAN)
        await chaos.learn()
        patience = Patience()
        num_runs, ended = 0, counts([])
        # On a busy machine little happens in half a second.
        while not (ended["cancelled"] and ended["cut" if fault == "cut" else "whole"] and chaos.result.kills):
            assert patience.look() < 60
            await chaos.run()
            num_runs, ended = num_runs + 1, counts(chaos.result.exchanges)
        await chaos.settle()
    found = violations(chaos.result.exchanges, chaos.result.known)
    assert len(chaos.result.kills) <= 2 * num_runs
    assert {code for _, code in chaos.result.kills} == {0}
    if said is None:
        assert not found
    else:
        assert any(said in each.what for each in found), found


async def test_it_can_be_ended_before_its_time() -> None:
    async with faulty_server("") as url, aiohttp.ClientSession() as session:
        chaos = Chaos(session, url, "m", ChaosPlan(seconds=1e6, num_prompts=2, prompt_words=3, max_tokens=20))
        await chaos.learn()
        assert [len(each.prompt.split()) for each in chaos.result.known] == [3, 6]
        running = asyncio.create_task(chaos.run())
        while not counts(chaos.result.exchanges)["whole"]:
            await asyncio.sleep(0.01)
        chaos.stop()
        await asyncio.wait_for(running, 60)


async def test_a_server_without_steady_answers_cannot_be_checked() -> None:
    async with faulty_server("unsteady") as url, aiohttp.ClientSession() as session:
        with pytest.raises(ConfigError, match="2 prompts"):
            await Chaos(session, url, "m", PLAN).learn()
