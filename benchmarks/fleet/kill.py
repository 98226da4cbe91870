"""Replicas are killed under load, again and again: what is lost, how soon it is seen, when streams go on.

    python -m benchmarks.fleet.kill --kills 50 --replicas 4 --streams 16
    python -m benchmarks.fleet.kill --engine stand-in --streams 64 --kills 20
    python -m benchmarks.fleet.kill --engine stand-in --streams 64 --kills 10 --kill all

With `--engine fake` the engines compute nothing: the token at a position is a function of that position, so
that a lost or doubled token shows at once, and a step takes a given time. With `--engine stand-in` they are
those of `onbeat serve Llama-3.1-8B --load-format stand-in --device h100-sxm`, whose tokens are hashes of what
their KV holds: each stream is held against the same one before the first kill. Processes, sockets, messages,
router and client are the real ones. A replica that dies three times within a minute stays down, and with all
of them down requests end with 503: so nobody is killed a third time within a minute. Detection is the time
from `kill -9` to the fleet's word that the replica is lost; resumption the time from there to the first token
that another replica delivers of a stream that was open.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from onbeat.cluster.client import FleetClient
from onbeat.cluster.controller import FleetController
from onbeat.cluster.fleet_options import FleetOptions
from onbeat.cluster.local_launcher import LocalLauncher
from onbeat.cluster.start import open_fleet
from onbeat.core.fleet import ReplicaId
from onbeat.core.request import Request, SamplingParams
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.start import build_engine
from onbeat.hub.resolve import find_stand_in
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.cluster.membership import DEATHS_WINDOW
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.scheduler_config import SchedulerLimits
from tests.fake_runner import build_fake_engine

VOCABULARY = 97


class Watch:
    """Times of losses and of what follows them."""

    def __init__(self, client: FleetClient) -> None:
        self.client = client
        self.lost_at: dict[ReplicaId, float] = {}
        self.resumed: list[float] = []
        self._pending: dict[str, float] = {}
        self._on_lost = client.streams.on_lost
        client.streams.on_lost = self.on_lost  # type: ignore[method-assign]

    def on_lost(self, replica: ReplicaId) -> None:
        now = self.lost_at[replica] = time.monotonic()
        for name, opened in self.client.streams.open.items():
            if opened.replica == replica and opened.token_ids:
                self._pending[name] = now
        self._on_lost(replica)

    def on_tokens(self, name: str) -> None:
        lost = self._pending.pop(name, None)
        if lost is not None:
            self.resumed.append(time.monotonic() - lost)


@dataclass
class Load:
    """Users that ask one after another, and what they have got."""

    client: FleetClient
    watch: Watch
    expected: Callable[[Request], list[int]]
    rngs: list[random.Random]
    counts: Counter[str] = field(default_factory=Counter)
    names: Iterator[int] = field(default_factory=itertools.count)
    is_over: bool = False

    async def ask(self, rng: random.Random) -> None:
        name = f"s{next(self.names)}"
        request = make_request(name, *rng.choice(SIZES))
        try:
            tokens = await collect(self.client, request, self.watch)
        except Exception as error:
            self.counts["broken"] += 1
            print(f"{name}: {error}", file=sys.stderr)
            await asyncio.sleep(0.1)  # else this loop leaves no time for replicas to come back
            return
        self.counts["streams"] += 1
        self.counts["tokens"] += len(tokens)
        self.counts["wrong"] += tokens != self.expected(request)

    async def user(self, rng: random.Random) -> None:
        while not self.is_over:
            await self.ask(rng)

    async def run(self) -> None:
        await asyncio.gather(*map(self.user, self.rngs))


_sizes = random.Random("sizes")
SIZES = [(_sizes.randrange(5, 200), _sizes.randrange(50, 200)) for _ in range(64)]
"""Prompt and output tokens of the requests."""


def make_request(name: str, num_prompt: int, num_output: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(num_prompt)),
        sampling=SamplingParams(max_tokens=num_output, temperature=0.0),
        arrival=time.monotonic(),
    )


async def collect(client: FleetClient, request: Request, watch: Watch) -> list[int]:
    tokens: list[int] = []
    async for delivery in client.generate(request):
        watch.on_tokens(request.request_id)
        tokens += delivery.output.new_token_ids
    return tokens


async def known_tokens(client: FleetClient, watch: Watch) -> Callable[[Request], list[int]]:
    """Return what says which tokens a request must get, as it does while nobody dies."""
    requests = [make_request(f"quiet{number}", *size) for number, size in enumerate(SIZES)]
    found = await asyncio.gather(*(collect(client, request, watch) for request in requests))
    known = {
        (request.prompt_token_ids, request.sampling.max_tokens): tokens
        for request, tokens in zip(requests, found, strict=True)
    }
    return lambda request: known[request.prompt_token_ids, request.sampling.max_tokens]


def by_position(request: Request) -> list[int]:
    start = len(request.prompt_token_ids)
    return [(start + position) % VOCABULARY for position in range(request.sampling.max_tokens)]


class Killer:
    """Kills replicas that are ready, and none a third time within a minute."""

    def __init__(self, client: FleetClient, watch: Watch, num_replicas: int) -> None:
        self._client = client
        self._watch = watch
        self._deaths: dict[ReplicaId, list[float]] = {f"r{i}": [] for i in range(num_replicas)}
        self.detected: list[float] = []

    @property
    def replicas(self) -> list[ReplicaId]:
        """Those that may be killed now, if all are ready; else none."""
        ready = {view.replica for view in self._client.replicas() if view.state == "ready"}
        if ready != self._deaths.keys():
            return []
        longest = time.monotonic() - 1.02 * DEATHS_WINDOW
        return [each for each, deaths in self._deaths.items() if len(deaths) < 2 or deaths[-2] < longest]

    async def kill(self, replicas: Sequence[ReplicaId]) -> None:
        """Kill some in one moment, and wait until the fleet has seen it."""
        lives = self._client.controller.lives
        places = [(each, lives[each].place) for each in replicas]
        for replica in replicas:
            self._watch.lost_at.pop(replica, None)
        killed = time.monotonic()
        for replica, place in places:
            assert place is not None, "it is ready"
            os.kill(place.process_id, signal.SIGKILL)
            self._deaths[replica].append(killed)
        while not all(replica in self._watch.lost_at for replica in replicas):
            await asyncio.sleep(0.001)
        self.detected += [self._watch.lost_at[replica] - killed for replica in replicas]


@contextmanager
def client_of(args: argparse.Namespace) -> Iterator[FleetClient]:
    """Make the client of a fleet of the wanted engines."""
    if args.engine == "stand-in":
        options = FleetOptions(fleet=FleetConfig(replicas=args.replicas, router=args.router))
        engine = EngineConfig(
            model=find_stand_in("Llama-3.1-8B"),
            load_format="stand-in",
            device="h100-sxm",
            kv_cache_memory_bytes=8 << 30,
            limits=SchedulerLimits(max_model_len=4096),
        )
        with ExitStack() as stack:
            yield open_fleet(options, engine, build_engine, stack, on_progress=lambda _: None)
        return
    build = partial(build_fake_engine, step_seconds=args.step_ms / 1e3, reports_load=True)
    fleet = Fleet(make_router(args.router))
    controller = FleetController(fleet, LocalLauncher(), lambda _replica, _life: build)
    yield FleetClient(controller, num_replicas=args.replicas)


async def run(args: argparse.Namespace, client: FleetClient) -> dict[str, Any]:
    watch = Watch(client)
    rng = random.Random(args.seed)
    killer = Killer(client, watch, args.replicas)
    async with client:
        expected = by_position if args.engine == "fake" else await known_tokens(client, watch)
        rngs = [random.Random(f"{args.seed}/{i}") for i in range(args.streams)]
        load = Load(client, watch, expected, rngs)
        users = asyncio.create_task(load.run())
        for number in range(args.kills):
            while len(may_die := killer.replicas) < (args.replicas if args.kill == "all" else 1):
                await asyncio.sleep(0.01)
            await asyncio.sleep(rng.uniform(0.8, 1.6))
            await killer.kill(may_die if args.kill == "all" else [rng.choice(may_die)])
            print(f"{number + 1} of {args.kills}: {dict(load.counts)}", file=sys.stderr)
        load.is_over = True
        await users
    return {
        "kills": args.kills,
        "killed": len(killer.detected),
        "streams": load.counts["streams"],
        "tokens": load.counts["tokens"],
        "streams with lost or doubled tokens": load.counts["wrong"],
        "broken streams": load.counts["broken"],
        "resumed": client.counts.num_resumed,
        "tokens computed again": client.counts.num_resumed_tokens,
        "detection ms": percentiles(killer.detected),
        "first resumed token ms": percentiles(watch.resumed),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds or [np.nan]) * 1e3
    return {
        name: round(float(np.percentile(values, q)), 2)
        for name, q in (("p50", 50), ("p99", 99), ("max", 100))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kill", choices=("one", "all"), default="one", help="of the replicas at a time")
    parser.add_argument("--engine", choices=("fake", "stand-in"), default="fake")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--router", default="slo")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with client_of(args) as client:
        print(json.dumps(asyncio.run(run(args, client)), indent=2))


if __name__ == "__main__":
    main()
