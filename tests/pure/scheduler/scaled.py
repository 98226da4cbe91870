"""A fleet whose size is planned under a virtual clock."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from math import inf

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.core.slo import SLO
from onbeat.scheduler.cluster.events import (
    Arrived,
    Delivered,
    FleetAction,
    Joined,
    Lost,
    Reported,
    Rescale,
    RoutingRequest,
    ScaleAsked,
    ScalingAsked,
    Send,
    Start,
    Tick,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import FleetRules, ReplicaState
from onbeat.scheduler.cluster.routers import make_router
from tests.owners import check_owners

LIMITS = ReplicaLimits(max_model_len=8192, max_num_seqs=64, num_blocks=4000, block_size=16)
COSTS = PrefillCosts(token=1e-4, pair=0.0, step=2e-3, decode=1e-4, decode_base=5e-3)
"""A prompt of 1,000 tokens takes 0.1 s."""


START_SECONDS = 20.0


class Scaled:
    """A fleet whose replicas start in `START_SECONDS` and answer each request 0.5 s after it came."""

    def __init__(
        self, least: int, most: int, *, policy: str = "objective", down_seconds: float = 600.0
    ) -> None:
        config = FleetRules(autoscale=policy, scale_down_seconds=down_seconds)
        self.fleet = Fleet(make_router("least-outstanding"), config)
        self.now = 0.0
        self.changes: list[Rescale] = []
        self.actions: list[FleetAction] = []
        self._due: list[tuple[float, int, object]] = []
        self._num = 0
        self.is_late = False
        """Whether answers take 5 s."""
        self.starts_fail = False
        self.on(ScaleAsked(max(1, least)))
        self.on(ScalingAsked(least, most))

    def on(self, event) -> None:
        self.actions = self.fleet.on_event(event, self.now)
        check_owners(self.fleet)
        for action in self.actions:
            if isinstance(action, Rescale):
                self.changes.append(action)
            elif isinstance(action, Start):
                result = (
                    Lost(action.replica, "no luck") if self.starts_fail else Joined(action.replica, LIMITS)
                )
                self._later(action.delay + START_SECONDS, result)
            elif isinstance(action, Send):
                ended = Delivered(action.replica, action.request_id, 10, 0, is_finished=True)
                self._later(5.0 if self.is_late else 0.5, ended)

    def _later(self, seconds: float, event: object) -> None:
        self._num += 1
        heappush(self._due, (self.now + seconds, self._num, event))

    def run(self, until: float) -> None:
        """Let time pass, with a look each time that one is wanted."""
        while min(next_due := self._due[0][0] if self._due else inf, self.fleet.next_time) <= until:
            if next_due <= self.fleet.next_time:
                self.now, _, event = heappop(self._due)
                self.on(event)
                if isinstance(event, Joined):
                    self.on(Reported(event.replica, ReplicaLoad(time=0.0, num_taken=0, costs=COSTS)))
            else:
                self.now = max(self.now, self.fleet.next_time)
                self.on(Tick())
        self.now = until

    def send(self, *, num_prompt: int = 1000, ttft: float | None = 2.0, **fields) -> str:
        self._num += 1
        request = RoutingRequest(
            f"q{self._num}",
            num_prompt_tokens=num_prompt,
            max_tokens=10,
            arrival=self.now,
            slo=None if ttft is None else SLO(ttft=ttft, tbt=0.1),
            **fields,
        )
        self.on(Arrived(request))
        return request.request_id

    def offer(self, rate: float, seconds: float, rng: random.Random) -> None:
        """Send Poisson arrivals of exponential prompts of 1,000 tokens in the mean."""
        end = self.now + seconds
        while (when := self.now + rng.expovariate(rate)) < end:
            self.run(when)
            self.send(num_prompt=1 + min(8000, int(rng.expovariate(1e-3))))
        self.run(end)

    def num(self, *states: ReplicaState) -> int:
        return sum(self.fleet.count(state) for state in states)

    @property
    def num_expected(self) -> int:
        return self.num(ReplicaState.READY, ReplicaState.STARTING)
