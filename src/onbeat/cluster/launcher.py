"""The seam between a fleet and whatever starts its processes: this machine, or a cluster's own engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from onbeat.cluster.processor_time import ProcessorTime
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaId
from onbeat.engine.link import BuildEngine, EngineLink
from onbeat.perfmodel.device_spec import is_gpu

OnLost = Callable[[ReplicaId, int, str], None]
"""Called with a replica, which of its lives ended, and why, as far as that can be seen from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One life of a replica that is to begin."""

    replica: ReplicaId
    life: int
    """How many lives it had before: what an earlier one says counts no more."""
    build: BuildEngine
    """Makes the engine inside its process; can be pickled."""
    link: EngineLink
    """How the process reaches the fleet, but for the keys of its connection, which are its own."""
    fleet_key: bytes = b""
    """The fleet's public key, where connections are encrypted (CurveZMQ, in Z85)."""
    admits: Callable[[bytes], None] = lambda _: None
    """Called with the process's public key before the process connects; any other is turned away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlace:
    """Where a life of a replica runs."""

    process_id: int
    host: str
    name: bytes = b""
    """By which it connects, where it ran before: another keeper started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaNeeds:
    """What a replica asks of a cluster that finds it a place."""

    device: str
    """As in the engine's configuration; `auto` is a GPU where the cluster has any."""
    num_cpus: int | None
    """Of a replica on CPUs; None where nobody said."""

    def bundle(self, cluster: dict[str, float]) -> dict[str, float]:
        """Return what one replica takes of a cluster's resources.

        Raises
        ------
        ConfigError : it is not known how many CPUs it needs.
        """
        has_gpus = cluster.get("GPU", 0) > 0
        is_cuda = self.device.startswith("cuda") or is_gpu(self.device)
        if is_cuda or (self.device == "auto" and has_gpus):
            return {"CPU": 1.0, "GPU": 1.0}
        if self.num_cpus is None:
            raise ConfigError("a replica on CPUs asks Ray for as many CPUs as it has threads; give --threads")
        return {"CPU": float(self.num_cpus)}


class ReplicaBound(NamedTuple):
    """How many replicas there can be at once, those that run included."""

    num_replicas: int
    limit: str
    """What sets this bound, for people."""


class Launcher(Protocol):
    """Starts and ends the processes of replicas, and sees them end.

    It carries no request and no token, and it decides nothing: what was lost is started again only when the
    fleet says so. Nothing that it started outlives it, however the process that holds it ends.
    """

    def watch(self, on_lost: OnLost) -> None:
        """Call back, in the event loop, for each process that ends, whatever ended it; to be called first."""

    async def open(self, folder: Path) -> str:
        """Prepare to start processes; return the ZeroMQ endpoint at which they can reach the fleet.

        Parameters
        ----------
        folder : for sockets; nobody but this user can enter it.

        Raises
        ------
        ConfigError : nothing can be started here.
        """

    async def start(self, spec: ReplicaSpec) -> ReplicaPlace:
        """Start a process, and return once there is one; whether its engine is ready it says itself.

        Raises
        ------
        OnbeatError : there is no place for it, or it cannot be started.
        """

    def capacity(self) -> ReplicaBound:
        """Return how many replicas what is there can hold, by what those that run take."""

    def kill(self, replica: ReplicaId, life: int) -> None:
        """End a process at once, however it is; nothing happens where it has ended."""

    async def wait(self, replica: ReplicaId, life: int, *, seconds: float, comes_back: bool) -> None:
        """Return once a process has ended; kill it after a while.

        Parameters
        ----------
        comes_back : whether the replica is to be started again, by whichever keeper there is then.
        """

    def is_suspended(self, replica: ReplicaId, life: int) -> bool:
        """Return whether a process is stopped (SIGSTOP) or out of reach: it will not speak by itself."""

    def processor_time(self, replica: ReplicaId, life: int) -> ProcessorTime | None:
        """Return what a process has got of the processors; None where that cannot be seen from here."""

    def clock_offset(self, replica: ReplicaId, life: int) -> float:
        """Return by how many seconds a process's monotonic clock is behind this one's."""

    async def close(self) -> None:
        """End whatever still runs."""
