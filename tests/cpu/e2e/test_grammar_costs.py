"""What grammars cost those who send none, and the first who sends one: a stand-in behind the real program."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from onbeat.core.request import Grammar
from onbeat.text.grammar.source import json_grammar, regex_grammar
from tests.cpu.e2e.program import ServerProgram, serving
from tests.fleet.test_stand_ins import EIGHT_B
from tests.long.test_grammar_guard import HOSTILE
from tests.waiting import Patience, wait_for

pytestmark = [pytest.mark.alone, pytest.mark.slow]

MOST_SECONDS = 0.05
"""That hostile grammars may add to a gap of somebody else's."""
LARGE = {
    "choices": regex_grammar("|".join(f"{number:x}" for number in range(4000))),
    "enum": json_grammar({"enum": [f"v{number}" for number in range(9000)]}),
    "optional": json_grammar({"properties": {f"p{number}": {} for number in range(250)}}),
    "bounded": json_grammar({"type": "string", "maxLength": 20_000, "pattern": "^(a|b)*c$"}),
}
"""What limits let pass."""


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[ServerProgram]:
    flags = (*EIGHT_B, "--max-num-seqs", "64")
    with serving("Llama-3.1-8B", "--tokenizer", smollm2_gguf, *flags) as program:
        yield program


def is_warm(server: ServerProgram) -> bool:
    """Whether the process that tries grammars waits for the first one."""
    pid = server.process.pid
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for process in child.read_text().split():
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if b"onbeat.text.grammar.guard" in command:
                state, *values = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
                return state == "S" and int(values[10]) >= 15  # hundredths of a second that it has worked
    return False


def seconds_of(server: ServerProgram, **fields: Any) -> float:
    """Return how long one token takes, in seconds of a machine that does nothing else."""
    body = {"prompt": "It is", "max_tokens": 1, **fields}
    patience = Patience()
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return patience.look()


def test_the_first_grammar_waits_no_longer_than_the_second(server: ServerProgram) -> None:
    """Before, it waited for the tokenizer and a process, for a second or more."""
    wait_for(lambda: is_warm(server))
    time.sleep(1.0)  # the engine makes its own at the same time, and there is nothing to see it by
    free = min(seconds_of(server) for _ in range(5))
    first, *others = [seconds_of(server, guided_regex=f"[a-z]{{{number}}}") for number in range(3, 8)]
    assert first - free < 3 * max(max(others) - free, 0.0) + 0.03, (free, first, others)


async def longest_gap(server: ServerProgram, grammars: list[Grammar]) -> float:
    """Return the longest gap of eight free streams, beside those who send grammars again and again."""
    async with aiohttp.ClientSession(server.url) as session:

        async def free(number: int) -> float:
            body = {"prompt": f"{number} is it", "max_tokens": 400, "ignore_eos": True, "stream": True}
            async with session.post("/v1/completions", json=body) as answer:
                times = [time.monotonic() async for line in answer.content if line.startswith(b"data: {")]
            assert len(times) > 300
            return max(late - early for early, late in pairwise(times))

        async def hostile(grammar: Grammar) -> None:
            body = {"prompt": "It is", "max_tokens": 20, "structured_outputs": {"grammar": grammar.text}}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status in (200, 400, 413), await answer.text()

        streams = [asyncio.create_task(free(number)) for number in range(8)]
        await asyncio.sleep(0.5)
        await asyncio.gather(*map(hostile, grammars))
        return max(await asyncio.gather(*streams))


def test_hostile_grammars_cost_others_little(server: ServerProgram) -> None:
    bad = [grammar for grammar, _ in HOSTILE.values()]
    undisturbed = max(asyncio.run(longest_gap(server, [])) for _ in range(3))
    disturbed = asyncio.run(longest_gap(server, bad + list(LARGE.values())))
    assert disturbed < undisturbed + MOST_SECONDS, (disturbed, undisturbed)
