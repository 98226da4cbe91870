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
    """Drain and start each replica that has a process; wait for each before the next."""
    for replica, life in list(replicas.lives.items()):
        if replicas.lives.get(replica) is not life:
            continue  # it has been started again since
        replicas.drain(replica, seconds=DRAIN_SECONDS, restarts=True)
        while not _is_settled(replicas, replica, life):
            replicas.changed.clear()
            await replicas.changed.wait()


def _is_settled(replicas: Replicas, replica: ReplicaId, life: Life) -> bool:
    """Return whether a replica that was restarted is ready, or will not come back."""
    states = {each.replica: each.state for each in replicas.fleet.status().replicas}
    state = states.get(replica, ReplicaState.STOPPED)
    if state in (ReplicaState.DOWN, ReplicaState.STOPPED):
        return True
    return state is ReplicaState.READY and replicas.lives.get(replica) is not life
