"""What grammars take of a step, and of streams beside them.

    python -m benchmarks.serve.guided [MODEL] --rounds 5 --json FILE

One live server, 32 streams of 128 tokens after prompts of 64, each begun again as it ends, in rounds of three
loads: all free; half of them under a schema; all under a schema. Shown are

- the share of step time that grammars take with all 32 under a schema (bar: 3 %), and of tokens refused;
- the P99 gap of the free half beside guided streams, over that beside free ones (bar: 1.10).

Each comes with its spread over rounds. Prompts are random tokens, which ask for no JSON, so that more tokens
are refused than beside prompts that do.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness.servers import server

NUM_STREAMS = 32
OUTPUT_TOKENS = 128
PROMPT_TOKENS = 64
LOADS = {"free": 0, "half": NUM_STREAMS // 2, "all": NUM_STREAMS}
"""Streams under a schema."""
ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 60}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ENTRY, "minItems": 100}
"""No answer of 128 tokens is complete: all streams are as long."""


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[float]:
    """Return the gaps between a completion's chunks."""
    times = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


async def client(
    session: aiohttp.ClientSession, url: str, until: float, chance: random.Random, *, is_guided: bool
) -> list[float]:
    """Stream one completion after the other; return all gaps."""
    gaps: list[float] = []
    while time.perf_counter() < until:
        body = {
            "prompt": [chance.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0.7,
            "seed": chance.randrange(2**31),
            "stream": True,
        }
        body |= {"structured_outputs": {"json": SCHEMA}} if is_guided else {"ignore_eos": True}
        gaps += await stream(session, url, body)
    return gaps


async def counts(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    found = re.findall(r'^(onbeat_(?:guide|guided|step)_\w+(?:{result="\w+"})?) (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def run_load(url: str, num_guided: int, *, seconds: float, seed: int) -> dict[str, float]:
    """Run one load; the first half of the streams is free unless all are guided."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        before, until = await counts(session, url), time.perf_counter() + seconds
        clients = [
            client(
                session,
                url,
                until,
                random.Random(f"{seed} {number}"),
                is_guided=number >= NUM_STREAMS - num_guided,
            )
            for number in range(NUM_STREAMS)
        ]
        gaps = await asyncio.gather(*clients)
        after = await counts(session, url)
    moved = {name: after[name] - before.get(name, 0.0) for name in after}
    watched = sorted(gap for each in gaps[: NUM_STREAMS // 2] for gap in each)
    asked = moved['onbeat_guided_tokens_total{result="accepted"}']
    refused = moved['onbeat_guided_tokens_total{result="refused"}']
    return {
        "p99_gap_ms": watched[int(0.99 * len(watched))] * 1e3,
        "median_gap_ms": statistics.median(watched) * 1e3,
        "guide_share": moved["onbeat_guide_seconds_total"] / moved["onbeat_step_seconds_sum"],
        "refused_share": refused / max(asked + refused, 1),
    }


def spread(values: list[float], scale: float = 1.0, unit: str = "") -> str:
    low, middle, high = min(values) * scale, statistics.median(values) * scale, max(values) * scale
    return f"{middle:.2f}{unit} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="*", help="model of onbeat serve (default: the embedded one)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in LOADS}
    with server(args.model, ["--max-num-seqs", str(NUM_STREAMS)]) as url:
        asyncio.run(run_load(url, LOADS["all"], seconds=1.0, seed=-1))  # the first grammar takes longer
        for round_index in range(args.rounds):
            for name, num_guided in LOADS.items():
                found = asyncio.run(run_load(url, num_guided, seconds=args.seconds, seed=round_index))
                results[name].append(found)
                shown = {key: round(value, 4) for key, value in found.items()}
                print(f"round {round_index} {name}: {shown}", flush=True)
    ratios = [
        half["p99_gap_ms"] / free["p99_gap_ms"]
        for half, free in zip(results["half"], results["free"], strict=True)
    ]
    shares = [each["guide_share"] for each in results["all"]]
    refused = [each["refused_share"] for each in results["all"]]
    print(f"grammars' share of step time, {NUM_STREAMS} guided: {spread(shares, 100, ' %')}; bar 3 %")
    print(f"refused tokens: {spread(refused, 100, ' %')}")
    print(f"P99 gap of free streams beside guided ones, over beside free ones: {spread(ratios)}; bar 1.10")
    if args.json:
        summary = {"command": shlex.join(["python", *sys.argv]), "results": results, "gap_ratios": ratios}
        args.json.write_text(json.dumps(summary) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
