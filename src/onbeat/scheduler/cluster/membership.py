"""The replicas of a fleet: which of them take requests, which are coming, and which stay down."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from operator import attrgetter

from onbeat.core import fleet
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaId, ReplicaLimits
from onbeat.scheduler.cluster.events import FleetAction, RoutingRequest
from onbeat.scheduler.cluster.routing import NONE_EXCLUDED, Router

RESTART_DELAY = 0.5
"""Seconds before a replica that died is started again, doubled with each further death in `DEATHS_WINDOW`."""
DEATHS_WINDOW = 60.0
"""Seconds."""
MOST_DEATHS = 3
"""A replica that dies so many times within `DEATHS_WINDOW` stays down."""


DOWN_SECONDS = 600.0
"""A replica that goes costs its moves, and a start if it comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRules:
    """How a fleet treats its replicas."""

    drain_seconds: float = fleet.DRAIN_SECONDS
    """How long what runs on a replica may take that is to end because fewer are asked for."""
    max_wait_seconds: float | None = None
    """Longest that a request without tokens waits for a replica to start; None: no limit."""
    num_prefill: int = 0
    """Replicas, `r0` and so on, that compute prompts for the others; 0: all do both."""
    pool_rule: str = "adaptive"
    """See `POOL_POLICIES`."""
    move_rule: str = "mend"
    """See `MOVE_RULES`."""
    autoscale: str = ""
    """One of `SCALING_POLICIES`, which decides between the numbers of `ScalingAsked`; empty: nobody does."""
    scale_down_seconds: float = DOWN_SECONDS
    """A replica goes once the load has been low for so long."""


class ReplicaState(StrEnum):
    """What a replica can do."""

    STARTING = "starting"
    """It takes no requests yet."""
    READY = "ready"
    DRAINING = "draining"
    """It ends what it has and takes nothing new."""
    DOWN = "down"
    """It died too often and is not started again by itself."""
    STOPPED = "stopped"
    """It was to end, and has."""


@dataclass(slots=True)
class RoutedRequest:
    """A request that has not ended."""

    request: RoutingRequest
    replica: ReplicaId | None = None
    """Where it is; None while it waits in the fleet."""
    number: int = 0
    """How many requests its replica had been sent with it; 0 of one that was moved there with its KV."""
    num_deaths: int = 0
    """Replicas that died under it since its client last got a token."""
    has_started: bool = False
    """Whether its replica has delivered tokens of it."""
    num_output_tokens: int = 0
    """That its client has got, as far as the fleet was told."""
    stops: bool = False
    """Whether its replica has it stand still after its first token."""
    is_kept: bool = False
    """Whether a replica had it before this one: it was taken once, and is not refused lightly."""
    refused_by: tuple[ReplicaId, ...] = ()
    """Since it was last taken, in the order in which they did."""
    retry_after: float | None = None
    """The shortest that one of these has said."""
    waits_until: float = inf
    """Where it waits: when it is sent once more, if all have refused it; else when it is refused."""
    num_failed_moves: int = 0
    no_move_before: float = 0.0
    """Until then it stays where it is, since a move of it has failed."""
    no_mending_before: float = 0.0
    """Until then it is not moved because of how its replica stands, since it has been."""

    @property
    def num_tokens(self) -> int:
        """Of its prompt and of what its client has got, as far as the fleet was told."""
        return self.request.num_prompt_tokens + self.num_output_tokens

    @property
    def may_begin_again(self) -> bool:
        """Whether another replica may compute what this one has."""
        return self.request.resumes or not self.num_output_tokens


_UNKNOWN = ReplicaLimits(max_model_len=0, max_num_seqs=0, num_blocks=0, block_size=1)
"""Of a replica that has never been ready."""


@dataclass(slots=True)
class Replica:
    """What a fleet knows of one of its replicas."""

    replica_id: ReplicaId
    order: int
    """How many were heard of before it."""
    state: ReplicaState = ReplicaState.STARTING
    why: str = ""
    """Of the state, where there is more to say."""
    number: int = -1
    """The router's, of this life."""
    limits: ReplicaLimits = _UNKNOWN
    load: fleet.ReplicaLoad | None = None
    """As it reported last in this life; None where it has not."""
    no_mending_before: float = 0.0
    """Until then no request is moved away because of how the replica stands."""
    open: dict[str, RoutedRequest] = field(default_factory=dict)
    """By request id, in the order in which they were sent here."""
    num_sent: int = 0
    """Requests that it was sent in this life."""
    num_lives: int = 0
    """Times that it got ready."""
    drains_until: float = inf
    restarts: bool = False
    """Whether it is started again once it has drained."""
    starts: float | None = None
    """When its start was asked for; None where nobody asked, or it has started."""
    deaths: deque[float] = field(default_factory=deque)
    """Those within the window."""

    @property
    def num_queued_tokens(self) -> int:
        """Of the requests that have had no token here."""
        return sum(each.num_tokens for each in self.open.values() if not each.has_started)

    @property
    def num_streams(self) -> int:
        """Requests that have had some."""
        return sum(each.has_started for each in self.open.values())

    @property
    def is_coming(self) -> bool:
        """Whether it is about to get ready."""
        return self.state is ReplicaState.STARTING or (self.state is ReplicaState.DRAINING and self.restarts)

    def view(self) -> fleet.ReplicaView:
        """Return how it stands, without what whoever runs its process knows of it."""
        return fleet.ReplicaView(
            replica=self.replica_id,
            state=self.state.value,
            why=self.why,
            num_lives=self.num_lives,
            num_outstanding=len(self.open),
            num_streaming=self.num_streams,
            limits=self.limits if self.num_lives else None,
        )

    def on_death(self, now: float) -> float | None:
        """Count a death; return the seconds to wait before another start, or None where it stays down."""
        deaths = self.deaths
        deaths.append(now)
        while deaths[0] < now - DEATHS_WINDOW:
            deaths.popleft()
        return None if len(deaths) >= MOST_DEATHS else RESTART_DELAY * 2.0 ** (len(deaths) - 1)


class Membership:
    """The replicas by id, and by the numbers that the router knows them under; and what they have.

    Attributes
    ----------
    open : the requests that have not ended, by id.
    actions : what is to be done; `act` takes more.
    """

    def __init__(self, router: Router, rules: FleetRules) -> None:
        self.router, self.rules = router, rules
        self.open: dict[str, RoutedRequest] = {}
        self.actions: list[FleetAction] = []
        self.act = self.actions.append
        self.replicas: dict[ReplicaId, Replica] = {}
        self.by_number: list[Replica] = []
        """A number is never used twice: a replica that has lost its memory is another one to a router."""
        self.by_state: dict[ReplicaState, dict[ReplicaId, Replica]] = {state: {} for state in ReplicaState}
        self.ready = self.by_state[ReplicaState.READY]
        """Those that take requests."""
        self._fits_all: int | None = 0
        """The longest request that every ready replica takes, tokens; None until somebody asks again."""

    def is_prefill(self, replica: ReplicaId) -> bool:
        """Whether a replica computes prompts for others.

        That is where requests are sent, and not what it can: where one pool is gone, the other does all.
        """
        num_prefill = self.rules.num_prefill
        return num_prefill > 0 and fleet.replica_number(replica) < num_prefill

    def get(self, replica_id: ReplicaId) -> Replica:
        """Return a replica, new or known."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            replica = self.replicas[replica_id] = Replica(replica_id, len(self.replicas))
            self.by_state[replica.state][replica_id] = replica
        return replica

    def change(self, replica: Replica, state: ReplicaState, why: str = "") -> None:
        """Let a replica be in another state, or in the same one for another reason."""
        del self.by_state[replica.state][replica.replica_id]
        self.by_state[state][replica.replica_id] = replica
        replica.state, replica.why = state, why
        self._fits_all = None

    def enter(self, replica: Replica, limits: ReplicaLimits) -> None:
        """Make a replica ready, under a new number."""
        replica.limits = limits
        self.change(replica, ReplicaState.READY)
        replica.number, replica.load, replica.num_sent = len(self.by_number), None, 0
        self.by_number.append(replica)
        replica.num_lives += 1
        replica.drains_until, replica.restarts = inf, False

    def having(self, *states: ReplicaState) -> list[Replica]:
        """Return the replicas in some states, in the order in which they were first heard of."""
        found = [each for state in states for each in self.by_state[state].values()]
        return sorted(found, key=attrgetter("order"))

    @property
    def is_one_coming(self) -> bool:
        """Whether a replica is about to get ready."""
        states = (ReplicaState.STARTING, ReplicaState.DRAINING)
        return any(each.is_coming for state in states for each in self.by_state[state].values())

    def expected(self) -> list[Replica]:
        """Return the replicas that serve or will."""
        live = self.having(ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING)
        return [each for each in live if each.state is ReplicaState.READY or each.is_coming]

    def excluded_for(self, open_request: RoutedRequest) -> Collection[int]:
        """Return the numbers of ready replicas that a request must not go to."""
        request = open_request.request
        num_tokens = request.num_prompt_tokens + request.max_tokens
        if self._fits_all is None:
            self._fits_all = min((each.limits.max_model_len for each in self.ready.values()), default=0)
        fits_all = num_tokens <= self._fits_all
        if fits_all and not open_request.refused_by:
            return NONE_EXCLUDED
        excluded = {self.replicas[each].number for each in open_request.refused_by}
        return excluded if fits_all else excluded.union(self.too_long_for(request))

    def too_long_for(self, request: RoutingRequest) -> list[int]:
        """Return the numbers of ready replicas that a request does not fit, of those that differ in that.

        Where it fits none with all the tokens that it may have, not even one that is coming back, the
        replicas of the greatest length remain: there it ends when they are full. Where its prompt does not
        fit these, none remains.
        """
        least = request.num_prompt_tokens + min(request.num_output_tokens + 1, request.max_tokens)
        most = request.num_prompt_tokens + request.max_tokens
        longest = max((each.limits.max_model_len for each in self.expected()), default=0)
        needed = most if longest >= most else max(longest, least)
        return [each.number for each in self.having(ReplicaState.READY) if each.limits.max_model_len < needed]


def deadline(open_request: RoutedRequest) -> tuple[float, float]:
    """Return the order in which requests are sent elsewhere."""
    return open_request.request.ttft_deadline, open_request.request.arrival


def least(first: float | None, second: float | None) -> float | None:
    """Return the least of what is known."""
    return min((each for each in (first, second) if each is not None), default=None)


def check_count(num_replicas: int) -> None:
    """Raise ConfigError unless a fleet can have so many replicas."""
    if not 0 <= num_replicas <= fleet.MOST_REPLICAS:
        raise ConfigError(f"a fleet cannot have {num_replicas} replicas; give 0 to {fleet.MOST_REPLICAS}")
