"""The stages of a move of a running request from replica to replica, with its KV, as data.

The stages are those of Llumnix (Sun et al., OSDI 2024, section 4.2): a slot and blocks are reserved at the
destination; full blocks are copied while the request runs on; it is frozen, the rest is copied, the
destination adopts it, and the source forgets it. Until the destination has adopted it, the source can go on
with it as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf

from onbeat.core.fleet import ReplicaId
from onbeat.core.handover import MoveVerb

MOST_LEFT = 4
"""Blocks that are left for the time in which the request stands still; with more, it is copied once more."""
MOST_ROUNDS = 3
"""Copies while the request runs; it outruns further ones, too."""
GROWTH_BLOCKS = 4
"""Reserved beyond what a request has, for what it writes while it is copied."""
ANSWER_SECONDS = 10.0
"""Time for a stage while the request runs on."""
STILL_SECONDS = 1.0
"""Time from the freeze to the adoption: afterwards the source goes on with it."""


class Stage(Enum):
    """Where a move is: what has been asked for and not been answered."""

    PROMPT = "prompt"
    """The source is to lend the first blocks of a prompt that it computes."""
    RESERVE = "reserve"
    """The destination is to reserve a slot and blocks."""
    LEND = "lend"
    """The source is to lend what is full by now."""
    RESERVE_MORE = "reserve more"
    """The destination is to reserve more: the request has outgrown what it keeps."""
    COPY = "copy"
    """The destination copies, while the request runs on or its prompt is computed."""
    FREEZE = "freeze"
    """The source is to take the request out of its batch, and to lend all that it has."""
    RESERVE_REST = "reserve for the rest"
    COPY_REST = "copy the rest"
    ADOPT = "adopt"
    """The destination is to go on with it."""
    NOWHERE = "nowhere"
    """Nothing is asked for: no replica has capacity."""
    GIVING_UP = "giving up"
    """The freeze could not be taken back: once it is answered the request is put back."""


VERBS = {
    Stage.PROMPT: MoveVerb.HOLD,
    Stage.RESERVE: MoveVerb.RESERVE,
    Stage.LEND: MoveVerb.HOLD,
    Stage.RESERVE_MORE: MoveVerb.RESERVE,
    Stage.COPY: MoveVerb.PULL,
    Stage.FREEZE: MoveVerb.FREEZE,
    Stage.RESERVE_REST: MoveVerb.RESERVE,
    Stage.COPY_REST: MoveVerb.PULL,
    Stage.ADOPT: MoveVerb.ADOPT,
    Stage.GIVING_UP: MoveVerb.FREEZE,
}
"""What each stage waits for."""
FROZEN = frozenset((Stage.RESERVE_REST, Stage.COPY_REST, Stage.ADOPT))
"""Stages in which the request has left its batch for this move."""


class Lack(IntEnum):
    """What the destination lacks once a stage is done; the place of the next stage in a row of a table."""

    CAPACITY = 0
    BLOCKS = 1
    """It has capacity for blocks that are worth a copy before the next stage."""
    NOTHING = 2


Table = Mapping[Stage, tuple[Stage | None, Stage | None, Stage]]
"""Stage that is done -> the next one, by what the destination lacks; None where it cannot."""

_REST: Table = {
    Stage.FREEZE: (Stage.RESERVE_REST, Stage.COPY_REST, Stage.ADOPT),
    Stage.RESERVE_REST: (None, Stage.COPY_REST, Stage.ADOPT),
    Stage.COPY_REST: (None, None, Stage.ADOPT),
}


@dataclass(frozen=True, kw_only=True)
class Course:
    """The stages of a move, by what its request does at the source when it begins."""

    first: Stage
    next: Table
    stands_still: bool = False
    """Whether the request has left its batch before anybody asked, after its first token."""
    on_first_token: Mapping[Stage, Stage] | None = None
    """Where the prompt is still computed: what is asked for at the first token, in place of what has been
    asked for. From then on the move goes on as if it had begun with a request that stands still."""
    unlimited: frozenset[Stage] = frozenset()
    """Stages that may take any time: the request runs on."""
    waits_for_capacity: bool = False
    """Whether the request stands still until a replica has capacity, as long as that takes; each stage then
    may take `ANSWER_SECONDS`."""

    @property
    def is_ahead(self) -> bool:
        """Whether the request has had no token yet."""
        return self.on_first_token is not None


RUNS = Course(
    first=Stage.RESERVE,
    next={
        Stage.RESERVE: (None, None, Stage.LEND),
        Stage.LEND: (Stage.RESERVE_MORE, Stage.COPY, Stage.FREEZE),
        Stage.RESERVE_MORE: (None, Stage.COPY, Stage.FREEZE),
        Stage.COPY: (None, None, Stage.LEND),
        **_REST,
    },
    unlimited=frozenset((Stage.FREEZE,)),  # a step may take its time
)
"""Of a request that generates."""
STANDS_STILL = Course(
    first=Stage.RESERVE,
    next={
        Stage.RESERVE: (None, Stage.FREEZE, Stage.FREEZE),
        Stage.RESERVE_MORE: (None, Stage.FREEZE, Stage.FREEZE),
        Stage.COPY: (None, None, Stage.FREEZE),
        **_REST,
    },
    stands_still=True,
)
"""Of one whose prompt alone was to be computed at the source."""


@dataclass(slots=True)
class Move:
    """One move under way."""

    move_id: str
    request_id: str
    source: ReplicaId
    destination: ReplicaId
    """Empty in stage `NOWHERE`."""
    why: str
    num_reserved: int
    """Blocks at the destination."""
    course: Course
    stage: Stage = field(init=False)
    until: float = inf
    """When its stage has taken too long; seconds."""
    num_held: int = 0
    """Blocks that the source lends."""
    num_copied: int = 0
    num_rounds: int = 0

    def __post_init__(self) -> None:
        self.stage = self.course.first

    @property
    def stands_still(self) -> bool:
        """Whether its request is out of the batch."""
        return self.course.stands_still or self.stage in FROZEN

    def enter(self, stage: Stage, now: float) -> None:
        """Begin a stage, and say when it has taken too long."""
        self.stage = stage
        self.num_rounds += stage is Stage.COPY
        if self.course.waits_for_capacity:
            self.until = now + ANSWER_SECONDS
        elif self.stands_still:
            self.until = min(self.until, now + STILL_SECONDS)
        elif stage in self.course.unlimited:
            self.until = inf
        else:
            self.until = now + ANSWER_SECONDS

    def done(self, num_blocks: int) -> Stage:
        """Take note that a stage is done; return the next one.

        Parameters
        ----------
        num_blocks : that the source lends by now, of `hold` and `freeze`.
        """
        lack = Lack.NOTHING
        verb = VERBS[self.stage]
        if verb is MoveVerb.PULL:
            self.num_copied = self.num_held
        elif verb in (MoveVerb.HOLD, MoveVerb.FREEZE):
            self.num_held = num_blocks
            num_needed = num_blocks + (verb is MoveVerb.HOLD)  # it runs on, and fills another one
            if num_needed > self.num_reserved:
                self.num_reserved = num_needed + GROWTH_BLOCKS
                lack = Lack.CAPACITY
        if lack is Lack.NOTHING and self._is_worth_a_copy():
            lack = Lack.BLOCKS
        following = self.course.next[self.stage][lack]
        assert following is not None, f"{self.stage} lacks {lack}"
        return following

    def _is_worth_a_copy(self) -> bool:
        """Whether what is lent and not copied is copied before the next stage."""
        num_left = self.num_held - self.num_copied
        if self.course is RUNS and self.stage is not Stage.FREEZE and self.stage not in FROZEN:
            return num_left > MOST_LEFT and self.num_rounds < MOST_ROUNDS
        return num_left > 0
