"""A long prompt arrives among running streams: what it does to their token gaps, by policy.

    python -m benchmarks.serve.stall [MODEL] --rounds 3 --json FILE --html FILE

Eight streams generate; then one prompt of 1,500 tokens arrives. Under `prefill-first` the prompt runs in one
step and every stream waits for it; under `sarathi` it runs in chunks of the token budget beside the decodes.
Live servers, interleaved rounds, gaps timed by the client.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import plotly.graph_objects as go

from benchmarks.harness.servers import server

NUM_STREAMS = 8
OUTPUT_TOKENS = 160
LONG_PROMPT_TOKENS = 1500
LONG_PROMPT_AFTER_TOKENS = 40
POLICIES = {
    "prefill-first": ["--policy", "prefill-first"],
    "sarathi, budget 128": ["--policy", "sarathi", "--max-num-batched-tokens", "128"],
}


async def stream(session: aiohttp.ClientSession, url: str, prompt: list[int], num_tokens: int) -> list[float]:
    """Return the arrival times of a completion's chunks."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    times = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return times


async def measure(url: str, seed: int) -> dict[str, Any]:
    """Run the streams and the long prompt; return gaps as (seconds since the prompt's arrival, gap)."""
    chance = random.Random(seed)  # fresh tokens, so that no prefix cache helps

    def prompt(length: int) -> list[int]:
        return [chance.randrange(1000, 40_000) for _ in range(length)]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await stream(session, url, prompt(64), 8)
        streams = [
            asyncio.create_task(stream(session, url, prompt(64), OUTPUT_TOKENS)) for _ in range(NUM_STREAMS)
        ]
        single = await stream(session, url, prompt(64), LONG_PROMPT_AFTER_TOKENS)
        arrival = time.perf_counter()
        long_times = await stream(session, url, prompt(LONG_PROMPT_TOKENS), 8)
        all_times = await asyncio.gather(*streams)
    gaps = [
        (after - arrival, after - before)
        for times in all_times
        for before, after in itertools.pairwise(times)
        if before > single[1]
    ]
    quiet = [gap for when, gap in gaps if when < 0]
    hit = [gap for when, gap in gaps if when >= 0]
    return {
        "gaps": gaps,
        "worst_gap_ms": max(hit) * 1e3,
        "median_gap_before_ms": statistics.median(quiet) * 1e3,
        "long_prompt_ttft_ms": (long_times[0] - arrival) * 1e3,
    }


def plot(results: dict[str, list[dict[str, Any]]]) -> go.Figure:
    figure = go.Figure()
    for (policy, runs), color in zip(results.items(), ("#d1495b", "#2e6f95"), strict=True):
        # The round with the median worst gap stands for the policy.
        run = sorted(runs, key=lambda run: run["worst_gap_ms"])[len(runs) // 2]
        end = run["long_prompt_ttft_ms"] / 1e3 + 1
        points = [(when, gap * 1e3) for when, gap in run["gaps"] if -1.5 <= when <= end]
        figure.add_scatter(
            x=[when for when, _ in points],
            y=[gap for _, gap in points],
            mode="markers",
            marker={"color": color, "size": 8, "opacity": 0.7},
            name=policy,
        )
    figure.add_vline(x=0, line_dash="dot", line_color="#777")
    figure.update_layout(
        title=f"Token gaps of {NUM_STREAMS} streams when a prompt of {LONG_PROMPT_TOKENS:,} tokens arrives",
        xaxis_title="time since the long prompt arrived (s)",
        yaxis_title="gap between two tokens (ms, log)",
        yaxis={"type": "log", "tickvals": [10, 20, 50, 100, 200, 500, 1000, 2000, 5000]},
        template="plotly_white",
        width=900,
        height=480,
        legend={"orientation": "h", "x": 0, "y": 1.1},
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="*", help="model of onbeat serve (default: the embedded one)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--html", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for round_index in range(args.rounds):
        for policy, flags in POLICIES.items():
            with server(args.model, ["--max-num-seqs", "16", *flags]) as url:
                result = asyncio.run(measure(url, round_index))
            results[policy].append(result)
            shown = {key: round(value, 1) for key, value in result.items() if key != "gaps"}
            print(f"round {round_index} {policy}: {shown}", flush=True)
    stalled, smooth = ([run["worst_gap_ms"] for run in runs] for runs in results.values())
    ratios = [a / b for a, b in zip(stalled, smooth, strict=True)]
    interval = f"{statistics.median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f})"
    print(f"worst gap, {' over '.join(POLICIES)}: {interval}")
    if args.json:
        summary = {
            "command": shlex.join(["python", *sys.argv]),
            "worst_gap_ratios": ratios,
            "results": results,
        }
        args.json.write_text(json.dumps(summary) + "\n", encoding="utf-8")
    if args.html:
        plot(results).write_html(args.html, config={"displayModeBar": False})


if __name__ == "__main__":
    main()
