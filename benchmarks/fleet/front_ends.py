"""Chats through 1, 2 and 3 front ends: how many a second, and the CPU time of each process.

    python -m benchmarks.fleet.front_ends [--front-ends 1 2 3] [--requests 400]

Engines are stand-ins, which compute nothing; client, front ends, keeper and engine share the machine. Needs a
machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import aiohttp

from benchmarks.harness.pages import machine, markdown_table
from benchmarks.serve.slo_live.servers import Fleet, onbeat_spec

MESSAGES = [{"role": "user", "content": "Why is the sky blue? " * 4}]
CHAT = {"messages": MESSAGES, "max_tokens": 60, "ignore_eos": True, "stream": True}
AT_ONCE = 32


def cpu_seconds(root: int) -> list[float]:
    """Return those of a process and of its children, in the order of their starts."""
    seconds, left = [], [root]
    while left:
        pid = left.pop(0)
        left += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds.append((int(fields[11]) + int(fields[12])) / 100)
    return seconds


async def ask(url: str, number: int) -> None:
    # A connection each, since the system hands connections to front ends, not requests.
    connector = aiohttp.TCPConnector(limit=AT_ONCE, force_close=True)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def one() -> None:
            async with session.post("/v1/chat/completions", json=CHAT) as response:
                response.raise_for_status()
                await response.read()

        await asyncio.gather(*(one() for _ in range(number)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--front-ends", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--requests", type=int, default=400)
    args, table = parser.parse_args(), []
    for number in args.front_ends:
        flags = ["--load-format", "stand-in", "--device", "h100-sxm", "--front-ends", str(number)]
        with Fleet() as fleet:
            server = fleet.start(onbeat_spec("onbeat", "slo", flags, model="smollm2-135m-instruct"))
            with server.turn() as url:
                asyncio.run(ask(url, 50))
                before, start = cpu_seconds(server.pid), time.perf_counter()
                asyncio.run(ask(url, args.requests))
                rate = args.requests / (time.perf_counter() - start)
                spent = [
                    1e3 * (b - a) / args.requests
                    for a, b in zip(before, cpu_seconds(server.pid), strict=True)
                ]
        table.append((number, f"{rate:.0f}", f"{sum(spent):.1f}", ", ".join(f"{each:.1f}" for each in spent)))
    print(f"{machine()}\n")
    print(markdown_table(("front ends", "chats/s", "CPU ms a chat", "by process"), table))


if __name__ == "__main__":
    main()
