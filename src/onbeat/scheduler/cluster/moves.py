"""Moves of running requests from replica to replica, with their KV: their stages, as data, and who is asked.

The stages are those of Llumnix (Sun et al., OSDI 2024, section 4.2): a slot and blocks are reserved at the
destination; full blocks are copied while the request runs on; it is frozen, the rest is copied, the
destination adopts it, and the source forgets it. Until the destination has adopted it, the source can go on
with it as if nothing had been.

`MoveExecutor` carries steps to the agents at the replicas, and their answers back, live or simulated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from math import inf
from typing import Generic, TypeVar

from onbeat.core.fleet import ReplicaId
from onbeat.core.handover import Detached, LentT, MoveTask, MoveVerb, TaskAnswer
from onbeat.core.request import Request
from onbeat.scheduler.cluster.events import Answered, FleetAction, MoveStep

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

    PROMPT = "prompt", MoveVerb.HOLD
    """The source is to lend the first blocks of a prompt that it computes."""
    RESERVE = "reserve", MoveVerb.RESERVE
    """The destination is to reserve a slot and blocks."""
    LEND = "lend", MoveVerb.HOLD
    """The source is to lend what is full by now."""
    RESERVE_MORE = "reserve more", MoveVerb.RESERVE
    """The destination is to reserve more: the request has outgrown what it keeps."""
    COPY = "copy", MoveVerb.PULL
    """The destination copies, while the request runs on or its prompt is computed."""
    FREEZE = "freeze", MoveVerb.FREEZE
    """The source is to take the request out of its batch, and to lend all that it has."""
    RESERVE_REST = "reserve for the rest", MoveVerb.RESERVE
    COPY_REST = "copy the rest", MoveVerb.PULL
    ADOPT = "adopt", MoveVerb.ADOPT
    """The destination is to go on with it."""
    NOWHERE = "nowhere", None
    """Nothing is asked for: no replica has capacity."""
    GIVING_UP = "giving up", MoveVerb.FREEZE
    """The freeze could not be taken back: once it is answered the request is put back."""

    def __init__(self, _text: str, verb: MoveVerb | None) -> None:
        self.verb = verb
        """What has been asked for."""


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
    """Where a prompt is computed: what is asked for at the first token, as of one that stands still."""
    unlimited: frozenset[Stage] = frozenset()
    """Stages that may take any time: the request runs on."""
    waits_for_capacity: bool = False
    """Whether it stands still, in stages of `ANSWER_SECONDS` at most, until a replica has capacity."""

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
        verb = self.stage.verb
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


class MoveEnd(StrEnum):
    """How a move has ended."""

    MOVED = "moved"
    NO_CAPACITY = "no_capacity"
    """The destination had none, or no longer."""
    FAILED = "failed"
    """The KV could not be copied or adopted, or that took too long."""
    CANCELLED = "cancelled"
    """The request ended, was preempted, or a replica was lost."""


class Moves:
    """All moves under way; asks for their next steps, and says when one has ended.

    Parameters
    ----------
    act : takes what is to be done.
    on_end : is called once for each move, when the request is at its destination, or stays at its source, or
        has ended. It may begin others.
    on_no_capacity : is called with a move whose destination has no capacity after all, where its request
        waits for some; `try_again` goes on.
    """

    def __init__(
        self,
        act: Callable[[FleetAction], None],
        on_end: Callable[[Move, MoveEnd], None],
        on_no_capacity: Callable[[Move], None],
    ) -> None:
        self._act = act
        self._on_end = on_end
        self._on_no_capacity = on_no_capacity
        self._by_id: dict[str, Move] = {}
        self._by_request: dict[str, Move] = {}
        """Those that may still succeed."""
        self._to: defaultdict[ReplicaId, dict[str, Move]] = defaultdict(dict)
        """Of these, by destination, and by request: each choice asks how many come to each replica."""
        self._from: defaultdict[ReplicaId, dict[str, Move]] = defaultdict(dict)
        """Likewise by source."""
        self._num_begun = 0

    @property
    def next_time(self) -> float:
        """When `on_tick` is wanted at the latest; infinite where never."""
        return min((move.until for move in self._by_id.values()), default=inf)

    def of(self, request_id: str) -> Move | None:
        """Return the move of a request, if it is on one that may succeed."""
        return self._by_request.get(request_id)

    def is_under_way(self, request_id: str) -> bool:
        """Whether a move of a request has not ended, one that is to fail included."""
        return any(move.request_id == request_id for move in self._by_id.values())

    def num_from(self, replica: ReplicaId) -> int:
        """Return how many requests are on their way from a replica, their prompts done."""
        return sum(not move.course.is_ahead for move in self._from[replica].values())

    def num_to(self, replica: ReplicaId) -> int:
        """Return how many requests are on their way to a replica, their prompts done."""
        return sum(not move.course.is_ahead for move in self._to[replica].values())

    def num_coming(self, replica: ReplicaId) -> int:
        """Return how many requests are to go on at a replica, those included that have had no token."""
        return len(self._to[replica])

    def num_blocks_to(self, replica: ReplicaId) -> int:
        """Return the blocks reserved there for requests on their way."""
        return sum(move.num_reserved for move in self._to[replica].values())

    def begin(  # noqa: PLR0913 -- all of them say what the move is
        self,
        request_id: str,
        source: ReplicaId,
        destination: ReplicaId,
        *,
        num_blocks: int,
        why: str,
        now: float,
        course: Course = RUNS,
    ) -> None:
        """Begin to move a request that runs, or will.

        Parameters
        ----------
        num_blocks : that it has, about.
        course : by what the request does at its source.
        """
        assert request_id not in self._by_request, f"{request_id} moves already"
        self._num_begun += 1
        move_id = f"m{self._num_begun}"
        move = Move(move_id, request_id, source, destination, why, num_blocks + GROWTH_BLOCKS, course)
        self._by_id[move_id] = self._by_request[request_id] = move
        self._to[destination][request_id] = self._from[source][request_id] = move
        self._ask(move, course.first, now)

    def on_first_token(self, request_id: str, now: float) -> bool:
        """Hear that a request stands still after its first token; return whether it has been on its way."""
        move = self._by_request.get(request_id)
        if move is None:
            return False
        assert move.course.on_first_token is not None, f"{request_id} has had tokens"
        asked_now = move.course.on_first_token.get(move.stage)
        move.course, move.until = STANDS_STILL, now + STILL_SECONDS
        if asked_now is not None:
            self._ask(move, asked_now, now)
        return True

    def try_again(self, move: Move, destination: ReplicaId, *, num_blocks: int, now: float) -> None:
        """Ask another destination for capacity, or the same one later."""
        move.destination, move.num_reserved = destination, num_blocks + GROWTH_BLOCKS
        self._to[destination][move.request_id] = move
        self._ask(move, Stage.RESERVE, now)

    def stay(self, move: Move) -> None:
        """Let a request go on at its source that stands still until a replica has capacity: none will."""
        self._stay(move, MoveEnd.NO_CAPACITY)

    def on_answer(self, event: Answered, now: float) -> None:
        """Hear what came of a step; an answer that nobody waits for is ignored."""
        move = self._by_id.get(event.move)
        if move is None or event.verb != move.stage.verb:
            return
        if move.stage is Stage.GIVING_UP:
            self._forget(move)
            self._tell(move, MoveVerb.REATTACH if event.ok else MoveVerb.UNHOLD, move.source)
        elif not event.ok:
            self._on_refusal(move)
        elif move.stage is Stage.ADOPT:
            self._forget(move)
            self._tell(move, MoveVerb.TAKE, move.destination)
            self._end(move, MoveEnd.MOVED)
        else:
            self._ask(move, move.done(event.num_blocks), now)

    def on_lost(self, replica: ReplicaId) -> None:
        """Hear that a replica is gone; what has not arrived elsewhere is gone with its source."""
        for move in list(self._by_id.values()):
            if move.source == replica:
                self._give_up(move)
            elif move.destination == replica and move.stage is not Stage.GIVING_UP:
                self._stay(move, MoveEnd.CANCELLED)

    def on_tick(self, now: float) -> None:
        """Give up what has taken too long."""
        for move in list(self._by_id.values()):
            if move.until <= now:
                self._stay(move, MoveEnd.FAILED)

    def on_leave(self, replica: ReplicaId) -> None:
        """Hear that a replica takes nothing new: what was to go there stays where it is."""
        for move in list(self._by_request.values()):
            if move.destination == replica:
                self._stay(move, MoveEnd.CANCELLED)

    def drop(self, request_id: str) -> None:
        """Hear that a request has left its source: it has ended, was taken back, or its replica is gone."""
        move = self._by_request.get(request_id)
        if move is not None:
            self._give_up(move)

    # --- one move -------------------------------------------------------------------------------------

    def _on_refusal(self, move: Move) -> None:
        """Let a request stay whose move has met with a refusal."""
        match move.stage.verb:
            case MoveVerb.RESERVE if move.course.waits_for_capacity and move.stage is Stage.RESERVE:
                del self._to[move.destination][move.request_id]
                move.stage, move.until = Stage.NOWHERE, inf
                move.destination, move.num_reserved = "", 0
                self._on_no_capacity(move)
            case MoveVerb.RESERVE:
                self._stay(move, MoveEnd.NO_CAPACITY)
            case MoveVerb.HOLD | MoveVerb.FREEZE:  # it has ended there, or waits
                self._give_up(move)
            case _:
                self._stay(move, MoveEnd.FAILED)

    def _ask(self, move: Move, stage: Stage, now: float) -> None:
        move.enter(stage, now)
        verb = stage.verb
        assert verb is not None
        at_source = verb in (MoveVerb.HOLD, MoveVerb.FREEZE)
        self._tell(move, verb, move.source if at_source else move.destination)

    def _give_up(self, move: Move) -> None:
        """Let a move be over whose request is not at its source any more, or does not run there."""
        self._forget(move)
        if move.stage is not Stage.GIVING_UP and move.destination:
            self._tell(move, MoveVerb.RELEASE, move.destination)
        self._tell(move, MoveVerb.UNHOLD, move.source)
        self._end(move, MoveEnd.CANCELLED)

    def _stay(self, move: Move, outcome: MoveEnd) -> None:
        """Let a request go on at its source."""
        if move.destination:
            self._tell(move, MoveVerb.RELEASE, move.destination)
        if move.stage is Stage.FREEZE:
            move.stage, move.until = Stage.GIVING_UP, inf
        else:
            self._forget(move)
            self._tell(move, MoveVerb.REATTACH if move.stands_still else MoveVerb.UNHOLD, move.source)
        self._end(move, outcome)

    def _forget(self, move: Move) -> None:
        self._by_id.pop(move.move_id, None)

    def _end(self, move: Move, outcome: MoveEnd) -> None:
        if self._by_request.get(move.request_id) is move:
            del self._by_request[move.request_id]
            self._to[move.destination].pop(move.request_id, None)
            del self._from[move.source][move.request_id]
            self._on_end(move, outcome)

    def _tell(self, move: Move, verb: MoveVerb, replica: ReplicaId) -> None:
        num_blocks, why = 0, ""
        if verb is MoveVerb.RESERVE:
            num_blocks = move.num_reserved
            why = "" if move.num_held else move.why
        elif verb is MoveVerb.HOLD and move.course.is_ahead:
            num_blocks = move.num_held + 1
            why = "" if move.num_held else move.why
        elif verb is MoveVerb.PULL:
            num_blocks = move.num_copied
        self._act(MoveStep(replica, move.move_id, move.request_id, verb, num_blocks, why))


RequestT = TypeVar("RequestT")
"""What a fleet's owner knows a request by."""


@dataclass(slots=True)
class OpenMove(Generic[RequestT, LentT]):
    """A move under way, with what one replica has to know of the other."""

    request: RequestT
    source: ReplicaId
    name: str
    """Under which the source has the request."""
    why: str
    lent: LentT | None = None
    """By the source."""
    detached: Detached | None = None
    adopted: str = ""
    """Under which the destination has it, or will."""


class MoveExecutor(ABC, Generic[RequestT, LentT]):
    """The moves under way. Whoever has the replicas knows where requests are, and reaches the agents.

    Attributes
    ----------
    moves : by their ids, until the source may forget them.
    """

    def __init__(self) -> None:
        self.moves: dict[str, OpenMove[RequestT, LentT]] = {}

    @abstractmethod
    def send(self, replica: ReplicaId, task: MoveTask[LentT]) -> None:
        """Let the agent at a replica take a task; it is lost with the replica."""

    @abstractmethod
    def tell(self, event: Answered) -> None:
        """Tell the fleet what happened."""

    @abstractmethod
    def num_tokens_in(self, replica: ReplicaId, num_blocks: int) -> int:
        """Return the tokens of a request that holds so many of a replica's blocks."""

    @abstractmethod
    def whereabouts(self, request: RequestT) -> tuple[ReplicaId, str]:
        """Return the replica that has a request, and the name under which it does."""

    @abstractmethod
    def adoption(
        self, move_id: str, move: OpenMove[RequestT, LentT], destination: ReplicaId
    ) -> tuple[Request, Detached] | None:
        """Return a request as its destination is to go on with it; None where it must not."""

    @abstractmethod
    def hand_over(self, move: OpenMove[RequestT, LentT], destination: ReplicaId) -> None:
        """Let a request be its destination's from now on."""

    def do(self, step: MoveStep, request: RequestT | None) -> None:
        """Carry out a step of the move of a request; None where that has ended."""
        verb = step.verb
        move = self.moves.get(step.move)
        if move is None and verb in (MoveVerb.RESERVE, MoveVerb.HOLD):
            assert request is not None
            move = self.moves[step.move] = OpenMove(request, *self.whereabouts(request), step.why)
        if move is None:
            if not step.move and request is not None:  # one that stands still and is not moved
                self.send(step.replica, MoveTask("", verb, self.whereabouts(request)[1]))
            return
        task = self._task(step, move)
        if task is None:
            self.tell(Answered(step.replica, step.move, verb, ok=False))
            return
        self.send(move.source if verb is MoveVerb.TAKE else step.replica, task)
        if verb in (MoveVerb.TAKE, MoveVerb.UNHOLD, MoveVerb.REATTACH):
            del self.moves[step.move]
        if verb is MoveVerb.TAKE:
            self.hand_over(move, step.replica)

    def _task(self, step: MoveStep, move: OpenMove[RequestT, LentT]) -> MoveTask[LentT] | None:
        """Return what an agent is asked for, with what it has to know; None where that must not be done."""
        task: MoveTask[LentT] = MoveTask(step.move, step.verb, move.name)
        match step.verb:
            case MoveVerb.RESERVE | MoveVerb.HOLD:
                task.num_tokens = self.num_tokens_in(step.replica, step.num_blocks)
            case MoveVerb.PULL:
                task.source, task.first_block = move.lent, step.num_blocks
            case MoveVerb.ADOPT:
                adoption = self.adoption(step.move, move, step.replica)
                if adoption is None:
                    return None
                task.request, task.detached = adoption
                move.adopted = task.request.request_id
        return task

    def on_answer(self, replica: ReplicaId, answer: TaskAnswer[LentT]) -> None:
        """Take what the agent at a replica says of a task."""
        move = self.moves.get(answer.move)
        if move is None:
            return
        if answer.source is not None:
            move.lent = answer.source
        if answer.detached is not None:
            move.detached = answer.detached
        num_blocks = 0 if answer.source is None else len(answer.source.block_ids)
        self.tell(Answered(replica, answer.move, answer.verb, answer.ok, num_blocks))
