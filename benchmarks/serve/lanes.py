"""What a corpus at full speed does to chats and queries on a live server, and what it gets itself.

    python -m benchmarks.serve.lanes [MODEL] --rounds 3 --json FILE

Chats and queries to embed arrive by Poisson; clients send documents, each the next request when its last one
is answered. Rounds of three loads, for each policy on a server of its own: without the corpus, with it, the
corpus alone. Bars under `slo`: chats and queries keep 0.99 of what they keep without it, and documents
get 60 % of their rate alone. The server judges; latencies of queries are the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness.servers import server

POLICIES = {"slo": ["--policy", "slo"], "sarathi": ["--policy", "sarathi", "--max-num-batched-tokens", "256"]}
LOADS = ("online", "both", "corpus")
CHAT_TOKENS, ANSWER_TOKENS, QUERY_TOKENS, DOCUMENT_TOKENS = 100, 48, 20, 120
NUM_CLIENTS, BATCH = 4, 4
"""Of the corpus, and documents of one request."""
WARM_UP = 2.0
"""Seconds of each load that do not count."""


@dataclass
class Counted:
    """What came of one load; seconds."""

    kept: dict[str, list[bool]] = field(default_factory=lambda: {"chat": [], "query": []})
    query_seconds: list[float] = field(default_factory=list)
    num_document_tokens: int = 0


@dataclass
class Client:
    """Sends one load to a server."""

    session: aiohttp.ClientSession
    url: str
    chance: random.Random
    objectives: dict[str, dict[str, float]]
    start: float = 0.0
    end: float = 0.0
    counted: Counted = field(default_factory=Counted)

    def words(self, num_tokens: int) -> list[int]:
        return [self.chance.randrange(1000, 40_000) for _ in range(num_tokens)]

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            return await response.json() if response.status == 200 else None

    async def chat(self) -> None:
        body = {"prompt": self.words(CHAT_TOKENS), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        began = time.perf_counter()
        answer = await self.post("/v1/completions", body | {"slo": self.objectives["chat"]})
        self.note("chat", began, answer)

    async def query(self) -> None:
        body = {"input": self.words(QUERY_TOKENS), "slo": self.objectives["query"]}
        began = time.perf_counter()
        answer = await self.post("/v1/embeddings", body)
        self.note("query", began, answer)

    def note(self, name: str, began: float, answer: dict[str, Any] | None) -> None:
        if began < self.start + WARM_UP:
            return
        self.counted.kept[name].append(answer is not None and bool(answer["slo"]["met"]))
        if name == "query":
            self.counted.query_seconds.append(time.perf_counter() - began)

    async def documents(self) -> None:
        while time.perf_counter() < self.end:
            texts = [self.words(DOCUMENT_TOKENS) for _ in range(BATCH)]
            answer = await self.post("/v1/embeddings", {"input": texts, "slo": {"class": "offline"}})
            if answer is None:
                await asyncio.sleep(0.5)
            elif self.start + WARM_UP < time.perf_counter() < self.end:
                self.counted.num_document_tokens += answer["usage"]["prompt_tokens"]

    async def arrivals(self, send: Callable[[], Awaitable[None]], rate: float) -> None:
        tasks = []
        while (pause := self.chance.expovariate(rate)) < self.end - time.perf_counter():
            await asyncio.sleep(pause)
            tasks.append(asyncio.ensure_future(send()))
        await asyncio.gather(*tasks)


async def run_load(url: str, which: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Run one load; return what was kept, and the rate of documents."""
    objectives = {
        "chat": {"ttft_ms": args.chat_ttft_ms, "tbt_ms": args.chat_tbt_ms},
        "query": {"ttft_ms": args.query_ms},
    }
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, url, random.Random(f"{seed} {which}"), objectives)
        client.start = time.perf_counter()
        client.end = client.start + args.seconds
        work: list[Awaitable[None]] = []
        if which != "corpus":
            work += [
                client.arrivals(client.chat, args.chat_rate),
                client.arrivals(client.query, args.query_rate),
            ]
        if which != "online":
            work += [client.documents() for _ in range(NUM_CLIENTS)]
        await asyncio.gather(*work)
    counted = client.counted
    found = {"documents_tokens_s": counted.num_document_tokens / (args.seconds - WARM_UP)}
    for name, kept in counted.kept.items():
        if kept:
            found[f"{name}_kept"] = statistics.mean(kept)
    if waits := sorted(counted.query_seconds):
        found["query_p99_ms"] = waits[int(0.99 * len(waits))] * 1e3
    return found


def say(policy: str, rounds: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians over rounds, and the ratios that the bars are about."""

    def median(which: str, name: str) -> float:
        return statistics.median(each[name] for each in rounds[which])

    both, alone = (median(which, "documents_tokens_s") for which in ("both", "corpus"))
    print(f"{policy}: documents {both:,.0f} of {alone:,.0f} tokens/s ({both / alone:.0%}); bar 60 %")
    for name in ("chat", "query"):
        without, beside = (median(which, f"{name}_kept") for which in ("online", "both"))
        print(
            f"{policy}: {name} kept {without:.3f} without the corpus, {beside:.3f} beside it; bar 0.99 of it"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="*", help="model of onbeat serve (default: the embedded one)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--chat-rate", type=float, default=0.7, help="chats a second")
    parser.add_argument("--query-rate", type=float, default=3.0, help="queries a second")
    parser.add_argument("--chat-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--chat-tbt-ms", type=float, default=100.0)
    parser.add_argument("--query-ms", type=float, default=100.0)
    parser.add_argument("--policy", choices=tuple(POLICIES), action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for policy in args.policy or POLICIES:
        results[policy] = {which: [] for which in LOADS}
        with server(args.model, ["--max-num-seqs", "64", *POLICIES[policy]]) as url:
            for round_index in range(args.rounds):
                for which in LOADS:
                    found = asyncio.run(run_load(url, which, round_index, args))
                    results[policy][which].append(found)
                    shown = {key: round(value, 3) for key, value in found.items()}
                    print(f"{policy}, round {round_index}, {which}: {shown}", flush=True)
    for policy, rounds in results.items():
        say(policy, rounds)
    if args.json:
        summary = {"command": shlex.join(["python", *sys.argv]), "results": results}
        args.json.write_text(json.dumps(summary) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
