"""Plain routers to compare with: by chance, and by the work that is left."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.routers import ByLoad, Stateless
from onbeat.scheduler.cluster.routing import NONE_EXCLUDED, RoutingChoice

UNIT_COSTS = PrefillCosts(token=1.0, pair=0.0, step=0.0, decode=1.0)
"""Where no replica predicts: a token is as much as another."""


class RandomRouter(Stateless):
    """Evenly by a hash of the request's id: the same request goes to the same replica."""

    def route(
        self,
        request: RoutingRequest,
        now: float = 0.0,  # noqa: ARG002
        excluded: Collection[int] = NONE_EXCLUDED,
    ) -> RoutingChoice | None:
        members = self.allowed(excluded)
        if not members:
            return None
        digest = blake2b(f"0/{request.request_id}".encode(), digest_size=8).digest()
        return RoutingChoice(members[int.from_bytes(digest, "little") % len(members)], "hash")


class LeastWork(ByLoad):
    """The replica with the least predicted work left: prompts to run, and tokens to generate.

    Work is what replicas report that it costs; an answer is taken to be as long as it may be.
    """

    reads_reports = reads_every_report = True

    def __init__(self) -> None:
        super().__init__()
        self._costs = UNIT_COSTS
        self._num_outstanding: list[int] = []
        self._left: dict[str, tuple[float, float]] = {}
        """Seconds of prefill and of decodes that each request has left."""

    def route(
        self,
        request: RoutingRequest,
        now: float = 0.0,  # noqa: ARG002
        excluded: Collection[int] = NONE_EXCLUDED,
    ) -> RoutingChoice | None:
        replica = self.replicas.peek(excluded)
        if replica is None:
            return None
        prefill = self._costs.seconds(request.num_prompt_tokens, 0)
        self._left[request.request_id] = prefill, self._decodes(request)
        self._num_outstanding[replica] += 1
        self.replicas.choose(replica, prefill + self._decodes(request))
        return RoutingChoice(replica, "load")

    def take(self, replica: int, request: RoutingRequest) -> None:
        self._left[request.request_id] = 0.0, self._decodes(request)
        self._num_outstanding[replica] += 1
        self.replicas.add(replica, self._decodes(request))

    def on_first_token(self, replica: int, request: RoutingRequest) -> None:
        prefill, decodes = self._left[request.request_id]
        self._left[request.request_id] = 0.0, decodes
        self.replicas.add(replica, -prefill)

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        left = sum(self._left.pop(request.request_id))
        self._num_outstanding[replica] -= 1
        # Sums of floats do not come back to 0 by themselves.
        is_idle = self._num_outstanding[replica] == 0
        self.replicas.add(replica, -self.replicas.loads[replica] if is_idle else -left)

    def on_report(self, replica: int, load: ReplicaLoad, now: float) -> None:  # noqa: ARG002
        self._costs = load.costs or self._costs

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        super().join(replica, limits)
        self._num_outstanding += [0] * (replica + 1 - len(self._num_outstanding))

    def _decodes(self, request: RoutingRequest) -> float:
        """Return the seconds of all its decodes, each by its share of a step."""
        return request.max_tokens * self._costs.decode
