"""For how long a stream stands still while it moves to another replica, by the length of its prompt.

    python benchmarks/fleet_move.py
    python benchmarks/fleet_move.py --model smollm2-135m-instruct --load-format auto --lengths 100 400 800

With --mixed both replicas compute prompts and generate, nothing moves, and the gaps of the others show what
prompts cost those who stay: compare with and without.

Two replicas, a prefill and a decode one: each prompt is computed on the first, and its stream moves after its
first token. Streams that stay run on the second meanwhile. The time from the last token before a move to the
first one after it is compared with the usual gap between two tokens of the same streams.

Moves take turns with the same prompts for as long whose streams end with their first token, so that nothing
moves: what differs for the streams that stay is what moves do to them, and not what prompts do on cores and
memory that all share.

A stand-in takes the steps' time of its device, and its KV is a few bytes a token: all but the copy is as long
as it would be there. What copies take: `benchmarks/kv_transfer.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median

from onbeat.cluster.client import FleetClient
from onbeat.cluster.config import FleetOptions
from onbeat.cluster.start import open_fleet
from onbeat.core.fleet import PoolSizes
from onbeat.core.request import Request, SamplingParams
from onbeat.engine.build import build_engine
from onbeat.engine.config import EngineConfig
from onbeat.hub.resolve import resolve_model
from onbeat.hub.stand_in import find_stand_in
from onbeat.scheduler.config import SchedulerLimits


@dataclass
class Gaps:
    """Stands in for the histogram of moves, and keeps each."""

    seconds: list[float] = field(default_factory=list)

    def observe(self, seconds: float) -> None:
        self.seconds.append(seconds)


def request_of(name: str, num_prompt: int, max_tokens: int, rng: Random) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(rng.randrange(1000, 30_000) for _ in range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival=time.monotonic(),
    )


async def note_gaps(client: FleetClient, request: Request, gaps: list[float]) -> None:
    """Note the seconds between tokens of a stream, as they come."""
    last = None
    async for delivery in client.generate(request):
        if last is not None:
            gaps.append(delivery.time - last)
        last = delivery.time


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


async def measure(
    client: FleetClient, args: argparse.Namespace, length: int, rng: Random
) -> dict[str, float]:
    """Return what moves of streams with prompts of one length take."""
    moves, usual = Gaps(), list[float]()
    alone, beside_prompts, beside_moves = list[float](), list[float](), list[float]()
    client.counts.move_gap = moves  # type: ignore[assignment]
    bytes_before = client.counts.num_moved_bytes
    steady = [request_of(f"s{length}.{n}", 16, args.steady_tokens, rng) for n in range(args.steady)]
    # Beforehand: while they are made, whoever shares a core with this process stands still.
    made = [request_of(f"m{length}.{n}", length, args.tokens, rng) for n in range(args.moves)]
    gaps = list[float]()
    staying = [asyncio.create_task(note_gaps(client, each, gaps)) for each in steady]
    await asyncio.sleep(args.alone_seconds)
    _take(gaps, alone)
    for start in range(0, args.moves - args.at_once + 1, args.at_once):
        movers = made[start : start + args.at_once]
        begin = time.monotonic()
        await asyncio.gather(*(note_gaps(client, _now(each), usual) for each in movers))
        seconds = time.monotonic() - begin
        _take(gaps, beside_moves)
        # The same prompts for as long, whose streams end with their first token.
        ended = [_now(each, name=f"p{each.request_id}", max_tokens=1) for each in movers]
        await asyncio.gather(asyncio.sleep(seconds), *(note_gaps(client, each, []) for each in ended))
        _take(gaps, beside_prompts)
    for task in staying:
        task.cancel()
    await asyncio.gather(*staying, return_exceptions=True)
    gap = median(usual)
    ratios = [each / gap for each in moves.seconds]
    return {
        "prompt": length,
        "moves": len(ratios),
        "kv_bytes_a_move": (client.counts.num_moved_bytes - bytes_before) / max(len(ratios), 1),
        "usual_gap_ms": 1e3 * gap,
        "p50_gaps": quantile(ratios, 0.5),
        "p99_gaps": quantile(ratios, 0.99),
        "p50_gap_of_others_beside_prompts_ms": 1e3 * quantile(beside_prompts, 0.5),
        "p50_gap_of_others_ms": 1e3 * quantile(beside_moves, 0.5),
        "p99_gap_of_others_alone_ms": 1e3 * quantile(alone, 0.99),
        "p99_gap_of_others_beside_prompts_ms": 1e3 * quantile(beside_prompts, 0.99),
        "p99_gap_of_others_ms": 1e3 * quantile(beside_moves, 0.99),
    }


def _now(request: Request, *, name: str | None = None, max_tokens: int | None = None) -> Request:
    """Return a request that arrives now, perhaps another one with the same prompt."""
    return replace(
        request,
        request_id=name or request.request_id,
        sampling=SamplingParams(max_tokens=max_tokens or request.sampling.max_tokens),
        arrival=time.monotonic(),
    )


def _take(gaps: list[float], into: list[float]) -> None:
    """Let what has been noted so far belong to a part of the run."""
    into += gaps
    gaps.clear()


async def run(args: argparse.Namespace) -> None:
    is_stand_in = args.load_format == "stand-in"
    engine = EngineConfig(
        model=find_stand_in(args.model) if is_stand_in else resolve_model(args.model, offline=True),
        load_format=args.load_format,
        device=args.device if is_stand_in else "cpu",
        limits=SchedulerLimits(max_model_len=4096, enable_prefix_caching=False, policy=args.policy),
        kv_cache_memory_bytes=None if is_stand_in else 400 << 20,
    )
    options = FleetOptions(
        replicas=2,
        disaggregate=None if args.mixed else PoolSizes(prefill=1, decode=1),
        kv_transport=args.kv_transport,
        router="least-outstanding",
    )
    rng = Random(args.seed)
    with ExitStack() as stack:
        async with open_fleet(options, engine, build_engine, stack, on_progress=lambda _: None) as client:
            for length in args.lengths:
                found = await measure(client, args, length, rng)
                print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--load-format", choices=("auto", "stand-in"), default="stand-in")
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--kv-transport", choices=("auto", "cma", "tcp"), default="auto")
    parser.add_argument("--policy", default="sarathi")
    parser.add_argument("--mixed", action="store_true", help="no replica of its own for prompts")
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 800, 1200, 1600, 3000])
    parser.add_argument("--moves", type=int, default=40, help="of each length")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=60, help="of each stream that moves")
    parser.add_argument("--steady", type=int, default=8, help="streams that stay on the decode replica")
    parser.add_argument("--steady-tokens", type=int, default=4000)
    parser.add_argument("--alone-seconds", type=float, default=3.0, help="for which these run without moves")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
