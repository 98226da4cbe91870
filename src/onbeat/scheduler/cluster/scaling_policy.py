"""What decides how many replicas a fleet should have: what it hears, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.scheduler.cluster.events import RoutingRequest


class FleetLoad(NamedTuple):
    """A fleet, as a scaling policy sees it."""

    num_ready: int
    num_expected: int
    """Replicas that serve, start or start again."""
    num_open: int
    """Requests that have not ended."""
    settled: float
    """Seconds for which the replicas that serve have been the same."""
    most: int
    """Replicas that there may be."""
    loads: Sequence[tuple[ReplicaLoad, ReplicaLimits]]
    """Last reports of those that are ready."""


class Wanted(NamedTuple):
    """How many replicas there should be."""

    num_replicas: int
    why: str = ""
    """One word, where that differs from what there is: `work`, `late` or `spare`."""


class ScalingPolicy:
    """Hears what comes to a fleet and what becomes of it; this one knows nothing and leaves all as it is.

    Times are seconds of the clock by which requests arrive.
    """

    needs_costs = False
    """Whether it works only where replicas predict steps."""
    cools_down = True
    """Whether a replica stays for a while after anything has changed; else the policy sees to that itself."""
    share: float | None = None
    """See `ScalingView`; so is the next."""
    planned_share: float | None = None
    late_share: float = 0.0
    """Of the requests of the last minute, those that were not in time, or predicted not to be."""

    def on_arrival(self, request: RoutingRequest, now: float) -> None:
        """Hear of a request."""

    def on_sent(self, request: RoutingRequest, predicted_ttft: float | None, now: float) -> None:
        """Hear in how many seconds its first token is expected; None where nobody predicts."""

    def on_first_token(self, request: RoutingRequest, num_cached_tokens: int, now: float) -> None:
        """Hear that it has begun, and what of its prompt was in a prefix cache."""

    def on_refusal(self, request: RoutingRequest, now: float) -> None:
        """Hear that nobody has capacity for it."""

    def on_end(self, request: RoutingRequest, num_output_tokens: int | None, now: float) -> None:
        """Hear that it has ended.

        Parameters
        ----------
        num_output_tokens : that it has had; None where its client has left, or it was refused.
        """

    def on_report(self, load: ReplicaLoad, limits: ReplicaLimits) -> None:
        """Hear how a replica stands."""

    def look(self, fleet: FleetLoad, now: float) -> Wanted:
        """Return how many replicas there should be; called about once a second."""
        del now
        return Wanted(fleet.num_expected)
