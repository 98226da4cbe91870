"""`onbeat serve` beside `llama-server` on one GGUF file, in turns: a server that is not asked is suspended.

    python -m benchmarks.serve.native_served FILE.gguf DIRECTORY/llama-server -- --tokenizer TOKENIZER.gguf

For files of random weights, whose tokens are no text: prompts are random token ids below `--ids`. A prompt of
512 tokens is timed to its only token; decodes are whole answers less those of one token. Needs a machine with
nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from operator import truediv

import aiohttp

from benchmarks.harness.pages import machine, markdown_table, middle
from benchmarks.harness.servers import free_port
from benchmarks.serve.slo_live.servers import Fleet, command_spec, onbeat_spec

PROMPT, SHORT, LOADS = 512, 16, {1: 24, 8: 24, 32: 16}
"""Tokens of prompts, and of answers by the number of requests at once."""


async def seconds(session: aiohttp.ClientSession, ids: int, number: int, prompt: int, answer: int) -> float:
    async def ask() -> None:
        tokens = [random.randrange(100, ids) for _ in range(prompt)]
        body = {
            "model": "default",
            "prompt": tokens,
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0,
        }
        async with session.post("/v1/completions", json=body) as response:
            reply = await response.json()
        if response.status != 200 or reply["usage"]["completion_tokens"] != answer:
            raise SystemExit(f"a request failed with status {response.status}: {reply}")

    start = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(number)))
    return time.perf_counter() - start


async def speeds(url: str, ids: int) -> list[float]:
    """Return tokens/s of a prompt, then of decodes of each number of requests."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        await seconds(session, ids, 1, SHORT, 2)
        rates = [PROMPT / statistics.median([await seconds(session, ids, 1, PROMPT, 1) for _ in range(3)])]
        for number, answer in LOADS.items():
            first = await seconds(session, ids, number, SHORT, 1)
            whole = await seconds(session, ids, number, SHORT, answer + 1)
            rates.append(number * answer / (whole - first))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("peer", help="llama-server")
    parser.add_argument("--ids", type=int, default=20_000, help="how many tokens to choose from")
    parser.add_argument("--rounds", type=int, default=3, help="in turns")
    parser.add_argument("flags", nargs="*", help="of `onbeat serve`, after --")
    args = parser.parse_args()
    port = free_port()
    ours = [
        "--served-model-name",
        "default",
        "--max-num-seqs",
        "32",
        "--kv-cache-memory-bytes",
        "2G",
        *args.flags,
    ]
    theirs = f"{args.peer} -m {args.file} --port {port} -t 2 -np 32 -c 32768 -cram 0"
    with Fleet() as fleet:
        servers = (
            fleet.start(onbeat_spec("onbeat", "slo", ours, model=args.file)),
            fleet.start(command_spec("llama.cpp", theirs, f"http://127.0.0.1:{port}", {})),
        )
        runs = []
        for server in servers * args.rounds:
            with server.turn() as url:
                runs.append(asyncio.run(speeds(url, args.ids)))
    table = []
    for name, us, them in zip(
        ("prompt", *LOADS), zip(*runs[::2], strict=True), zip(*runs[1::2], strict=True), strict=True
    ):
        table.append((name, middle(us, 0), middle(them, 0), middle([*map(truediv, us, them)])))
    print(f"{machine()}\n")
    print(markdown_table(("requests", "onbeat, tokens/s", "llama.cpp, tokens/s", "ratio"), table))


if __name__ == "__main__":
    main()
