"""What a router is told of a request, what it answers, and what it hears of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.core.hashing import BlockHash
from onbeat.core.request import Request
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.cluster.least_loaded import NONE_EXCLUDED


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a router may know of a request."""

    request_id: str
    block_hashes: Sequence[BlockHash] = ()
    """Of its prompt, first block first; empty where prefixes are not known."""
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    """Most output tokens, those that it has included."""
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
            max_tokens=request.sampling.max_tokens,
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


class RoutingChoice(NamedTuple):
    """Where a request goes."""

    replica: int
    why: str
    """One word: `turn`, `load`, `prefix`, `cost`, or, where no router was asked, `only`."""
    predicted_ttft: float | None = None
    """Seconds from now until the first token, if it comes in its turn; None where nothing predicts."""


class Router(Protocol):
    """Chooses a replica and hears what becomes of the request there.

    Replicas have numbers. Those that it is made with are members at first; others may join at any time, and
    one whose memory is lost is to join under a new number. Each call costs at most O(log replicas), and
    O(blocks) where prefixes are looked at; a change of the members O(replicas).
    """

    ignores_state: bool
    """Whether the choice depends on the requests so far alone, and not on how the replicas get on."""
    reads_reports: bool
    """Whether it goes by what replicas report, which else need not be told."""

    def route(
        self, request: RoutingRequest, now: float = 0.0, excluded: Collection[int] = NONE_EXCLUDED
    ) -> RoutingChoice | None:
        """Return the replica that serves the request; it counts as outstanding there from now on.

        Parameters
        ----------
        excluded : members that may not be chosen. Where no other is left, the answer is None.
        """
        ...

    def take(self, replica: int, request: RoutingRequest) -> None:
        """Hear that a request is outstanding there whose prompt has been computed elsewhere.

        The replica does not count it as one that it was sent (`ReplicaLoad.num_taken`).
        """
        ...

    def num_held(self, request: RoutingRequest) -> Mapping[int, int]:
        """Return how many tokens of a prompt replicas are taken to hold, of those that hold some."""
        ...

    def on_first_token(self, replica: int, request: RoutingRequest) -> None:
        """Hear that its prompt is done."""
        ...

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        """Hear that it ended there, or was taken back."""
        ...

    def on_report(self, replica: int, load: ReplicaLoad, now: float) -> None:
        """Hear how a replica stands."""
        ...

    def least_wait(self, request: RoutingRequest, now: float) -> float | None:
        """Return the seconds until the first token of a request where it is soonest; None if not known."""
        ...

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        """Let a replica be chosen: a new one, or one that has left, with what is outstanding there."""
        ...

    def leave(self, replica: int) -> None:
        """Choose a replica no more; it may still end what it has."""
        ...
