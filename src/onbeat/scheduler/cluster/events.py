"""What a fleet hears, and what it wants done: the words between decisions and whoever carries them out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, get_args

from onbeat.core.fleet import ReplicaId, ReplicaLimits, ReplicaLoad
from onbeat.core.handover import MoveVerb
from onbeat.core.hashing import BlockHash
from onbeat.core.request import Request
from onbeat.core.slo import SLO, ShedMode


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a router may know of a request."""

    request_id: str
    block_hashes: Sequence[BlockHash] = ()
    """Of its prompt, first block first; empty where prefixes are not known."""
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    """Most output tokens, those that it has included; 0 where its prompt alone is wanted."""
    num_output_tokens: int = 0
    """That its client has got already, from replicas that are gone; another computes them with the prompt."""
    arrival: float = 0.0
    slo: SLO | None = None
    resumes: bool = True
    """Whether it goes on elsewhere when its replica is lost; else it is refused then."""
    rather_refused: bool = False
    """Whether it is refused where it is predicted to be late; else it is served late."""
    priority: int = 0
    """Lower is earlier; see `Request.priority`."""

    @classmethod
    def of(cls, request: Request, block_hashes: Sequence[BlockHash]) -> RoutingRequest:
        """Return what a router may know of a request.

        Parameters
        ----------
        block_hashes : of its prompt; none where the router does not look at prefixes.
        """
        return cls(
            request.request_id,
            block_hashes,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens if request.pooling is None else 0,
            num_output_tokens=len(request.resumed_token_ids),
            arrival=request.arrival,
            slo=request.slo,
            resumes=request.resumes,
            rather_refused=request.shed is ShedMode.REJECT,
            priority=request.priority,
        )

    @property
    def ttft_objective(self) -> float:
        """Seconds from its arrival to its first token; infinite without objective."""
        return inf if self.slo is None or self.slo.ttft is None else self.slo.ttft

    @property
    def ttft_deadline(self) -> float:
        """When its first token is due, by the clock of `arrival`; infinite without objective."""
        return self.arrival + self.ttft_objective


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request came."""

    request: RoutingRequest


@dataclass(frozen=True, slots=True)
class Delivered:
    """A replica delivered tokens of a request, or its end.

    The first delivery by each replica and the end must be told. Those between may be: the fleet then knows
    better how much of a resumed request has to be computed again.
    """

    replica: ReplicaId
    request_id: str
    num_tokens: int
    """Output tokens since the last delivery that was told."""
    num_cached_tokens: int
    """Prompt tokens that the replica's prefix cache held."""
    is_finished: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A replica would not take a request, or ended it in its queue before its first token."""

    replica: ReplicaId
    request_id: str
    is_for_load: bool
    """Whether another replica may take it: it was refused for the load here, not for what it asks."""
    retry_after: float | None = None
    """Seconds until this replica expects to have capacity."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client of a request went away."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A replica said how it stands."""

    replica: ReplicaId
    load: ReplicaLoad


@dataclass(frozen=True, slots=True)
class Joined:
    """A replica is ready."""

    replica: ReplicaId
    limits: ReplicaLimits


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica ended, hangs, or could not be started; what it runs is gone, and nothing it says counts."""

    replica: ReplicaId
    why: str
    num_taken: int | None = None
    """Requests of this life that it had read, as far as it said: others did not cause its end. None: all."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """A replica is to end: no new requests, and what waits there goes elsewhere."""

    replica: ReplicaId
    seconds: float
    """What runs there may take so long; what is left then goes on elsewhere."""
    restarts: bool = False
    """Whether it is started again afterwards."""


@dataclass(frozen=True, slots=True)
class ScaleAsked:
    """There are to be so many replicas, those that stay down started again included. So a fleet begins."""

    num_replicas: int


@dataclass(frozen=True, slots=True)
class ScalingAsked:
    """The fleet is to say itself from now on how many replicas there are to be, between two numbers."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: wanted at `Fleet.next_time`, and harmless at any other."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A replica did what a step of a move asked it for, or could not."""

    replica: ReplicaId
    move: str
    verb: MoveVerb
    ok: bool
    num_blocks: int = 0
    """That are lent by now; of `hold` and `freeze`."""


FleetEvent = (
    Arrived
    | Delivered
    | Refused
    | Aborted
    | Reported
    | Joined
    | Lost
    | DrainAsked
    | ScaleAsked
    | ScalingAsked
    | Answered
    | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request to a replica; what its client has got already is sent along as its output so far."""

    replica: ReplicaId
    request_id: str
    why: str
    """Of the choice, one word: a label of the metrics."""
    predicted_ttft: float | None = None
    """Seconds; None where nothing predicts."""
    stops: bool = False
    """Whether it stands still after its first token, until it is moved or told to go on (`reattach`)."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take a request back from a replica that it was sent to; its client is not told."""

    replica: ReplicaId
    request_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a request without another token."""

    request_id: str
    reason: str
    """`overloaded`; `unattainable` (it would be late, and rather refused); `no_replica` (none lives or comes
    in time); `too_long` (no replica takes the prompt); `too_many_lives` (replicas died under it, in a row);
    `replica_lost` (it does not go on elsewhere); or `invalid` (refused for what it asks)."""
    retry_after: float | None = None
    """Seconds until the fleet expects to have capacity; None where it cannot say."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a replica, or start it again. What comes of it is told: `Joined`, or `Lost`."""

    replica: ReplicaId
    delay: float = 0.0
    """Seconds to wait before."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End a replica that has nothing left to do, or whatever it still does.

    Its end is not told as a loss: it may be starting again by then.
    """

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class MoveStep:
    """Ask a replica for a step of a move; it is told by `Answered`, up to `adopt`, what came of it."""

    replica: ReplicaId
    move: str
    request_id: str
    verb: MoveVerb
    num_blocks: int = 0
    """Of `reserve`: to keep; of `pull`: copied already; of `hold`: full before it is answered."""
    why: str = ""
    """Of the move, one word, with its first step: `drain`, `prefill`, `memory`, `queue`, or `steps`."""


@dataclass(frozen=True, slots=True)
class Rescale:
    """The fleet has decided on another number of replicas; what it wants done for that comes next."""

    num_replicas: int
    num_before: int
    """Those that served or were starting."""
    why: str
    """One word: `work`, `late` or `spare`, of the policy; `arrival`, where there was none; or `bounds`."""
    share: float | None = None
    """Of the time of those before, what the load of the last minute would take."""
    planned_share: float | None = None
    """Up to which a replica is loaded."""
    late_share: float = 0.0
    """Of the requests of the last minute, those that were not in time, or predicted not to be."""


FleetAction = Send | Withdraw | Refuse | Start | Stop | MoveStep | Rescale


_METHODS = ["do_send", "do_withdraw", "do_refuse", "do_start", "do_stop", "do_move_step", "do_rescale"]
"""Of an executor, for each kind of action."""


class EventDispatcher:
    """Gives a fleet one event after the other.

    What is carried out may itself be an event, such as a replica that refuses what it is sent: it has its
    turn after all that the event before has led to.

    Parameters
    ----------
    on_event : the fleet's.
    executor : carries out what it returns. Each kind of action has its method, such as `do_send`, which is
        given the action and the time.
    """

    def __init__(
        self, on_event: Callable[[FleetEvent, float], Sequence[FleetAction]], executor: object
    ) -> None:
        self._on_event = on_event
        self._events: deque[tuple[FleetEvent, float]] = deque()
        self.is_dispatching = False
        methods = (getattr(executor, name) for name in _METHODS)
        self._calls: dict[type, Callable[[Any, float], None]] = dict(
            zip(get_args(FleetAction), methods, strict=True)
        )

    def dispatch(self, event: FleetEvent, now: float) -> None:
        """Give the fleet an event, and carry out what it decides.

        Parameters
        ----------
        now : seconds, not before that of the last call.
        """
        events, calls = self._events, self._calls
        events.append((event, now))
        if self.is_dispatching:
            return
        self.is_dispatching = True
        try:
            while events:
                event, now = events.popleft()
                for action in self._on_event(event, now):
                    calls[type(action)](action, now)
        finally:
            self.is_dispatching = False
