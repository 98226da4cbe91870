"""Processes of a server with front ends are killed under load, in every stage: what breaks, what is wrong.

    python -m benchmarks.fleet.kill [--kills 20] [--stages decode prefill] [--victims gate gate+keeper]

A server of two front ends, a keeper, its nurse and four stand-in engines answers 32 clients of `onbeat bench
chaos`, which know every answer. Stages:

    decode, prefill   while most streams get tokens, or wait for their first one
    drain             while SIGHUP replaces front ends one by one, and an engine drains to be started again
    take-over         within a second of the start of another keeper, after the one before was killed
    start             the successor of what was killed is killed, too, while it starts
    stop-1, stop-20   the keeper stands still for so many seconds (SIGSTOP); nothing is killed
    nurse             who looks after all is killed in each of the first five stages

Wrong is what `bench chaos` calls a violation; a request that fails though its connection was not of a killed
front end; a server that is not whole again within a minute; a process that outlives the nurse; a traceback.
A front end is stopped before it is killed, so that its connections can be read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from onbeat.bench.chaos import TIMEOUT, Chaos, ChaosPlan
from onbeat.bench.history import End, ObservedAnswer, counts, violations
from onbeat.cluster.roster import process_status
from onbeat.hub.resolve import resolve_model
from tests.cpu.e2e.program import ServerProgram, connections, is_running, starting

MODEL = "Llama-3.1-8B"
TOKENIZER = resolve_model("smollm2-135m-instruct", offline=True).path
NUM_ENGINES = 4
FLAGS = (
    *(MODEL, "--tokenizer", TOKENIZER),
    *("--load-format", "stand-in", "--device", "l4", "--max-model-len", "4096", "--no-log-requests"),
    *("--no-enable-prefix-caching", "--front-ends", "2", "--replicas", str(NUM_ENGINES)),
)
VICTIMS = (
    *("gate", "keeper", "engine"),
    *("gate+keeper", "gate+engine", "keeper+engine", "gate+gate", "engine+engine"),
)
STAGES = ("decode", "prefill", "drain", "take-over", "start", "stop-1", "stop-20", "nurse")
LONG_PROMPTS: dict[str, Any] = {"prompt_words": 400, "max_tokens": 4}
"""Of the stage `prefill`; elsewhere prompts are short and answers long."""
WHOLE_AGAIN_SECONDS = 60.0
REST_SECONDS = 70.0
NEVER_BEGAN = "EOFError: Ran out of input"
"""What Python says of a process whose parent is killed in the moment in which it starts it."""
DOOMED_SECONDS = 5.0
"""Within which a client sees that its front end was killed."""

_port: contextvars.ContextVar[int] = contextvars.ContextVar("port")


def numbered_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket to connect with, whose port the task that asks knows even if its connection fails."""
    made = socket.socket(*address[:3])
    made.bind(("127.0.0.1", 0))
    _port.set(made.getsockname()[1])
    return made


def new_session() -> aiohttp.ClientSession:
    """Return what gives each request a connection of its own, as `bench chaos` does."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=numbered_socket)
    return aiohttp.ClientSession(connector=connector, timeout=TIMEOUT)


class Processes:
    """Those of a server with front ends, and what is done to them.

    Parameters
    ----------
    server : runs with `folder` as its directory for temporary files.
    """

    def __init__(self, server: ServerProgram, folder: Path, num_engines: int = NUM_ENGINES) -> None:
        self.server, self._folder, self._num_engines = server, folder, num_engines
        self._num_served = 0
        """Keepers that had served before the last one was killed."""
        self._gates: set[int] = set()
        self._killed: set[int] = set()
        self._last_kill: dict[str, float] = {}
        self._doomed: dict[int, float] = {}
        """Ports of clients of front ends that were killed, and when."""

    def places(self, prefix: str = "") -> dict[str, int]:
        """Return who has which place among front ends (`front-end-0`) and engines (`r0`)."""
        found = {}
        for file in sorted(self._folder.glob(f"onbeat-*/{prefix}*.at")):
            with suppress(OSError, IndexError):
                found[file.stem] = int(file.read_text().split()[0])
        self._gates |= {pid for place, pid in found.items() if place.startswith("front-end")}
        return found

    def _count_served(self) -> int:
        return len([*self._folder.glob("onbeat-*/serves.*")])

    def keeper(self) -> int:
        """Return the keeper's process, or 0 where there is none."""
        return next(iter(self.server.keepers), 0)

    def named(self) -> dict[str, int]:
        """Return all of them by their names."""
        return {"nurse": self.server.process.pid, "keeper": self.keeper(), **self.places()}

    def choose(self, kind: str, dice: random.Random, spared: Sequence[str] = ()) -> tuple[str, int]:
        """Return a victim: its place, and its process."""
        if kind == "keeper":
            return kind, self.keeper()
        if kind == "engine":
            place = self.next_engine(spared)
            self._last_kill[place] = time.monotonic()
            return place, self.places(place)[place]
        in_place = self.places("front-end")
        leaving = {f"leaving.{pid}": pid for pid in self._gates - set(in_place.values()) if is_running(pid)}
        left = {place: pid for place, pid in (in_place | leaving).items() if place not in spared}
        place = dice.choice(sorted(left))
        return place, left[place]

    def next_engine(self, spared: Sequence[str] = ()) -> str:
        """Return the place of the engine that has not been killed for the longest time."""
        left = [place for place in self.places("r") if place not in spared]
        return min(left, key=lambda place: self._last_kill.get(place, 0.0))

    def all(self) -> list[int]:
        """Return the server's processes, also those that have lost their parents."""
        found, mark = [], str(self._folder).encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes() and is_running(int(pid)):
                    found.append(int(pid))
        return found

    def kill(self, pids: Sequence[int]) -> None:
        """Kill some in one moment."""
        self._killed.update(pids)
        if self.keeper() in pids:
            self._num_served = self._count_served()
        for pid in self._gates.intersection(pids):
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
                while process_status(pid)[:1] not in (["T"], ["Z"], []):
                    time.sleep(0.001)
                self._doomed |= dict.fromkeys(connections(self.server, pid), time.monotonic())
        for pid in filter(None, pids):  # 0 where one had none: its own group
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def killed_own(self) -> bool:
        """Return whether the connection of the task that asks was of a front end that has been killed."""
        return time.monotonic() - self._doomed.pop(_port.get(0), -DOOMED_SECONDS) < DOOMED_SECONDS

    async def successors(self, before: dict[str, int]) -> list[int]:
        """Wait until others have the places of those that were killed; return them."""

        def found() -> dict[str, int]:
            now = self.named()
            return {
                place: now.get(place, 0) for place in before if now.get(place, 0) not in (0, before[place])
            }

        end = time.monotonic() + WHOLE_AGAIN_SECONDS
        while len(others := found()) < len(before) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        return list(others.values())

    async def is_whole(self) -> bool:
        """Return whether all serve under load, and have done so for long enough to be killed."""
        keeper, gates = self.keeper(), self.places("front-end").values()
        # three keepers that were killed before they served, one after another, end the server
        if not keeper or self._count_served() == self._num_served:
            return False
        try:
            states = [each["state"] for each in (await asyncio.to_thread(self.server.fleet))["replicas"]]
            if "down" in states:  # it died three times within a minute, and keeps its place
                await asyncio.to_thread(self.server.change_fleet, "scale", replicas=self._num_engines)
            serve = all(is_running(pid) and connections(self.server, pid) for pid in gates)
        except (httpx.HTTPError, ValueError, OSError):
            return False
        is_replaced = not self._killed.intersection(self.named().values())
        return serve and is_replaced and states == ["ready"] * self._num_engines

    async def rest(self) -> None:
        """Wait until two engines may die twice: one that dies three times within a minute stays down."""
        kills = sorted(self._last_kill.get(place, 0.0) for place in self.places("r"))
        await asyncio.sleep(kills[1] + REST_SECONDS - time.monotonic())

    async def wait_until_whole(self, seconds: float = WHOLE_AGAIN_SECONDS) -> bool:
        """Wait until all serve; return whether they do."""
        end = time.monotonic() + seconds
        while not await self.is_whole():
            if time.monotonic() > end or self.server.process.poll() is not None:
                return False
            await asyncio.sleep(0.2)
        return True


@contextmanager
def deployed(*flags: Any, num_engines: int = 4, env: Mapping[str, str] = os.environ) -> Iterator[Processes]:
    """Start a server, which may not be ready yet, in a directory for temporary files of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        starting(*flags, env={**env, "TMPDIR": folder}) as server,
    ):
        yield Processes(server, Path(folder), num_engines)


@dataclass
class Cell:
    """What came of kills of some kind."""

    rounds: int = 0
    kills: int = 0
    broken: int = 0
    """Requests of front ends that were killed."""
    seconds: list[float] = field(default_factory=list)
    """Until all served again."""


class Rounds:
    """Kills in one stage, under load.

    Parameters
    ----------
    num_kills : of each kind of victim; pairs get a fifth, as there are five stages.
    """

    def __init__(self, stage: str, victims: Sequence[str], args: argparse.Namespace) -> None:
        self.stage, self._args = stage, args
        self._end = time.monotonic() + 60 * args.minutes
        self.dice = random.Random(f"{args.seed}/{stage}")
        few = -(-args.kills // len(STAGES[:5]))
        self._order = [each for each in victims for _ in range(few if "+" in each else args.kills)]
        self.dice.shuffle(self._order)
        self.cells = {each: Cell() for each in victims}
        self.faults: list[str] = []
        self.requests = Counter[str]()
        self._now = Cell()

    def _on_exchange(self, processes: Processes, exchange: ObservedAnswer) -> None:
        if exchange.end in (End.WHOLE, End.CANCELLED):
            return
        if processes.killed_own():
            self._now.broken += 1
        else:
            self.faults.append(f"request {exchange.number}: {exchange.end}: {exchange.detail}")

    @contextmanager
    def _chaos(self, processes: Processes, session: aiohttp.ClientSession, **plan: Any) -> Iterator[Chaos]:
        """Make the load, and take its history in the end."""
        long = LONG_PROMPTS if self.stage == "prefill" else {}
        settings = {"seconds": 1e6, "concurrency": 32, "num_prompts": 4, "seed": self._args.seed}
        chaos = Chaos(
            *(session, processes.server.url, MODEL, ChaosPlan(**settings | long | plan)),
            on_exchange=lambda exchange: self._on_exchange(processes, exchange),
        )
        yield chaos
        result = chaos.result
        wrong = violations(result.exchanges, result.known)
        self.faults += [f"request {each.exchange}: {each.what}" for each in wrong]
        if result.still_open:
            self.faults.append(f"{result.still_open} requests are open long after their clients have gone")
        self.requests += counts(result.exchanges)

    async def run(self) -> None:
        """Go through all rounds with one server."""
        with deployed(*FLAGS) as processes:
            server = processes.server
            server.wait_until_ready()
            async with new_session() as session:
                with self._chaos(processes, session) as chaos:
                    await chaos.learn()
                    load = asyncio.create_task(chaos.run())
                    for number, victims in enumerate(self._order):
                        if time.monotonic() > self._end or server.process.poll() is not None:
                            break
                        await self._whole(processes)
                        self._now = self.cells[victims]
                        await asyncio.sleep(self.dice.uniform(0.0, 0.5))
                        await self._round(processes, victims.split("+"))
                        print(f"{self.stage} {number + 1}/{len(self._order)}: {victims}", file=sys.stderr)
                    await self._whole(processes)
                    chaos.stop()
                    await load
                    await chaos.settle()
            server.send_signal(signal.SIGTERM)
            if code := server.exit_code(60):
                self.faults.append(f"exit code {code}: {server.lines[-20:]}")
            self._look_at_log(server)

    async def _whole(self, processes: Processes) -> None:
        if not await processes.wait_until_whole():
            self.faults.append(f"not whole again: {processes.named()}, {processes.server.lines[-20:]}")

    def _look_at_log(self, server: ServerProgram) -> None:
        for number, line in enumerate(server.lines):
            if "Traceback" in line or "do not fit" in line:
                said = "\n".join(server.lines[max(number - 1, 0) : number + 30])
                if NEVER_BEGAN not in said:
                    self.faults.append(f"log: {said}")

    async def _round(self, processes: Processes, kinds: Sequence[str]) -> None:
        cell, before = self._now, processes.named()
        if self.stage.startswith("stop-"):
            os.kill(before["keeper"], signal.SIGSTOP)
            await asyncio.sleep(float(self.stage.removeprefix("stop-")))
            os.kill(before["keeper"], signal.SIGCONT)
        else:
            await self.prepare(processes)
            victims = dict[str, int]()
            for kind in kinds:
                victims |= [processes.choose(kind, self.dice, [*victims])]
            processes.kill([*victims.values()])
            if self.stage == "start":
                successors = await processes.successors(victims)
                await asyncio.sleep(self.dice.uniform(0.0, 0.7))
                processes.kill(successors)
                cell.kills += len(successors)
            cell.kills += len(victims)
        began = time.monotonic()
        await self._whole(processes)
        cell.seconds.append(time.monotonic() - began)
        if self.stage.startswith("stop-") and processes.named() != before:
            self.faults.append(f"{self.stage}: {before} became {processes.named()}")
        cell.rounds += 1

    async def prepare(self, processes: Processes) -> None:
        """Bring the server into the stage."""
        if self.stage == "drain":
            processes.server.send_signal(signal.SIGHUP)
            replica, change = processes.next_engine(), processes.server.change_fleet
            answer = await asyncio.to_thread(change, "drain", replica=replica, restart=True)
            if answer.status_code != 200:
                self.faults.append(f"drain: {answer.status_code} {answer.text}")
            await asyncio.sleep(self.dice.uniform(0.0, 2.0))
        elif self.stage == "take-over":
            keeper = processes.keeper()
            processes.kill([keeper])
            self._now.kills += 1
            await processes.successors({"keeper": keeper})
            await asyncio.sleep(self.dice.uniform(0.0, 1.0))
        elif self.stage == "start":
            await processes.rest()


class NurseRounds(Rounds):
    """Kills of who looks after all: the server ends, with no wrong token before, and no process after."""

    async def run(self) -> None:
        """Start a server for each kill."""
        for self.stage in STAGES[:5]:
            self._now = self.cells[f"nurse, {self.stage}"] = Cell()
            for _ in range(self._args.kills):
                if time.monotonic() > self._end:
                    return
                with deployed(*FLAGS) as processes:
                    await self._one(processes)

    async def _one(self, processes: Processes) -> None:
        server = processes.server
        if self.stage == "start":
            await processes.successors({self.dice.choice(("keeper", "r0", "front-end-0")): 0})
            await asyncio.sleep(self.dice.uniform(0.0, 1.0))
            await self._kill(processes)
            return
        server.wait_until_ready()
        async with new_session() as session:
            with self._chaos(processes, session, num_prompts=2) as chaos:
                await chaos.learn()
                load = asyncio.create_task(chaos.run())
                await processes.wait_until_whole()
                await self.prepare(processes)
                chaos.stop()
                await self._kill(processes)
                await load

    async def _kill(self, processes: Processes) -> None:
        server, cell = processes.server, self._now
        server.send_signal(signal.SIGKILL)
        began = time.monotonic()
        while (left := processes.all()) and time.monotonic() - began < WHOLE_AGAIN_SECONDS:
            await asyncio.sleep(0.1)
        if left:
            self.faults.append(f"nurse, {self.stage}: {len(left)} processes live on")
        cell.seconds.append(time.monotonic() - began)
        cell.rounds, cell.kills = cell.rounds + 1, cell.kills + 1
        self._look_at_log(server)

    def _on_exchange(self, processes: Processes, exchange: ObservedAnswer) -> None:  # noqa: ARG002
        """All that is open breaks."""
        self._now.broken += exchange.end not in (End.WHOLE, End.CANCELLED)


def main() -> None:
    """Go through the stages; exit code 1 where anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="of each kind in each stage")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--minutes", type=float, default=1e6, help="most for each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, num_faults, found = parser.parse_args(), 0, []
    for stage in args.stages:
        victims = ["keeper"] if stage.startswith("stop-") else [] if stage == "nurse" else args.victims
        rounds = (NurseRounds if stage == "nurse" else Rounds)(stage, victims, args)
        asyncio.run(rounds.run())
        cells = {name: asdict(cell) for name, cell in rounds.cells.items()}
        found.append({"stage": stage, "cells": cells, "requests": rounds.requests, "faults": rounds.faults})
        print(json.dumps(found[-1], indent=1))
        num_faults += len(rounds.faults)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
