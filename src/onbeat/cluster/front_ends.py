"""The processes of front ends, from their start to their end: who dies is started again."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess

from onbeat.cluster.local_launcher import terminal_ignored
from onbeat.cluster.roster import LeftProcess, Roster
from onbeat.core.errors import EngineDead
from onbeat.core.hang import OwnPauses

logger = logging.getLogger("onbeat.cluster")

SILENT_SECONDS = 10.0
"""A front end that says nothing for so long is killed: it speaks every second."""
LOOK_SECONDS = 0.5
_PLACE = "front-end-"
_NEXT = "next-front-end"
"""The place of who is about to take one, while front ends are replaced."""
MOST_FAILED_STARTS = 3
"""Front ends that ended before they served, one after another: the next would end as well."""


@dataclass(slots=True)
class _FrontEnd:
    name: str
    process: SpawnProcess | LeftProcess
    heard: float
    serves: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_told: bool = False
    """Whether it was told to end."""


class FrontEnds:
    """Starts front ends, and starts each again that ends or hangs.

    Parameters
    ----------
    number : how many there are to be.
    make : makes the process of one, not started, from its name, which no other has.
    roster : has those of a keeper before this one.

    Attributes
    ----------
    serving : is set once all take connections for the first time.
    have_told : is set once those of a keeper before this one have told what they have open, or have ended.
    """

    def __init__(self, number: int, make: Callable[[str], SpawnProcess], roster: Roster) -> None:
        self.serving = asyncio.Event()
        self._number, self._make, self._roster = number, make, roster
        found = {place: roster.find(f"{_PLACE}{place}") for place in range(number)}
        self._left = {place: left for place, left in found.items() if left is not None}
        self._begins_again = bool(roster.places(_NEXT))
        roster.kill(_NEXT)
        self.have_told = asyncio.Event()
        self._untold = {left.name for left in self._left.values()}
        self.on_told("")
        self._places: dict[int, _FrontEnd] = {}
        self._by_name: dict[str, _FrontEnd] = {}
        """Those in their places, and successors."""
        self._num_failed = 0
        self._is_ending = False
        self._failed = asyncio.Event()
        self._rolling: asyncio.Task[None] | None = None

    def hear(self, name: str) -> None:
        """Hear that a front end lives."""
        if (found := self._by_name.get(name)) is not None:
            found.heard = time.monotonic()

    def on_serving(self, name: str) -> None:
        """Hear that a front end takes connections."""
        if (found := self._by_name.get(name)) is None:
            return
        found.serves.set()
        self._num_failed = 0
        if len(self._places) == self._number and all(each.serves.is_set() for each in self._places.values()):
            self.serving.set()

    def on_told(self, name: str) -> None:
        """Hear that a front end has told what it has open."""
        self._untold.discard(name)
        if not self._untold:
            self.have_told.set()

    async def run(self) -> None:
        """Keep front ends running until `stop`.

        Raises
        ------
        EngineDead : they end again and again before they serve.
        """
        for place in range(self._number):
            if (left := self._left.get(place)) is None:
                self._put(place, self._start(place))
            else:
                self._put(place, self._watch(place, _FrontEnd(left.name, left, time.monotonic())))
                self.on_serving(left.name)  # if it does not, it ends by itself, or is silent
        if self._begins_again:
            logger.warning("front ends were being replaced as the keeper ended: all of them are, again")
            self.roll()
        pauses = OwnPauses(2 * LOOK_SECONDS)
        while not self._is_ending:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), LOOK_SECONDS)
            if self._failed.is_set():
                await self.stop()
                raise EngineDead("front ends end before they serve; see their log lines above")
            if pauses.look(time.monotonic()):  # else what they said meanwhile is to be read first
                self._kill_silent()
        await asyncio.gather(*(each.ended.wait() for each in self._by_name.values()))

    def _kill_silent(self) -> None:
        now = time.monotonic()
        for each in self._by_name.values():
            if each.serves.is_set() and now - each.heard > SILENT_SECONDS:
                logger.error("%s has said nothing for %.0f s and is killed", each.name, now - each.heard)
                each.process.kill()

    def _start(self, place: int) -> _FrontEnd:
        name = f"{_PLACE}{place}.{secrets.token_hex(4)}"
        process = self._make(name)
        with terminal_ignored():
            process.start()
        return self._watch(place, _FrontEnd(name, process, time.monotonic()))

    def _watch(self, place: int, started: _FrontEnd) -> _FrontEnd:
        self._by_name[started.name] = started
        asyncio.get_running_loop().add_reader(started.process.sentinel, self._on_end, place, started)
        return started

    def _put(self, place: int, front_end: _FrontEnd) -> None:
        """Let a front end have a place."""
        self._places[place] = front_end
        self._roster.enter(f"{_PLACE}{place}", front_end.process.pid, front_end.name)

    def _on_end(self, place: int, ended: _FrontEnd) -> None:
        asyncio.get_running_loop().remove_reader(ended.process.sentinel)
        ended.process.join()
        code = ended.process.exitcode
        ended.process.close()
        ended.ended.set()
        has_served = ended.serves.is_set()
        ended.serves.set()  # nobody is to wait for it any more
        self.on_told(ended.name)
        del self._by_name[ended.name]
        if self._is_ending or ended.is_told or self._places.get(place) is not ended:
            return
        if not has_served:
            self._num_failed += 1
        if self._num_failed >= MOST_FAILED_STARTS:
            self._failed.set()
            return
        logger.error("%s has ended (exit code %s) and is started again", ended.name, code)
        self._put(place, self._start(place))

    def roll(self) -> None:
        """Begin to replace front ends one by one, each once its successor serves; one round at a time."""
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.create_task(self._roll(), name="onbeat-rolling-front-ends")
        else:
            logger.warning("front ends are being replaced already; send SIGHUP again once all are")

    async def _roll(self) -> None:
        for place in range(self._number):
            if self._is_ending:
                return
            new = self._start(place)
            self._roster.enter(_NEXT, new.process.pid, new.name)
            await new.serves.wait()
            if new.ended.is_set():
                logger.error("%s has ended before it served: the others are not replaced", new.name)
                break
            old = self._places[place]
            logger.info("%s takes the place of %s", new.name, old.name)
            self._put(place, new)
            self._roster.enter(_NEXT, None, "nobody")
            old.is_told = True
            if not old.ended.is_set() and old.process.pid is not None:
                os.kill(old.process.pid, signal.SIGHUP)
            await old.ended.wait()
        self._roster.strike(_NEXT)

    def terminate(self) -> None:
        """Tell all of them to end: the first time they drain, the second they end at once."""
        self._is_ending = True
        for each in self._by_name.values():
            each.process.terminate()

    async def stop(self) -> None:
        """End all of them at once."""
        self._is_ending = True
        for each in list(self._by_name.values()):
            each.process.kill()
            await each.ended.wait()
