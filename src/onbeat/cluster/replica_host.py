"""Holds the process of one replica on another machine, for a launcher that cannot see it from here.

It runs inside an actor of the cluster, and is to that process what the server is to one of its own: the
process ends with it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import zmq

import onbeat
from onbeat.cluster.clock_offset import clock_id
from onbeat.cluster.launcher import ReplicaSpec
from onbeat.cluster.local_launcher import LocalLauncher
from onbeat.core.fleet import ReplicaId
from onbeat.engine.link import BuildEngine, CurveKeys, EngineLink

LOOK_SECONDS = 0.25
"""How often the host looks whether its process is suspended; of its end it hears at once."""
LAST_WORDS_SECONDS = 1.0
"""So long whoever asks may take to hear of an end."""
NODE_ENDED = "its node has left the cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What a host says of itself before anything is started there."""

    version: str
    """Of onbeat."""
    host: str
    clock_id: str
    public_key: bytes
    """Of the connection that its process will make; the secret one stays there."""


@dataclass(frozen=True, slots=True)
class HostState:
    """How the host's process is."""

    ended: str | None = None
    """Why it ended; None while it is there."""
    is_suspended: bool = False


class ReplicaHost:
    """Starts one process and says what becomes of it; its methods are called from afar."""

    def __init__(self) -> None:
        self._launcher = LocalLauncher()
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._key: tuple[ReplicaId, int] | None = None
        self._why_ended: str | None = None
        self._ended = asyncio.Event()
        self._told = HostState()
        self._parent = os.getppid()
        self._guard: asyncio.Task[None] | None = None

    async def greet(self) -> Greeting:
        """Say who is there."""
        return Greeting(
            version=onbeat.__version__,
            host=socket.gethostname(),
            clock_id=clock_id(),
            public_key=self._public_key,
        )

    async def read_clock(self) -> float:
        """Return the time of this machine's monotonic clock, seconds."""
        return time.monotonic()

    async def start(
        self, replica: ReplicaId, life: int, build: BuildEngine, link: EngineLink, fleet_key: bytes
    ) -> int:
        """Start the process; return its id.

        Parameters
        ----------
        fleet_key : the public key of whoever listens at the link's endpoint.
        """
        self._key = (replica, life)
        self._launcher.watch(self._on_end)
        self._guard = asyncio.create_task(self._end_with_node())
        keys = CurveKeys(self._public_key, self._secret_key, server=fleet_key)
        with _main_module_hidden():
            place = await self._launcher.start(
                ReplicaSpec(replica=replica, life=life, build=build, link=replace(link, keys=keys))
            )
        return place.process_id

    async def next_state(self, seconds: float) -> HostState:
        """Return how the process is once that has changed since the last answer, or after a while."""
        until = time.monotonic() + seconds
        while (state := self._state()) == self._told and (left := until - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._ended.wait(), min(LOOK_SECONDS, left))
            except TimeoutError:
                continue
        self._told = state
        return state

    async def kill(self) -> None:
        """End the process at once."""
        if self._key is not None:
            self._launcher.kill(*self._key)

    def _state(self) -> HostState:
        if self._why_ended is not None:
            return HostState(ended=NODE_ENDED if self._is_orphaned else self._why_ended)
        assert self._key is not None, "it has been started"
        return HostState(is_suspended=self._launcher.is_suspended(*self._key))

    @property
    def _is_orphaned(self) -> bool:
        return os.getppid() != self._parent

    async def _end_with_node(self) -> None:
        """End once the cluster's own process on this node has: nobody could end this one any more.

        An actor may live on for many seconds by itself, and its process would go on sending.
        """
        while not self._is_orphaned:
            await asyncio.sleep(LOOK_SECONDS)
        await self.kill()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        os._exit(1)

    def _on_end(self, _replica: ReplicaId, _life: int, why: str) -> None:
        self._why_ended = why
        self._ended.set()


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Start processes that do not import this one's main program.

    `multiprocessing` imports it into each new process, for what may have been defined there. An actor's main
    program is the cluster's: a second and some 50 MiB, and nothing of ours is in it.
    """
    main = sys.modules["__main__"]
    path = main.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        if path is not None:
            main.__dict__["__file__"] = path
