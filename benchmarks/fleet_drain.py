"""A replica is drained while streams run on it: how long that takes, and what the streams see of it.

    python benchmarks/fleet_drain.py [--streams 20] [--prompt 300] [--tokens 1500] [--rounds 10] [--json FILE]
    python benchmarks/fleet_drain.py --model smollm2-135m-instruct --device cpu --load-format auto

Two replicas behind one server, real processes and sockets. In each round the streams are opened, half of them
run on each replica, then `POST /fleet/drain` asks for one of the two to end and to start again. It is drained
once `GET /fleet` no longer says "draining". The other replica takes its streams. A stand-in's next token is a
hash of all that its KV holds, so that a lost, doubled or wrong block changes the text: each text is compared
with that of a first round without a drain.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any

import aiohttp
import uvloop
from harness.fleet import FLEET_HEADERS, Fleet, fleet_parser, replica_arguments, serving
from harness.pages import markdown_table, middle

DRAINED = "r1"
BEGUN_TOKENS = 20
"""Of every stream, before the drain."""


@dataclass
class Round:
    """What one drain did."""

    drained_seconds: float
    """From the request to the replica's end."""
    num_moved: int
    num_resumed: int
    """Streams whose tokens were computed again."""
    num_errors: int
    num_other_texts: int
    usual_gap: float
    """Median time between two deliveries of a stream before the drain, seconds."""
    worst_gaps: list[float]
    """Of each stream, after the drain was asked for; seconds."""


class Stream:
    """An answer that is read as it comes."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.text = ""
        self.error: str | None = None

    async def read(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        try:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
        except aiohttp.ClientError as error:
            self.error = str(error)

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        self.times.append(time.monotonic())
        self.text += "".join(choice["text"] for choice in chunk["choices"])


class Drains:
    """Rounds on one server."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, bodies: list[dict[str, Any]]) -> None:
        self._fleet = fleet
        self._session = session
        self._bodies = bodies

    async def texts(self) -> list[str]:
        """Return what the streams say if nobody drains anything."""
        streams, running = self._open()
        await running
        assert not any(stream.error for stream in streams), [stream.error for stream in streams]
        return [stream.text for stream in streams]

    async def drain(self, texts: list[str]) -> Round:
        """Drain a replica under its streams, and wait until it is back."""
        streams, running = self._open()
        while any(len(stream.times) < BEGUN_TOKENS for stream in streams):
            await asyncio.sleep(0.01)
        before = await self._counts()
        usual_gap = median(gap for stream in streams for gap in gaps_of(stream))
        begun = time.monotonic()
        await self._post("/fleet/drain", {"replica": DRAINED, "timeout": 120, "restart": True})
        while await self._state() == "draining":
            await asyncio.sleep(0.01)
        drained_seconds = time.monotonic() - begun
        await running
        after = await self._counts()
        while await self._state() != "ready":
            await asyncio.sleep(0.1)
        return Round(
            drained_seconds=drained_seconds,
            num_moved=after["moved"] - before["moved"],
            num_resumed=after["resumed"] - before["resumed"],
            num_errors=sum(stream.error is not None for stream in streams),
            num_other_texts=sum(stream.text != text for stream, text in zip(streams, texts, strict=True)),
            usual_gap=usual_gap,
            worst_gaps=[max(gaps_of(stream, since=begun), default=0.0) for stream in streams],
        )

    def _open(self) -> tuple[list[Stream], asyncio.Future[Any]]:
        streams = [Stream() for _ in self._bodies]
        reads = zip(streams, self._bodies, strict=True)
        running = asyncio.gather(*(each.read(self._session, self._fleet.url, body) for each, body in reads))
        return streams, running

    async def _state(self) -> str:
        replicas = (await self._get("/fleet"))["replicas"]
        return next(str(each["state"]) for each in replicas if each["replica"] == DRAINED)

    async def _counts(self) -> dict[str, int]:
        async with self._session.get(f"{self._fleet.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {
            name: int(sum(float(line.split()[-1]) for line in lines if line.startswith(metric)))
            for name, metric in METRICS.items()
        }

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._session.get(self._fleet.url + path, headers=FLEET_HEADERS) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        async with self._session.post(self._fleet.url + path, json=body, headers=FLEET_HEADERS) as answer:
            answer.raise_for_status()


METRICS = {
    "moved": 'onbeat_fleet_moves_total{outcome="moved"',
    "resumed": "onbeat_fleet_resumed_total",
}


def gaps_of(stream: Stream, since: float = 0.0) -> list[float]:
    """Return the times between deliveries, of those that ended after `since`."""
    return [after - before for before, after in itertools.pairwise(stream.times) if after > since]


def body_of(args: argparse.Namespace, rng: Random) -> dict[str, Any]:
    """Return a request for a stream that runs for all of its tokens."""
    prompt = [rng.randrange(1000, 30_000) for _ in range(args.prompt)]
    body = {"prompt": prompt, "max_tokens": args.tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    return {"model": args.model, **body}


async def run(fleet: Fleet, args: argparse.Namespace) -> list[Round]:
    rng = Random(0)
    bodies = [body_of(args, rng) for _ in range(args.streams)]
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        drains = Drains(fleet, session, bodies)
        texts = await drains.texts()
        rounds = []
        for number in range(args.rounds):
            rounds.append(await drains.drain(texts))
            print(f"drain {number}: {asdict(rounds[-1])}", file=sys.stderr, flush=True)
        return rounds


def table(rounds: list[Round]) -> str:
    """Return what the rounds come to."""
    drained = [each.drained_seconds for each in rounds]
    worst = [max(each.worst_gaps) for each in rounds]
    rows = [
        ("drained, s", middle(drained)),
        ("streams moved", sum(each.num_moved for each in rounds)),
        ("streams computed again", sum(each.num_resumed for each in rounds)),
        ("errors", sum(each.num_errors for each in rounds)),
        ("other texts", sum(each.num_other_texts for each in rounds)),
        ("usual gap, ms", middle([each.usual_gap * 1e3 for each in rounds], 1)),
        ("longest gap of any stream, ms", middle([each * 1e3 for each in worst], 1)),
    ]
    return markdown_table(("", f"{len(rounds)} drains"), rows)


def main() -> None:
    parser = fleet_parser(__doc__, port=8477)
    parser.set_defaults(replicas=2)
    parser.add_argument("--load-format", default="stand-in")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=300, help="tokens")
    parser.add_argument("--tokens", type=int, default=1500, help="of each answer")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    engines = replica_arguments(args.model, args.device, args.replicas, load_format=args.load_format)
    with serving([*engines, "--router", "least-outstanding"], args.port) as fleet:
        rounds = uvloop.run(run(fleet, args))
    print(table(rounds))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in rounds], indent=1) + "\n")


if __name__ == "__main__":
    main()
