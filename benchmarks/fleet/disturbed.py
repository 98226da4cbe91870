"""What is done to a server with front ends every so often while it works: kills, stops, replacements."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import httpx

from benchmarks.fleet.kill import Processes

if TYPE_CHECKING:
    from benchmarks.check.soak import Report

SPARED_PERIOD, HARSH_SHARE = 250_000, 0.2
"""Of each so many requests all but this share are sent while some processes are spared."""
SPARED = ("front-end-0", "r0")
"""And the keeper."""
GENTLE = ("gate", "engine", "gate+engine", "stop keeper", "stop engine", "drain")
HARSH = (*GENTLE, "keeper", "gate+keeper", "keeper+engine", "roll")
"""What is done to a server with front ends; a pair at once."""


@asynccontextmanager
async def disturbed(processes: Processes, report: Report, every: float, seed: int) -> AsyncIterator[None]:
    """Do something to a server with front ends every so many seconds, until the block ends."""
    dice = random.Random(f"{seed}/{report.num_done}/disturb")
    disturbing = asyncio.create_task(_disturb(processes, report, every, dice))
    yield
    disturbing.cancel()
    with suppress(asyncio.CancelledError):
        await disturbing


async def _disturb(processes: Processes, report: Report, every: float, dice: random.Random) -> None:
    while processes.server.keepers:
        await asyncio.sleep(every)
        is_harsh = report.num_done % SPARED_PERIOD < HARSH_SHARE * SPARED_PERIOD
        what = dice.choice(HARSH if is_harsh else GENTLE)
        await _do(what, processes, dice, [] if is_harsh else SPARED)
        report.disturbed[what] = report.disturbed.get(what, 0) + 1
        if not await processes.wait_until_whole():
            report.fault(f"not whole again after {what}: {processes.server.lines[-20:]}")


async def _do(what: str, processes: Processes, dice: random.Random, spared: Sequence[str]) -> None:
    match what:
        case "stop keeper":
            os.kill(keeper := processes.keeper(), signal.SIGSTOP)
            await asyncio.sleep(1)
            os.kill(keeper, signal.SIGCONT)
        case "stop engine":
            os.kill(processes.choose("engine", dice, spared)[1], signal.SIGSTOP)
        case "roll":
            processes.server.send_signal(signal.SIGHUP)
        case "drain":
            replica = processes.next_engine(spared)
            with suppress(httpx.HTTPError):  # a starved machine answers late
                await asyncio.to_thread(processes.server.change_fleet, "drain", replica=replica, restart=True)
        case _:
            processes.kill([processes.choose(each, dice, spared)[1] for each in what.split("+")])
