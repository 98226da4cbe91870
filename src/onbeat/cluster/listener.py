"""What the requests of a fleet hear from whoever carries its decisions out."""

from __future__ import annotations

from typing import Protocol

from onbeat.cluster.life import Life
from onbeat.cluster.open_request import OpenRequest, Origin
from onbeat.core.fleet import ReplicaId, ReplicaLoad
from onbeat.core.step import StepOutputs
from onbeat.engine.rejection import Rejected
from onbeat.scheduler.cluster.events import Refuse, Rescale, Send


class Listener(Protocol):
    """Hears what concerns requests."""

    def on_stepped(self, life: Life, outputs: StepOutputs) -> None:
        """Hear what a step of a replica delivered."""
        ...

    def on_rejected(self, life: Life, rejected: Rejected) -> None:
        """Hear that a replica does not take a request."""
        ...

    def before_send(self, action: Send) -> None:
        """Hear where a request goes now."""
        ...

    def on_sent(self, opened: OpenRequest) -> None:
        """Hear that a request has its name there."""
        ...

    def on_refused(self, action: Refuse) -> None:
        """Hear that nobody will serve a request."""
        ...

    def on_moved(self, opened: OpenRequest, origin: Origin) -> None:
        """Hear that a request goes on elsewhere with its KV."""
        ...

    def on_stayed(self, why: str) -> None:
        """Hear that a request which was to be moved goes on where it is, or has ended.

        Parameters
        ----------
        why : it was to be moved.
        """
        ...

    def on_copied(self, num_bytes: int) -> None:
        """Hear how much KV has been copied."""
        ...

    def on_rescaled(self, action: Rescale) -> None:
        """Hear that there are to be more or fewer replicas."""
        ...

    def on_lost(self, replica: ReplicaId) -> None:
        """Hear that a replica was lost."""
        ...

    def before_report(self, replica: ReplicaId, load: ReplicaLoad) -> ReplicaLoad:
        """Hear how a replica stands; return that with the fleet's name of a request in place of its own.

        The fleet must know how far that request is, since it may go elsewhere.
        """
        ...

    def before_loss(self, replica: ReplicaId) -> None:
        """Hear that what a replica has will go elsewhere: the fleet must know how far its requests are."""
        ...
