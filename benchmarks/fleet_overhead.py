"""What a fleet of one replica costs beside a client that speaks to one engine process directly.

    python benchmarks/fleet_overhead.py --rounds 5 --streams 16 --json FILE

Both ways run the same engine in a process of its own, whose steps compute nothing and take a given time, in
interleaved rounds. Measured are the time to the first token of requests that come one by one, the tokens per
second of streams that run together, and the CPU time of this process for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from onbeat.cluster.client import FleetClient
from onbeat.cluster.local_launcher import LocalLauncher
from onbeat.core.request import Request, SamplingParams
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.routers import make_router
from tests.direct_client import ProcessEngineClient
from tests.fake_runner import build_fake_engine

Client = FleetClient | ProcessEngineClient


def fleet(build: Any) -> Client:
    return FleetClient(Fleet(make_router("slo", 0)), LocalLauncher(), lambda _replica, _life: build)


async def ask(client: Client, name: str, max_tokens: int) -> float:
    """Return the time to the first token, seconds."""
    sampling = SamplingParams(max_tokens=max_tokens)
    start = time.monotonic()
    request = Request(request_id=name, prompt_token_ids=tuple(range(32)), sampling=sampling, arrival=start)
    first = 0.0
    async for _ in client.generate(request):
        first = first or time.monotonic()
    return first - start


async def measure(make: Callable[[], Client], args: argparse.Namespace) -> dict[str, float]:
    async with make() as client:
        await asyncio.gather(*(ask(client, f"warm{i}", 20) for i in range(8)))
        ttfts = [await ask(client, f"one{i}", 2) for i in range(args.requests)]
        cpu, start = time.process_time(), time.monotonic()
        await asyncio.gather(*(ask(client, f"s{i}", args.tokens) for i in range(args.streams)))
        num_tokens = args.streams * args.tokens
        return {
            "ttft p50 ms": float(np.median(ttfts)) * 1e3,
            "ttft p99 ms": float(np.percentile(ttfts, 99)) * 1e3,
            "tokens/s": num_tokens / (time.monotonic() - start),
            "client CPU us/token": (time.process_time() - cpu) / num_tokens * 1e6,
        }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    build = partial(build_fake_engine, step_seconds=args.step_ms / 1e3, max_num_seqs=args.streams)
    ways: dict[str, Callable[[], Client]] = {
        "direct": lambda: ProcessEngineClient(build),
        "fleet": lambda: fleet(partial(build, reports_load=True)),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(args.rounds):
        order = list(ways) if number % 2 == 0 else list(ways)[::-1]
        for name in order:
            rounds[name].append(await measure(ways[name], args))
            print(name, {key: round(value, 3) for key, value in rounds[name][-1].items()}, file=sys.stderr)
    keys = rounds["direct"][0]
    ratios = {
        key: sorted(
            one[key] / other[key] for one, other in zip(rounds["fleet"], rounds["direct"], strict=True)
        )
        for key in keys
    }
    return {
        "median": {
            name: {key: round(float(np.median([each[key] for each in of])), 3) for key in keys}
            for name, of in rounds.items()
        },
        "fleet / direct, by round": {key: [round(r, 3) for r in values] for key, values in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--requests", type=int, default=100, help="that come one by one")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = uvloop.run(run(args))
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
