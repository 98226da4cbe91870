"""Start all replicas again, one after another, so that the others serve meanwhile."""

from __future__ import annotations

import asyncio
from typing import Protocol

from onbeat.cluster.life import Life
from onbeat.core.fleet import DRAIN_SECONDS, ReplicaId
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import ReplicaState


class Replicas(Protocol):
    """What is needed of a fleet's controller."""

    fleet: Fleet
    lives: dict[ReplicaId, Life]
    changed: asyncio.Event

    def drain(self, replica: ReplicaId, *, seconds: float, restarts: bool) -> None:
        """End a replica without loss."""
        ...


async def restart_all(replicas: Replicas) -> None:
    """Drain and start each replica that is ready; wait for each before the next.

    One that starts meanwhile is waited for, too. One that was told to end, or is scaled away while it is
    waited for, is left alone.
    """
    for replica, life in list(replicas.lives.items()):
        if replicas.lives.get(replica) is not life:
            continue  # it has been started again since
        if replicas.fleet.state(replica) is ReplicaState.READY:
            replicas.drain(replica, seconds=DRAIN_SECONDS, restarts=True)
        while replicas.fleet.is_coming(replica):
            replicas.changed.clear()
            await replicas.changed.wait()
