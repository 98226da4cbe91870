"""Replicas on the nodes of a Ray cluster: Ray places their processes, starts and ends them, and no more.

What requests need goes past Ray, from the server to each process, so it goes on where Ray stands still. An
actor of the cluster holds the process of one replica (`ReplicaHost`), and is to it what the server is to one
of its own: the process ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import zmq

import onbeat
from onbeat.cluster.clock_offset import ClockOffset, clock_id
from onbeat.cluster.launcher import OnLost, ReplicaBound, ReplicaNeeds, ReplicaPlace, ReplicaSpec
from onbeat.cluster.life import check_node
from onbeat.cluster.local_launcher import LocalLauncher
from onbeat.cluster.processor_time import ProcessorTime
from onbeat.core.errors import ConfigError, EngineDead
from onbeat.core.extras import require
from onbeat.core.fleet import MOST_REPLICAS, ReplicaId
from onbeat.engine.link import BuildEngine, CurveKeys, EngineLink

logger = logging.getLogger("onbeat.cluster")

CONNECT_SECONDS = 3.0
"""How long a cluster's address may take to answer at all."""
JOIN_SECONDS = 15.0
"""How long Ray may take to join the cluster that answers there."""
HOST_SECONDS = 60.0
"""How long an actor may take to start once it has a place: its node imports Ray and this package."""
PLACE_LOOK_SECONDS = 2.0
"""How often Ray is asked whether a place was found."""
SAY_PENDING_SECONDS = 4.0
"""After so long without a place, somebody is told."""
CLOCK_SECONDS = 60.0
"""How often a node's clock is measured again; so long is also the longest silence of a host that lives."""
NUM_ROUND_TRIPS = 10
RETRY_SECONDS = 0.5
END_SECONDS = 3.0
"""How long an actor may take to end its process before Ray ends the actor."""

NO_HEAD = "the head of the cluster does not answer"
RAY_SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_NUM_REDIS_GET_RETRIES": "5",
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
"""Of Ray, in its environment, unless they are there. It ends a process whose cluster has had no head for a
minute: a server has streams to go on with. It asks a head that refuses it 20 times, once a second. And with a
call that comes after this process has left, such as one that gives a place back, it would join again."""

Key = tuple[ReplicaId, int]
Result = TypeVar("Result")


@dataclass(slots=True)
class _Started:
    """One life of a replica: its place, its actor, and what the actor said."""

    host: Any
    group: Any
    clock: ClockOffset = field(default_factory=ClockOffset)
    is_out_of_reach: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: asyncio.Task[None] | None = None


class RayLauncher:
    """Has Ray find a place for each life of a replica, and an actor there hold its process.

    Nothing that it started outlives the process that holds it: Ray ends the actors of a driver that is gone,
    and their processes end with them.

    Parameters
    ----------
    address : of the cluster, as Ray takes it: `auto`, or `HOST:PORT` of its head.
    needs : what each replica asks for.
    port : on which replicas reach this process; 0 for any that is free.
    start_timeout : seconds that a place may take to be found.

    Raises
    ------
    MissingExtra : Ray is not installed.
    """

    def __init__(
        self, address: str, needs: ReplicaNeeds, *, port: int = 0, start_timeout: float = 600.0
    ) -> None:
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)  # Ray reads them when it is imported
        for module in ("ray.util.scheduling_strategies", "ray"):  # which does not import the first by itself
            self._ray = require(module, extra="cluster", purpose="--launcher ray")
        self._address = address
        self._needs = needs
        self._port = port
        self._start_timeout = start_timeout
        self._bundle: dict[str, float] = {}
        self._started: dict[Key, _Started] = {}
        self._on_lost: OnLost = lambda _replica, _life, _why: None

    def watch(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost

    async def open(self, folder: Path) -> str:  # noqa: ARG002 -- nothing here has a file
        await self._check_reachable()
        try:
            await asyncio.wait_for(_in_thread(self._connect), JOIN_SECONDS)
        except TimeoutError:
            raise ConfigError(
                f"the Ray cluster at {self._address} did not let this process join within "
                f"{JOIN_SECONDS:.0f} s; check --ray-address, and that this machine is a node of it"
            ) from None
        self._bundle = self._needs.bundle(self._ray.cluster_resources())
        host = self._ray.util.get_node_ip_address()
        return f"tcp://{f'[{host}]' if ':' in host else host}:{self._port or '*'}"

    async def start(self, spec: ReplicaSpec) -> ReplicaPlace:
        key = (spec.replica, spec.life)
        group = await self._place(spec.replica)
        host = None
        try:
            host = self._make_host(group, spec.replica)
            greeting: Greeting = await asyncio.wait_for(host.greet.remote(), HOST_SECONDS)
            check_node(greeting.host, greeting.version)
            started = _Started(host, group)
            if greeting.clock_id == clock_id():
                started.clock = ClockOffset(0.0)
            else:
                await self._measure_clock(started)
            spec.admits(greeting.public_key)
            process_id: int = await asyncio.wait_for(
                host.start.remote(spec.replica, spec.life, spec.build, spec.link, spec.fleet_key),
                HOST_SECONDS,
            )
        except BaseException as error:
            self._release(host, group)
            if isinstance(error, self._ray.exceptions.RayError | TimeoutError):
                raise EngineDead(f"{spec.replica}: {self._sentence(error)}") from error
            raise
        self._started[key] = started
        started.watcher = asyncio.create_task(self._watch(key, started), name=f"onbeat-ray-{spec.replica}")
        return ReplicaPlace(process_id=process_id, host=greeting.host)

    def kill(self, replica: ReplicaId, life: int) -> None:
        if (started := self._started.get((replica, life))) is not None:
            started.host.kill.remote()
            # An actor that cannot do so is ended itself, and its process notices.
            asyncio.get_running_loop().call_later(END_SECONDS, self._give_up, (replica, life))

    async def wait(self, replica: ReplicaId, life: int, *, seconds: float, comes_back: bool) -> None:  # noqa: ARG002
        started = self._started.get((replica, life))
        if started is None:
            return
        if started.is_out_of_reach:
            self.kill(replica, life)
        with suppress(TimeoutError):
            await asyncio.wait_for(started.ended.wait(), seconds)
        if not started.ended.is_set():
            logger.warning("%s does not end and is killed", replica)
            self.kill(replica, life)
            await started.ended.wait()

    def capacity(self) -> ReplicaBound:
        # a cluster may grow: Ray says what it waits for
        return ReplicaBound(MOST_REPLICAS, "no fleet has more")

    def is_suspended(self, replica: ReplicaId, life: int) -> bool:
        started = self._started.get((replica, life))
        return started is not None and started.is_out_of_reach

    def processor_time(self, replica: ReplicaId, life: int) -> ProcessorTime | None:  # noqa: ARG002
        return None  # it is on another machine

    def clock_offset(self, replica: ReplicaId, life: int) -> float:
        started = self._started.get((replica, life))
        return 0.0 if started is None else started.clock.seconds

    async def close(self) -> None:
        ends = [started.ended.wait() for started in self._started.values()]
        for key in list(self._started):
            self.kill(*key)
        await asyncio.gather(*ends)
        with suppress(TimeoutError):
            await asyncio.wait_for(_in_thread(self._ray.shutdown), END_SECONDS)

    # --- the cluster ----------------------------------------------------------------------------------

    async def _check_reachable(self) -> None:
        """Raise ConfigError where nobody answers: Ray itself would try for a minute."""
        address = os.environ.get("RAY_ADDRESS", "auto") if self._address == "auto" else self._address
        if address == "auto":
            return
        host, colon, port = address.rpartition(":")
        if "://" in address or not colon or not port.isdecimal():
            raise ConfigError(
                f"--ray-address must be auto or HOST:PORT of the cluster's head, such as 10.0.0.1:6379, not "
                f"{address!r}; the server itself has to run on a node of the cluster"
            )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError, OverflowError) as error:
            number = getattr(error, "errno", None) or -1
            why = str(error) if number < 0 else os.strerror(number)
            why = "nobody answers" if isinstance(error, TimeoutError) else why
            raise ConfigError(f"the Ray cluster at {address} cannot be reached: {why}") from error
        writer.close()

    def _connect(self) -> None:
        try:
            self._ray.init(address=self._address, logging_level=logging.ERROR)
        except Exception as error:
            if "AuthenticationError" in "".join(traceback.format_exception(error)):
                raise ConfigError(
                    f"the Ray cluster at {self._address} refuses this process's token; Ray takes it from "
                    "RAY_AUTH_TOKEN, or ~/.ray/auth_token"
                ) from error
            raise ConfigError(
                f"no Ray cluster can be joined at {self._address}: {self._sentence(error)}; start one with "
                "`ray start --head`, or give another --ray-address"
            ) from error

    async def _place(self, replica: ReplicaId) -> Any:
        """Return a placement group once Ray has found a place.

        Raises
        ------
        EngineDead : it has found none in time.
        """
        asked = time.monotonic()
        group = None
        has_said = False
        is_given_up = threading.Event()

        def ask() -> Any:
            group = self._ray.util.placement_group([self._bundle], "STRICT_PACK")
            if is_given_up.is_set():
                self._ray.util.remove_placement_group(group)
            return group

        try:
            async with asyncio.timeout(self._start_timeout):
                asking = _in_thread(ask)
                if not (await asyncio.wait([asking], timeout=SAY_PENDING_SECONDS))[0]:
                    has_said = True
                    logger.warning("%s waits for a place: %s", replica, NO_HEAD)
                group = await asking
                while not await _in_thread(group.wait, PLACE_LOOK_SECONDS):
                    if not has_said and time.monotonic() - asked > SAY_PENDING_SECONDS:
                        has_said = True
                        logger.warning("%s waits for a place: %s", replica, self._lack())
        except BaseException as error:
            is_given_up.set()
            if group is not None:
                self._release(None, group)
            if isinstance(error, TimeoutError):
                about = NO_HEAD if group is None else self._lack()
                raise EngineDead(
                    f"{replica} has got no place in {self._start_timeout:.0f} s (--start-timeout): {about}"
                ) from None
            if isinstance(error, self._ray.exceptions.RayError):
                raise EngineDead(f"{replica} has got no place: {self._sentence(error)}") from error
            raise
        return group

    def _lack(self) -> str:
        wanted = " and ".join(f"{number:g} {name}" for name, number in self._bundle.items())
        return f"it needs {wanted} on one node, and no node of the cluster has that free"

    def _make_host(self, group: Any, replica: ReplicaId) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0
        )
        actor = self._ray.remote(ReplicaHost).options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0.0),
            scheduling_strategy=strategy,
            max_restarts=0,
            max_task_retries=0,
        )
        logger.debug("%s has got a place", replica)
        return actor.remote()

    # --- lives ----------------------------------------------------------------------------------------

    async def _watch(self, key: Key, started: _Started) -> None:
        """Follow a process until it has ended or its actor has."""
        while True:
            try:
                state: HostState = await started.host.next_state.remote(CLOCK_SECONDS)
            except self._ray.exceptions.ActorUnavailableError:
                started.is_out_of_reach = True
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except self._ray.exceptions.RayError as error:
                why = f"Ray has lost the actor that held its process: {self._sentence(error)}"
                break
            if state.ended is not None:
                why = state.ended
                break
            started.is_out_of_reach = state.is_suspended
            with suppress(self._ray.exceptions.RayError):
                await self._measure_clock(started)
        self._end(key, why)

    def _end(self, key: Key, why: str) -> None:
        started = self._started.pop(key, None)
        if started is None:
            return
        started.ended.set()
        self._release(started.host, started.group)
        self._on_lost(*key, why)

    def _give_up(self, key: Key) -> None:
        """Have Ray end an actor that has not ended its process by itself."""
        if (started := self._started.get(key)) is not None:
            if started.watcher is not None:
                started.watcher.cancel()
            self._end(key, "its actor did not end it, and was ended by Ray")

    def _release(self, host: Any, group: Any) -> None:
        """Give a place back, and end the actor in it; neither is waited for, since Ray may stand still."""

        def release() -> None:
            with suppress(Exception):
                if host is not None:
                    self._ray.kill(host)
            with suppress(Exception):
                self._ray.util.remove_placement_group(group)

        threading.Thread(target=release, name="onbeat-ray-release", daemon=True).start()

    async def _measure_clock(self, started: _Started) -> None:
        if started.clock.error(time.monotonic()) == 0.0:
            return  # it is this machine's
        for _ in range(NUM_ROUND_TRIPS):
            sent = time.monotonic()
            read: float = await started.host.read_clock.remote()
            started.clock.add(sent, read, time.monotonic())

    def _sentence(self, error: BaseException) -> str:
        """Return the line of Ray's error that says what is wrong; the others tell the actor's story."""
        if isinstance(error, TimeoutError):
            return f"its actor has not answered in {HOST_SECONDS:.0f} s"
        if isinstance(error, self._ray.exceptions.RayTaskError):
            return f"{type(error.cause).__name__}: {error.cause}"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if not lines:
            return type(error).__name__
        return lines[-1 if "creation task" in lines[0] else 0]


def _in_thread(call: Callable[..., Result], *args: Any) -> asyncio.Future[Result]:
    """Call something of Ray that may wait for the cluster's head, perhaps for ever.

    It has a thread of its own: the event loop goes on, and the end of this process waits for none of them.
    """
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()  # who gives up waiting cannot take it back

    def run() -> None:
        try:
            done.set_result(call(*args))
        except BaseException as error:  # it is raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="onbeat-ray", daemon=True).start()
    return asyncio.wrap_future(done)


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
