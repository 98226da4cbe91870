"""Replicas are killed under load, again and again: what is lost, how soon it is seen, when streams go on.

    python benchmarks/fleet_kill.py --kills 50 --replicas 4 --streams 16 --json FILE
    python benchmarks/fleet_kill.py --launcher ray --nodes 2 --json FILE

The engines compute nothing: the token at a position is a function of that position, so that a lost or
doubled token shows at once, and a step takes a given time. Processes, sockets, messages, router and client
are the real ones. Detection is the time from `kill -9` to the fleet's word that the replica is lost;
resumption the time from there to the first token that another replica delivers of a stream that was open.

With `--launcher ray` the replicas are placed by a Ray cluster of this script's own, whose nodes are raylets
on this machine in an empty network namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from onbeat.cluster.client import FleetClient
from onbeat.cluster.launcher import Launcher
from onbeat.cluster.local_launcher import LocalLauncher
from onbeat.core.fleet import ReplicaId
from onbeat.core.request import Request, SamplingParams
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.routers import make_router
from tests.fake_runner import build_fake_engine

VOCABULARY = 97


class Watch:
    """Times of losses and of what follows them."""

    def __init__(self, client: FleetClient) -> None:
        self.client = client
        self.lost_at: dict[ReplicaId, float] = {}
        self.resumed: list[float] = []
        self._pending: dict[str, float] = {}
        self._on_lost = client.on_lost
        client.on_lost = self.on_lost  # type: ignore[method-assign]

    def on_lost(self, replica: ReplicaId) -> None:
        now = self.lost_at[replica] = time.monotonic()
        for name, opened in self.client._open.items():
            if opened.replica == replica and opened.token_ids:
                self._pending[name] = now
        self._on_lost(replica)

    def on_tokens(self, name: str) -> None:
        lost = self._pending.pop(name, None)
        if lost is not None:
            self.resumed.append(time.monotonic() - lost)


async def ask(
    client: FleetClient, watch: Watch, name: str, rng: random.Random, counts: dict[str, int]
) -> None:
    prompt, output = rng.randrange(5, 200), rng.randrange(50, 200)
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(range(prompt)),
        sampling=SamplingParams(max_tokens=output),
        arrival=time.monotonic(),
    )
    tokens: list[int] = []
    try:
        async for delivery in client.generate(request):
            watch.on_tokens(name)
            tokens += delivery.output.new_token_ids
    except Exception as error:
        counts["broken"] += 1
        print(f"{name}: {error}", file=sys.stderr)
        await asyncio.sleep(0.1)  # else this loop leaves no time for replicas to come back
        return
    counts["streams"] += 1
    counts["tokens"] += len(tokens)
    counts["wrong"] += tokens != [(prompt + position) % VOCABULARY for position in range(output)]


async def user(
    client: FleetClient, watch: Watch, names: Any, rng: random.Random, counts: dict[str, int]
) -> None:
    while not counts["over"]:
        await ask(client, watch, f"s{next(names)}", rng, counts)


async def until_ready(client: FleetClient, replica: ReplicaId) -> None:
    """Wait for a replica and another one; start again what has died three times within a minute."""
    while True:
        ready = {view.replica for view in client.replicas() if view.state == "ready"}
        if replica in ready and len(ready) > 1:
            return
        if any(view.state == "down" for view in client.replicas()):
            client.scale(len(client.replicas()))
        await asyncio.sleep(0.01)


@contextmanager
def launcher_of(args: argparse.Namespace) -> Iterator[Launcher]:
    """Make what starts the replicas."""
    if args.launcher == "local":
        yield LocalLauncher()
        return
    from tests.ray.conftest import ray_cluster_of
    from tests.ray.namespace import own_network

    num_cpus = -(-args.replicas // args.nodes)
    with own_network(), ray_cluster_of(num_cpus) as cluster:
        for _ in range(args.nodes - 1):
            cluster.add_node(num_cpus=num_cpus)
        yield cluster.launcher(start_timeout=120)


async def run(args: argparse.Namespace, launcher: Launcher) -> dict[str, Any]:
    build = partial(build_fake_engine, step_seconds=args.step_ms / 1e3, reports_load=True)
    client = FleetClient(
        Fleet(make_router(args.router, 0)),
        launcher,
        lambda _replica, _life: build,
        num_replicas=args.replicas,
    )
    watch = Watch(client)
    rng = random.Random(args.seed)
    counts = {"streams": 0, "tokens": 0, "wrong": 0, "broken": 0, "over": 0}
    detected: list[float] = []
    async with client:
        names = itertools.count()
        users = [
            asyncio.create_task(user(client, watch, names, random.Random(f"{args.seed}/{i}"), counts))
            for i in range(args.streams)
        ]
        for number in range(args.kills):
            replica = f"r{rng.randrange(args.replicas)}"
            await until_ready(client, replica)
            await asyncio.sleep(rng.uniform(0.8, 1.6))
            if (life := client.controller.lives.get(replica)) is None or life.place is None:
                continue
            watch.lost_at.pop(replica, None)
            killed = time.monotonic()
            os.kill(life.place.process_id, signal.SIGKILL)
            while replica not in watch.lost_at:
                await asyncio.sleep(0.001)
            detected.append(watch.lost_at[replica] - killed)
            if (number + 1) % 10 == 0:
                print(f"{number + 1} kills", file=sys.stderr)
        counts["over"] = 1
        await asyncio.gather(*users)
        client._fleet.check_invariants()
    return {
        "kills": len(detected),
        "streams": counts["streams"],
        "tokens": counts["tokens"],
        "streams with lost or doubled tokens": counts["wrong"],
        "broken streams": counts["broken"],
        "resumed": client.counts.num_resumed,
        "tokens computed again": client.counts.num_resumed_tokens,
        "detection ms": percentiles(detected),
        "first resumed token ms": percentiles(watch.resumed),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds) * 1e3
    return {
        name: round(float(np.percentile(values, q)), 2)
        for name, q in (("p50", 50), ("p99", 99), ("max", 100))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--router", default="slo")
    parser.add_argument("--launcher", choices=("local", "ray"), default="local")
    parser.add_argument("--nodes", type=int, default=1, help="of Ray")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with launcher_of(args) as launcher:
        result = asyncio.run(run(args, launcher))
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
