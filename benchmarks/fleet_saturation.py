"""Where the one server process of a fleet is full, live: requests and tokens a second, by connections.

    python benchmarks/fleet_saturation.py --replicas 4 --connections 16 64 256 --json FILE

Starts `onbeat serve` with replicas that stand in for a device. The server's process (HTTP, tokenizer, router,
messages) gets the first core for itself; replicas and client share the others. Each connection of the client
asks again as soon as it is answered, with bytes that are made beforehand and a reader that looks for the end
of an answer alone, so that the client costs little. The server is full where its share of its core is near
100 % and more connections bring no more requests; where another share is, the others were. Needs two cores
and nothing else on them; two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from fleet_front_end import cpu_seconds
from harness.fleet import fleet_parser, replica_arguments, serving
from harness.pages import markdown_table

WARM_SECONDS = 3.0
_END = b"0\r\n\r\n"
"""Of an answer that is streamed: the last chunk of HTTP, which no event can end with."""
WORDS = ("time", "people", "water", "light", "house", "world", "music", "paper")
HEADER = ["answer, tokens", "connections", "requests/s", "tokens/s", "first byte P50, ms", "P99, ms"]
HEADER += ["server's core", "replicas", "client"]


def bodies(model: str, num_words: int, num_tokens: int) -> Iterator[bytes]:
    """Yield requests, no two of which begin alike, so that no prefix cache helps."""
    text = " ".join(WORDS[index % len(WORDS)] for index in range(num_words))
    for number in count():
        body = {"model": model, "prompt": f"{number:09d} {text}", "max_tokens": num_tokens}
        data = json.dumps({**body, "stream": True, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        yield head.encode() + b"Content-Type: application/json\r\n\r\n" + data


@dataclass
class Counts:
    """What has been answered since it was last looked at."""

    num_requests: int = 0
    first_bytes: list[float] = field(default_factory=list)
    """Seconds from a request to the first byte of its answer."""


class Connection(asyncio.Protocol):
    """Asks, and asks again once it is answered."""

    def __init__(self, requests: Iterator[bytes], counts: Counts) -> None:
        self._requests = requests
        self._counts = counts
        self._tail = b""
        self._is_first = True
        self._sent = 0.0
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        self._ask()

    def _ask(self) -> None:
        assert self.transport is not None
        self._tail, self._is_first, self._sent = b"", True, time.perf_counter()
        self.transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        if self._is_first:
            assert data.startswith(b"HTTP/1.1 200"), data[:300]
            self._is_first = False
            self._counts.first_bytes.append(time.perf_counter() - self._sent)
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END:
            self._counts.num_requests += 1
            self._ask()


@dataclass
class Processes:
    """The server, its replicas, and this process; each on its cores."""

    server: int
    replicas: Sequence[int]

    def pin(self) -> None:
        """Give the server the first core, and all others the rest."""
        first, *others = sorted(os.sched_getaffinity(0))
        for process_id, cores in ((self.server, {first}), *((each, set(others)) for each in self.replicas)):
            for thread in Path(f"/proc/{process_id}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)
        os.sched_setaffinity(0, others)

    def used(self) -> tuple[float, float, float]:
        """Return the CPU seconds of the server, the replicas together, and this process so far."""
        return cpu_seconds(self.server), sum(map(cpu_seconds, self.replicas)), time.process_time()


async def load(
    args: argparse.Namespace, processes: Processes, num_tokens: int, num_connections: int
) -> list[str]:
    """Ask on so many connections for some seconds; return a row of the table."""
    requests, counts = bodies(args.model, args.words, num_tokens), Counts()
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(lambda: Connection(requests, counts), "127.0.0.1", args.port)
        for _ in range(num_connections)
    ]
    await asyncio.sleep(WARM_SECONDS)
    counts.num_requests = 0
    counts.first_bytes.clear()
    before, started = processes.used(), time.perf_counter()
    await asyncio.sleep(args.seconds)
    seconds, after = time.perf_counter() - started, processes.used()
    rate, first = counts.num_requests / seconds, 1e3 * np.quantile(counts.first_bytes, (0.5, 0.99))
    for transport, _ in opened:
        transport.abort()
    await asyncio.sleep(1.0)  # until the server has let go of them
    shares = [f"{100 * (now - then) / seconds:.0f} %" for then, now in zip(before, after, strict=True)]
    row = [f"{num_tokens}", f"{num_connections}", f"{rate:.0f}", f"{rate * num_tokens:,.0f}"]
    row += [*(f"{each:.0f}" for each in first), *shares]
    print(row, flush=True)
    return row


async def measure(args: argparse.Namespace, processes: Processes) -> list[list[str]]:
    processes.pin()
    return [
        await load(args, processes, num_tokens, num_connections)
        for num_tokens in args.tokens
        for num_connections in args.connections
    ]


def main() -> None:
    """Measure, and print a table."""
    parser = fleet_parser(__doc__, port=8974)
    parser.add_argument("--connections", type=int, nargs="+", default=(16, 64, 256))
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 256), help="of an answer")
    parser.add_argument("--words", type=int, default=500, help="of a prompt")
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    arguments = [*replica_arguments(args.model, args.device, args.replicas), "--no-log-requests"]
    with serving(arguments, args.port) as fleet:
        replicas = [each["process_id"] for each in fleet.fetch("/fleet")["replicas"]]
        args.model = fleet.fetch("/v1/models")["data"][0]["id"]
        found = asyncio.run(measure(args, Processes(fleet.process_id, replicas)))
    print(markdown_table(HEADER, found))
    if args.json:
        args.json.write_text(json.dumps([dict(zip(HEADER, row, strict=True)) for row in found], indent=1))


if __name__ == "__main__":
    main()
