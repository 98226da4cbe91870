"""Replicas as processes of this machine, each on its share of the cores."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import SpawnProcess
from pathlib import Path

from onbeat.cluster.launcher import OnLost, ReplicaBound, ReplicaPlace, ReplicaSpec
from onbeat.cluster.processor_time import ProcessorTime, read_processor_time
from onbeat.cluster.roster import LeftProcess, Roster, process_status
from onbeat.core.errors import EngineDead
from onbeat.core.fleet import ReplicaId, replica_number
from onbeat.engine.container import host_memory, node_cores, private_bytes, usable_cores

logger = logging.getLogger("onbeat.cluster")

MOST_PER_CORE = 8
"""Replicas of this machine for each of its cores."""
_KILLED_HINT = (
    "somebody killed it: the system, if memory ran out (then give onbeat more, or a smaller "
    "--kv-cache-memory-bytes or model)"
)


@dataclass(slots=True)
class _Started:
    process: SpawnProcess | LeftProcess
    share: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LocalLauncher:
    """Spawns a process for each life of a replica.

    A process ends with the one that spawned it, also where that is killed, or with the roster's guardian.

    Parameters
    ----------
    core_shares : the cores of each replica, which are handed out in turn; empty leaves them to the system.
    devices : a CUDA device for each replica, which no other gets while its process lives; empty leaves
        them to the engines.
    roster : has those of a keeper before this one, which are used again; None: all end with this process.
    """

    def __init__(
        self,
        core_shares: Sequence[Sequence[int]] = (),
        devices: Sequence[str] = (),
        roster: Roster | None = None,
    ) -> None:
        self._core_shares = [tuple(share) for share in core_shares]
        self._devices = devices
        self._roster = roster
        self._left: list[ReplicaId] = []
        """Those that may be there since before this process."""
        self._started: dict[tuple[ReplicaId, int], _Started] = {}
        self._on_lost: OnLost = lambda _replica, _life, _why: None

    def watch(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost

    async def open(self, folder: Path) -> str:
        if self._roster is not None:
            self._left = self._roster.places("r")
            for replica in self._left:
                # a fleet begins with the first numbers
                is_beyond = replica_number(replica) >= len(self._left)
                if is_beyond and (left := self._roster.find(replica)) is not None:
                    left.kill()
                    self._roster.strike(replica)
        return f"ipc://{folder}/fleet"

    async def start(self, spec: ReplicaSpec) -> ReplicaPlace:
        if self._roster is not None and spec.replica in self._left:
            self._left.remove(spec.replica)
            if (left := self._roster.find(spec.replica)) is not None:
                return self._watch(spec, _Started(left, left.share), left.name)
        share = self._free_share(spec.replica)
        link = replace(spec.link, guardian=self._roster.guardian if self._roster else None)
        if self._core_shares:
            link = replace(link, cores=self._core_shares[share % len(self._core_shares)])
        if self._devices:
            link = replace(link, cuda_device=self._devices[share])
        # Not above: front ends import this module, and have no engine.
        from onbeat.engine.process import run_engine_process

        # spawn: a forked child would inherit the event loop and its sockets
        process = multiprocessing.get_context("spawn").Process(
            target=run_engine_process, args=(spec.build, link), name=f"onbeat-{spec.replica}", daemon=True
        )
        with terminal_ignored():
            process.start()
        if self._roster is not None:
            self._roster.enter(spec.replica, process.pid, link.identity.decode(), share)
        return self._watch(spec, _Started(process, share))

    def _watch(self, spec: ReplicaSpec, started: _Started, name: str = "") -> ReplicaPlace:
        key, process = (spec.replica, spec.life), started.process
        self._started[key] = started
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_end, key)
        assert process.pid is not None
        return ReplicaPlace(process_id=process.pid, host=socket.gethostname(), name=name.encode())

    def capacity(self) -> ReplicaBound:
        num_cores = usable_cores()
        cores = f"cores: {num_cores}, with {MOST_PER_CORE} replicas each at most"
        found = [ReplicaBound(MOST_PER_CORE * num_cores, cores)]
        if num_devices := len(self._devices):
            found.append(ReplicaBound(num_devices, f"CUDA devices: {num_devices}"))
        taken = [private_bytes(each.process.pid) for each in self._started.values()]
        if largest := max(taken, default=0):
            free = host_memory()
            sizes = f"{free.num_bytes / 2**30:.1f} GiB are free, a replica takes {largest / 2**30:.1f}"
            # what has just started will grow
            most = max(len(taken), (free.num_bytes + sum(taken)) // largest)
            found.append(ReplicaBound(most, f"{free.limit}: {sizes}"))
        return min(found)

    def kill(self, replica: ReplicaId, life: int) -> None:
        if (started := self._started.get((replica, life))) is not None:
            started.process.kill()  # a stopped process hears nothing else

    async def wait(self, replica: ReplicaId, life: int, *, seconds: float, comes_back: bool) -> None:
        if self._roster is not None and not comes_back:
            self._roster.strike(replica)
        started = self._started.get((replica, life))
        if started is None:
            return
        if self.is_suspended(replica, life):
            started.process.kill()
        try:
            await asyncio.wait_for(started.ended.wait(), seconds)
        except TimeoutError:
            logger.warning("%s does not end and is killed", replica)
            started.process.kill()
            await started.ended.wait()

    def is_suspended(self, replica: ReplicaId, life: int) -> bool:
        started = self._started.get((replica, life))
        return started is not None and process_status(started.process.pid)[:1] in (["T"], ["t"])

    def processor_time(self, replica: ReplicaId, life: int) -> ProcessorTime | None:
        started = self._started.get((replica, life))
        pid = None if started is None else started.process.pid
        return None if pid is None else read_processor_time(pid)

    def clock_offset(self, replica: ReplicaId, life: int) -> float:  # noqa: ARG002 -- all share it
        return 0.0

    async def close(self) -> None:
        for started in list(self._started.values()):
            started.process.kill()
        for started in list(self._started.values()):
            await started.ended.wait()

    def _free_share(self, replica: ReplicaId) -> int:
        """Return the share of the machine that the fewest replicas have.

        Raises
        ------
        EngineDead : all CUDA devices are taken.
        """
        taken = [started.share for started in self._started.values()]
        num_shares = max(len(self._devices) or len(self._core_shares), 1)
        share = min(range(num_shares), key=lambda share: (taken.count(share), share))
        if self._devices and share in taken:
            raise EngineDead(
                f"{replica} has got no CUDA device: the replicas that run have all that there are"
            )
        return share

    def _on_end(self, key: tuple[ReplicaId, int]) -> None:
        started = self._started.pop(key)
        asyncio.get_running_loop().remove_reader(started.process.sentinel)
        started.process.join()  # its files are closed; its exit code follows within milliseconds
        started.ended.set()
        code = started.process.exitcode
        hint = f"; {_KILLED_HINT}" if code == -signal.SIGKILL else ""
        started.process.close()
        self._on_lost(*key, f"its process has ended (exit code {code}){hint}")


def share_cores(num_replicas: int, threads: int | None) -> list[tuple[int, ...]]:
    """Share the cores of this process out among replicas, those of a memory node together.

    Parameters
    ----------
    threads : of each replica, where somebody said; None takes a replica's share.

    Returns
    -------
    shares : those of each replica; none where one replica has them all, or asks for more threads than its
        share has cores. More replicas than cores share them in turn.
    """
    cores = [core for node in node_cores(os.sched_getaffinity(0)) for core in sorted(node)]
    if num_replicas == 1:
        return []
    size = len(cores) // num_replicas
    if threads is not None and threads > max(size, 1):
        return []
    if size == 0:
        return [(cores[number % len(cores)],) for number in range(num_replicas)]
    return [tuple(cores[number * size : (number + 1) * size]) for number in range(num_replicas)]


@contextlib.contextmanager
def terminal_ignored() -> Iterator[None]:
    """Let a process started in the block ignore a terminal's signals from its first instruction.

    Its parent decides.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change what a signal does
        return
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
