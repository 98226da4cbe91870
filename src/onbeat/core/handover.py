"""What is told of a stream that goes on in another engine, with the KV that it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from onbeat.core.request import Request


class MoveVerb(StrEnum):
    """A step of a move, as whoever drives it asks replicas for it."""

    RESERVE = "reserve"
    """Destination: reserve a slot and blocks."""
    HOLD = "hold"
    """Source: lend the blocks that are full."""
    PULL = "pull"
    """Destination: copy what is lent and has not been copied."""
    FREEZE = "freeze"
    """Source: take the request out of the batch, and lend all its blocks."""
    ADOPT = "adopt"
    """Destination: go on with it."""
    TAKE = "take"
    """It is the destination's from now on; the source forgets it."""
    REATTACH = "reattach"
    """Source: go on with it after all."""
    UNHOLD = "unhold"
    """Source: lend nothing any more."""
    RELEASE = "release"
    """Destination: give the reservation back, and the request if it has been adopted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDeadlines:
    """How a stream stands with its objectives. Times are seconds of the machine's monotonic clock."""

    ttft_deadline: float
    """Infinite where there is none, as are the next two."""
    tbt: float
    next_deadline: float
    is_best_effort: bool
    is_paced: bool
    first_delivery: float
    """Minus infinity before the first, as is the next."""
    last_delivery: float
    num_late_tokens: int
    num_late_allowed: int | None = None
    """Late tokens with which its objective is still kept; None, of older records: as a new request has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """A request that has left its batch between two steps, with all that another engine needs to go on."""

    request_id: str
    output_token_ids: tuple[int, ...]
    """All of them, those included that it was resumed with."""
    num_kv_tokens: int
    """Leading tokens, of prompt and output, whose KV is there: all but the last, unless its prompt was still
    being computed."""
    block_ids: tuple[int, ...]
    """That hold it."""
    scheduled_time: float
    num_cached_tokens: int
    num_preemptions: int
    deadlines: StreamDeadlines | None = None
    """None where its policy kept none."""

    def moved(self, request: Request) -> Request:
        """Return a request as the engine that goes on with it is asked for it."""
        return replace(
            request, resumed_token_ids=self.output_token_ids, num_external_tokens=self.num_kv_tokens
        )


class Lent(Protocol):
    """What a replica has to know to copy blocks of another one."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Of the replica that lends them, in the order of the request's tokens."""


LentT = TypeVar("LentT", bound=Lent)


@dataclass(slots=True)
class MoveTask(Generic[LentT]):
    """A step of a move, as the agent at a replica is asked for it."""

    move: str
    verb: MoveVerb
    request_id: str
    """Of the source."""
    num_tokens: int = 0
    """Of `reserve`: to reserve for; of `hold`: to be computed before it is answered."""
    source: LentT | None = None
    """Of `pull`."""
    first_block: int = 0
    request: Request | None = None
    """Of `adopt`, as is the next."""
    detached: Detached | None = None


@dataclass(slots=True)
class TaskAnswer(Generic[LentT]):
    """What came of a task, up to `adopt`; of the others nobody is told."""

    move: str
    verb: MoveVerb
    ok: bool
    source: LentT | None = None
    """Of `hold` and `freeze`: what is lent."""
    detached: Detached | None = None
    """Of `freeze`."""
    num_bytes: int = 0
    """Of `pull`."""
    why: str = ""
    """Where it is not ok, if there is more to say."""
