"""The processes that hold replicas, from their start to their end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from onbeat.cluster.launcher import Launcher, ReplicaSpec
from onbeat.cluster.life import LIMITS, SUSPENDED_SECONDS, Life
from onbeat.cluster.processor_time import LOOK_SECONDS
from onbeat.cluster.wire import Wire
from onbeat.core.errors import EngineDead, OnbeatError
from onbeat.core.fleet import ReplicaId
from onbeat.core.hang import OwnPauses, find_hang
from onbeat.core.protocols import EngineInfo, EnginePulse
from onbeat.engine.link import BuildEngine, EngineLink
from onbeat.engine.messages import FromEngine, Shutdown

logger = logging.getLogger("onbeat.cluster")

LAST_WORDS_SECONDS = 0.5
"""How long the last message of a process that ended before it was ready may still be on its way."""
STOP_SECONDS = 5.0
"""How long a process that is told to end may take before it is killed."""
FIRST_START_SECONDS = 5.0
"""What a start is expected to take before there was one."""
START_TIMEOUT_SECONDS = 600.0
"""A replica that is not placed, or says nothing, for so long while it starts is given up."""
PAUSE_SECONDS = 0.5
"""Between two checks of a process that stood still itself."""


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait for their ends one after another."""
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


MakeBuild = Callable[[ReplicaId, int], BuildEngine]
"""From a replica and the number of lives that it had to what makes its engine, in its process."""


class Processes:
    """Starts them, ends them, and finds out which of them are gone or hang.

    Parameters
    ----------
    launcher : starts and ends processes.
    make_build : makes the engines.
    on_lost : is called with a life that is to be given up, and why, unless it was told to end.
    start_timeout : seconds after which a replica that says nothing while it starts is given up.

    Attributes
    ----------
    lives : the present life of each replica that has one, the ready and the starting.
    by_name : the same, by the name under which each connects.
    wire : what they connect to; set before the first start.
    first_error : why a replica could not be started.
    """

    wire: Wire[FromEngine]

    def __init__(
        self,
        launcher: Launcher,
        make_build: MakeBuild,
        *,
        on_lost: Callable[[Life, str], None],
        start_timeout: float,
    ) -> None:
        self.lives: dict[ReplicaId, Life] = {}
        self.by_name: dict[bytes, Life] = {}
        self.start_timeout = start_timeout
        self._launcher = launcher
        self._make_build = make_build
        self._on_lost = on_lost
        self._num_lives: dict[ReplicaId, int] = {}
        self._starts: dict[ReplicaId, asyncio.Task[None]] = {}
        self._ends: dict[ReplicaId, asyncio.Task[None]] = {}
        self._start_seconds = FIRST_START_SECONDS
        self._pauses = OwnPauses(PAUSE_SECONDS)
        self.first_error: OnbeatError | None = None

    def open(self, wire: Wire[FromEngine]) -> None:
        """Let replicas connect, and hear of processes that end."""
        self.wire = wire
        self._launcher.watch(self._on_process_end)

    async def close(self) -> None:
        """End all of them."""
        await end_tasks(self._starts.values())
        for life in list(self.lives.values()):
            self.end(life)
        if self._ends:
            await asyncio.wait(self._ends.values())

    @property
    def seconds_to_ready(self) -> float:
        """Seconds until the next replica is expected to be ready, by what the last start took."""
        now = time.monotonic()
        starting = [life.started for life in self.lives.values() if life.info is None]
        return max(self._start_seconds - (now - min(starting, default=now)), 1.0)

    # --- a start --------------------------------------------------------------------------------------

    def start(self, replica: ReplicaId, delay: float) -> None:
        """Begin to start a replica, after some seconds."""
        self._starts[replica] = asyncio.create_task(self._start(replica, delay))

    async def _start(self, replica: ReplicaId, delay: float) -> None:
        if (end := self._ends.get(replica)) is not None:
            await end  # two lives would need twice the memory
        await asyncio.sleep(delay)
        number = self._num_lives.get(replica, 0)
        self._num_lives[replica] = number + 1
        life = Life(replica, number, time.monotonic())
        self.lives[replica] = self.by_name[life.name] = life
        link = EngineLink(endpoint=self.wire.endpoint, identity=life.name, leaves_on_sigterm=True)
        door = self.wire.access
        try:
            spec = ReplicaSpec(
                replica=replica,
                life=number,
                build=self._make_build(replica, number),
                link=link,
                fleet_key=b"" if door is None else door.public_key,
                admits=partial(self._admit, life),
            )
            life.place = place = await self._launcher.start(spec)
            life.heard = time.monotonic()
            if place.name:
                del self.by_name[life.name]
                life.name = place.name
                self.by_name[life.name] = life
        except asyncio.CancelledError:
            self.kill(life)
            raise
        except OnbeatError as error:
            self.fail_start(life, error)
        except Exception as error:
            self.fail_start(life, EngineDead(f"{replica} could not be started: {error}"))

    def _admit(self, life: Life, public_key: bytes) -> None:
        life.public_key = public_key
        if self.wire.access is not None:
            self.wire.access.admit(public_key)

    def on_ready(self, life: Life, info: EngineInfo) -> None:
        """Hear that a start is done."""
        life.info = info
        self._start_seconds = life.heard - life.started
        life.pulse = EnginePulse(life.heard)
        self._starts.pop(life.replica, None)

    def fail_start(self, life: Life, error: OnbeatError) -> None:
        """Give a replica up that cannot be started."""
        self.first_error = self.first_error or error
        self._on_lost(life, str(error))

    # --- an end ---------------------------------------------------------------------------------------

    def stop(self, replica: ReplicaId) -> None:
        """End a replica, or its start."""
        if (start := self._starts.pop(replica, None)) is not None:
            start.cancel()
        if (life := self.lives.get(replica)) is not None:
            self.end(life)

    def end(self, life: Life) -> None:
        """Tell a process that has nothing left to do to end."""
        self.wire.send(life.name, Shutdown())
        self._forget(life)
        if life.info is None:
            self._launcher.kill(life.replica, life.number)  # it reads nothing before it is ready
        task = self._ends[life.replica] = asyncio.create_task(self._wait(life))
        task.add_done_callback(lambda _: self._ends.pop(life.replica, None))

    async def _wait(self, life: Life) -> None:
        comes_back = life.replica in self._starts  # which is known once this runs
        await self._launcher.wait(life.replica, life.number, seconds=STOP_SECONDS, comes_back=comes_back)

    def kill(self, life: Life) -> None:
        """End a process, whatever it does, and let nothing that it still says count."""
        self._forget(life)
        self._launcher.kill(life.replica, life.number)

    def _forget(self, life: Life) -> None:
        self.by_name.pop(life.name, None)
        if self.wire.access is not None:
            self.wire.access.expel(life.public_key)
        if self.lives.get(life.replica) is life:
            del self.lives[life.replica]

    def _on_process_end(self, replica: ReplicaId, number: int, why: str) -> None:
        life = self.lives.get(replica)
        if life is None or life.number != number:
            return
        self.wire.read()
        if life.info is None:
            # Why it could not start may still be on its way.
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._lose_at_start, life, why)
        else:
            self._on_lost(life, life.last_words or why)

    def _lose_at_start(self, life: Life, why: str) -> None:
        if self.lives.get(life.replica) is life:
            self.fail_start(life, EngineDead(f"the engine process of {life.replica} ended at start: {why}"))

    # --- what hangs -----------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Give up replicas that are silent, or whose step does not end; called ten times a second."""
        if not self._pauses.look(now):
            return  # messages wait to be read
        for life in list(self.lives.values()):
            self._check(life, now)

    def _check(self, life: Life, now: float) -> None:
        silence = now - self._pauses.without(life.present_pulse).time
        if life.info is None:
            if life.place is not None and silence > self.start_timeout:
                why = f"{life.replica} has not got ready and has said nothing for {silence:.0f} s"
                self.fail_start(life, EngineDead(f"{why}; see its log, or give it a longer --start-timeout"))
            return
        if silence >= SUSPENDED_SECONDS and self._launcher.is_suspended(life.replica, life.number):
            why = "its process was stopped, or is out of reach,"
            self._on_lost(life, f"{why} and has said nothing for {silence:.1f} s")
            return
        self._look_at_waits(life, now)
        pulse = self._pauses.without(life.present_pulse)
        if (hang := find_hang(pulse, LIMITS, now)) is not None:
            self._on_lost(life, hang)
        elif pulse.waited and not life.waits.is_told and find_hang(replace(pulse, waited=0.0), LIMITS, now):
            life.waits.is_told = True
            logger.warning(
                "%s is slow: it waited for a processor for %.0f s. It is not started again for that; "
                "end other programs there, or raise its CPU quota",
                life.replica,
                pulse.waited,
            )

    def _look_at_waits(self, life: Life, now: float) -> None:
        """Find out whether a process that may hang gets the processor time that it wants."""
        pulse, waits = self._pauses.without(life.present_pulse), life.waits
        oldest = min(pulse.time, now if pulse.step_start is None else pulse.step_start)
        if now - oldest < SUSPENDED_SECONDS:
            waits.forget()
        elif now - waits.last_look >= LOOK_SECONDS:
            waits.look(now, self._launcher.processor_time(life.replica, life.number))
