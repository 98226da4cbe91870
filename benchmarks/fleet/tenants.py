"""40 tenants ask for more than their keys may, while front ends are killed: no limit is doubled or lost.

    python -m benchmarks.fleet.tenants [--kills 20]

A third of the keys may have two answers open, a third may send 12 requests a minute, and a third may use 600
tokens a minute. Each has three clients that ask again and again.

Doubled: three answers of the first are surely open at once, each until half a second before its last event,
or the others had more requests or tokens than the time allows. Lost: in the end the first get fewer answers
at once than they may, or the others had a tenth less than the time allows. What broke with a front end
counts as a request, and its tokens are given back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet.kill import FLAGS, Processes, deployed, new_session

NUM_TENANTS, NUM_CLIENTS = 40, 3
LIMITS = (("max_open_requests", 2), ("requests_per_minute", 12), ("tokens_per_minute", 600))
BODY = {"prompt": [5] * 10, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
TOKENS = 50
"""Of each request: prompt and answer."""


@dataclass
class Tenant:
    """A key, its limit, and what came of its requests."""

    key: str
    limit: str
    most: int
    outcomes: Counter[str] = field(default_factory=Counter)
    open: list[tuple[float, float]] = field(default_factory=list)
    """From when to when an answer surely was."""

    async def ask(self, session: aiohttp.ClientSession, url: str) -> str:
        """Ask once; return what came of it."""
        headers, begun, last = {"Authorization": f"Bearer {self.key}"}, math.inf, 0.0
        text = b""
        try:
            async with session.post(
                f"{url}/v1/completions", json={**BODY, "stream": True}, headers=headers
            ) as reply:
                if reply.status != 200:
                    return str(reply.status)
                async for piece in reply.content.iter_any():
                    text, last, begun = text + piece, time.monotonic(), min(begun, time.monotonic())
        except aiohttp.ClientError:
            return "broken"
        finally:
            self.open.append((begun, last - 0.5))  # what a client may be behind
        return "whole" if text.endswith(b"[DONE]\n\n") else "failed"

    async def client(self, session: aiohttp.ClientSession, processes: Processes, end: asyncio.Event) -> None:
        """Ask again and again."""
        while not end.is_set():
            outcome = await self.ask(session, processes.server.url)
            if outcome == "broken" and not processes.killed_own():
                outcome = "broken without a kill"
            self.outcomes[outcome] += 1
            if outcome != "whole":
                await asyncio.sleep(random.uniform(0.5, 1.5))

    def faults(self, seconds: float) -> list[str]:
        """Return what was doubled or lost."""
        whole, broken = self.outcomes["whole"], self.outcomes["broken"]
        wrong = [each for each in self.outcomes if each not in ("whole", "broken", "429")]
        found = [f"{self.key}: {self.outcomes[each]} requests {each}" for each in wrong]
        if self.limit == "max_open_requests":
            most = max(sum(a <= begun < b for a, b in self.open) for begun, _ in self.open)
            return found + [f"{self.key}: {most} answers open"] * (most > self.most)
        allowed = self.most * (1 + seconds / 60)
        each = TOKENS if self.limit == "tokens_per_minute" else 1
        # who is refused asks again within 1.5 s, not at once
        if each * whole > allowed or each * (whole + broken) < 0.9 * allowed:
            found.append(f"{self.key}: {each} times {whole} + {broken} of {allowed:.0f} {self.limit}")
        return found


async def run(args: argparse.Namespace, processes: Processes, tenants: list[Tenant]) -> dict[str, Any]:
    """Kill front ends under load, then look whether each key gets what it may."""
    dice, end = random.Random(0), asyncio.Event()
    processes.server.wait_until_ready()
    faults: list[str] = []
    async with new_session() as session:
        began = time.monotonic()
        asking = [each.client(session, processes, end) for each in tenants for _ in range(NUM_CLIENTS)]
        clients = asyncio.gather(*asking)
        for _ in range(args.kills):
            if not await processes.wait_until_whole():
                faults.append("not whole again")
            await asyncio.sleep(dice.uniform(0.5, 1.5))
            processes.kill([processes.choose("gate", dice)[1]])
        end.set()
        await clients
        seconds = time.monotonic() - began
        for each in tenants:
            faults += each.faults(seconds)
            if each.limit == "max_open_requests":
                asked = [each.ask(session, processes.server.url) for _ in range(each.most + 1)]
                if (found := Counter(await asyncio.gather(*asked))) != {"whole": each.most, "429": 1}:
                    faults.append(f"{each.key}: in the end {dict(found)}")
    outcomes: dict[str, Counter[str]] = {limit: Counter() for limit, _ in LIMITS}
    for each in tenants:
        outcomes[each.limit] += each.outcomes
    return {"kills": args.kills, "seconds": round(seconds), "outcomes": outcomes, "faults": faults}


def main() -> None:
    """Exit code 1 where a limit is doubled or lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    tenants = [Tenant(f"tenant-{number}", *LIMITS[number % len(LIMITS)]) for number in range(NUM_TENANTS)]
    rows = [f"- {{key_env: KEY_{n}, {each.limit}: {each.most}}}\n" for n, each in enumerate(tenants)]
    keys = {f"KEY_{number}": each.key for number, each in enumerate(tenants)}
    with tempfile.TemporaryDirectory() as folder:
        classes, names = Path(folder) / "classes.yaml", Path(folder) / "keys"
        classes.write_text("api_keys:\n" + "".join(rows))
        names.write_text("\n".join(keys.values()))
        os.chmod(names, 0o600)
        with deployed(
            *FLAGS, "--slo-classes", classes, "--api-key-file", names, env={**os.environ, **keys}
        ) as processes:
            found = asyncio.run(run(args, processes, tenants))
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    main()
