"""Moves of running requests from replica to replica, with their KV: what comes next at each stage.

The stages are those of Llumnix (Sun et al., OSDI 2024, section 4.2): room is reserved at the destination;
full blocks are copied while the request runs on; it is frozen, the rest is copied, the destination adopts it,
and the source forgets it. Until the destination has adopted it, the source can go on with it as if nothing
had been.

A request that computes its prompt where it will not generate may be on its way from its arrival: what each
chunk has filled is copied while the next one is computed, and what is left once it has its first token (Patel
et al., Splitwise, ISCA 2024, section 4.3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from onbeat.core.fleet import ReplicaId
from onbeat.core.handover import MoveVerb
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


class Outcome(StrEnum):
    """How a move has ended."""

    MOVED = "moved"
    NO_ROOM = "no_room"
    """The destination had none, or no longer."""
    FAILED = "failed"
    """The KV could not be copied or adopted, or that took too long."""
    CANCELLED = "cancelled"
    """The request ended, was preempted, or a replica was lost."""


@dataclass(slots=True)
class Move:
    """One move under way."""

    move_id: str
    request_id: str
    source: ReplicaId
    destination: ReplicaId
    why: str
    num_reserved: int
    """Blocks at the destination."""
    waits_for: MoveVerb = MoveVerb.RESERVE
    """What has been asked for and not been answered."""
    until: float = inf
    """When that has taken too long; seconds."""
    num_held: int = 0
    """Blocks that the source lends."""
    num_copied: int = 0
    num_rounds: int = 0
    is_stopped: bool = False
    """It has stood still since its first token, before anybody asked."""
    is_patient: bool = False
    """It stands still until somebody has room, instead of going on at its source."""
    is_early: bool = False
    """It was begun as the request was sent: its prompt is copied as it is computed."""
    has_room: bool = False
    """Whether the destination has said that it keeps room."""
    is_frozen: bool = False
    is_cancelled: bool = False
    """It waits for the answer to the freeze alone, to put the request back."""

    @property
    def is_ahead(self) -> bool:
        """Whether its request has had no token yet."""
        return self.is_early and not self.is_stopped


class Moves:
    """All moves under way; asks for their next steps, and says when one has ended.

    Parameters
    ----------
    act : takes what is to be done.
    on_end : is called once for each move, when the request is at its destination, or stays at its source, or
        has ended. It may begin others.
    on_no_room : is called with a patient move whose destination has no room after all; `try_again` goes on.
    """

    def __init__(
        self,
        act: Callable[[FleetAction], None],
        on_end: Callable[[Move, Outcome], None],
        on_no_room: Callable[[Move], None],
    ) -> None:
        self._act = act
        self._on_end = on_end
        self._on_no_room = on_no_room
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
        return sum(not move.is_ahead for move in self._from[replica].values())

    def num_to(self, replica: ReplicaId) -> int:
        """Return how many requests are on their way to a replica, their prompts done."""
        return sum(not move.is_ahead for move in self._to[replica].values())

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
        is_stopped: bool = False,
        is_patient: bool = False,
        is_early: bool = False,
    ) -> None:
        """Begin to move a request that runs, or will.

        Parameters
        ----------
        num_blocks : that it has, about.
        is_patient : it stands still until somebody has room.
        is_stopped : it stands still at its source.
        is_early : it has just been sent to its source, where it will stand still after its first token.
        """
        assert request_id not in self._by_request, f"{request_id} moves already"
        self._num_begun += 1
        move_id = f"m{self._num_begun}"
        move = Move(
            move_id,
            request_id,
            source,
            destination,
            why,
            num_blocks + GROWTH_BLOCKS,
            is_stopped=is_stopped,
            is_patient=is_patient,
            is_early=is_early,
        )
        self._by_id[move_id] = self._by_request[request_id] = move
        self._to[destination][request_id] = self._from[source][request_id] = move
        # Room is asked for once there is something to copy: it is no use to a prompt that waits its turn.
        self._ask(move, MoveVerb.HOLD if is_early else MoveVerb.RESERVE, now)

    def on_stop(self, request_id: str, now: float) -> bool:
        """Hear that a request stands still after its first token; return whether it has been on its way."""
        move = self._by_request.get(request_id)
        if move is None:
            return False
        move.is_stopped = True
        if move.waits_for is MoveVerb.HOLD:
            self._ask(move, MoveVerb.FREEZE if move.has_room else MoveVerb.RESERVE, now)
        else:
            move.until = now + STILL_SECONDS
        return True

    def try_again(self, move: Move, destination: ReplicaId, *, num_blocks: int, now: float) -> None:
        """Ask another destination for room, or the same one later."""
        move.destination, move.num_reserved = destination, num_blocks + GROWTH_BLOCKS
        self._to[destination][move.request_id] = move
        self._ask(move, MoveVerb.RESERVE, now)

    def stay(self, move: Move) -> None:
        """Let a request go on at its source that stands still until somebody has room: nobody ever will."""
        self._stay(move, Outcome.NO_ROOM)

    def on_answer(self, event: Answered, now: float) -> None:
        """Hear what came of a step; an answer that nobody waits for is ignored."""
        move = self._by_id.get(event.move)
        if move is None or event.verb != move.waits_for:
            return
        if move.is_cancelled:  # the freeze was asked for and could not be taken back
            self._forget(move)
            self._tell(move, MoveVerb.REATTACH if event.ok else MoveVerb.UNHOLD, move.source)
            return
        if event.ok:
            self._go_on(move, event.num_blocks, now)
        else:
            self._on_refusal(move)

    def on_lost(self, replica: ReplicaId) -> None:
        """Hear that a replica is gone; what has not arrived elsewhere is gone with its source."""
        for move in list(self._by_id.values()):
            if move.source == replica:
                self._give_up(move)
            elif move.destination == replica and not move.is_cancelled:
                self._stay(move, Outcome.CANCELLED)

    def on_tick(self, now: float) -> None:
        """Give up what has taken too long."""
        for move in list(self._by_id.values()):
            if move.until <= now:
                self._stay(move, Outcome.FAILED)

    def on_leave(self, replica: ReplicaId) -> None:
        """Hear that a replica takes nothing new: what was to go there stays where it is."""
        for move in list(self._by_request.values()):
            if move.destination == replica:
                self._stay(move, Outcome.CANCELLED)

    def drop(self, request_id: str) -> None:
        """Hear that a request has left its source: it has ended, was taken back, or its replica is gone."""
        move = self._by_request.get(request_id)
        if move is not None:
            self._give_up(move)

    # --- one move -------------------------------------------------------------------------------------

    def _go_on(self, move: Move, num_blocks: int, now: float) -> None:
        """Ask for what comes after a step that has been done."""
        match move.waits_for:
            case MoveVerb.RESERVE:
                move.has_room = True
                if move.num_held and (move.is_frozen or not move.is_stopped):
                    self._copy(move, now)
                else:
                    self._ask(move, MoveVerb.FREEZE if move.is_stopped else MoveVerb.HOLD, now)
            case MoveVerb.PULL:
                move.num_copied = move.num_held
                if move.is_stopped and not move.is_frozen:
                    self._ask(move, MoveVerb.FREEZE, now)
                else:
                    self._ask(move, MoveVerb.ADOPT if move.is_frozen else MoveVerb.HOLD, now)
            case MoveVerb.ADOPT:
                self._forget(move)
                self._tell(move, MoveVerb.TAKE, move.destination)
                self._end(move, Outcome.MOVED)
            case MoveVerb.FREEZE:
                move.is_frozen = True
                if not move.is_patient:
                    move.until = min(move.until, now + STILL_SECONDS)
                self._on_held(move, num_blocks, num_blocks, now)
            case _:
                self._on_held(move, num_blocks, num_blocks + 1, now)

    def _on_held(self, move: Move, num_blocks: int, num_needed: int, now: float) -> None:
        """Hear how many blocks the source lends by now."""
        move.num_held = num_blocks
        if num_needed > move.num_reserved:
            move.num_reserved = num_needed + GROWTH_BLOCKS
            self._ask(move, MoveVerb.RESERVE, now)
        elif move.has_room:
            self._copy(move, now)
        else:
            self._ask(move, MoveVerb.RESERVE, now)

    def _on_refusal(self, move: Move) -> None:
        """Let a request stay whose move has met with a refusal."""
        match move.waits_for:
            case MoveVerb.RESERVE if move.is_patient and not move.num_held:
                del self._to[move.destination][move.request_id]
                move.destination, move.num_reserved, move.until = "", 0, inf
                self._on_no_room(move)
            case MoveVerb.RESERVE:
                self._stay(move, Outcome.NO_ROOM)
            case MoveVerb.HOLD | MoveVerb.FREEZE:  # it has ended there, or waits
                self._give_up(move)
            case _:
                self._stay(move, Outcome.FAILED)

    def _copy(self, move: Move, now: float) -> None:
        """Copy what has not been copied, or go on without."""
        num_left = move.num_held - move.num_copied
        if move.is_frozen:
            self._ask(move, MoveVerb.PULL if num_left else MoveVerb.ADOPT, now)
        elif move.is_early:
            self._ask(move, MoveVerb.PULL if num_left > 0 else MoveVerb.HOLD, now)
        elif num_left > MOST_LEFT and move.num_rounds < MOST_ROUNDS:
            move.num_rounds += 1
            self._ask(move, MoveVerb.PULL, now)
        else:
            self._ask(move, MoveVerb.FREEZE, now)

    def _ask(self, move: Move, verb: MoveVerb, now: float) -> None:
        move.waits_for = verb
        if move.is_patient:
            move.until = now + ANSWER_SECONDS
        elif move.is_stopped:
            move.until = min(move.until, now + STILL_SECONDS)
        elif verb is MoveVerb.FREEZE or (move.is_early and verb is MoveVerb.HOLD):
            move.until = inf  # a step may take its time, and the request runs on
        elif not move.is_frozen:
            move.until = now + ANSWER_SECONDS
        at_source = verb in (MoveVerb.HOLD, MoveVerb.FREEZE)
        self._tell(move, verb, move.source if at_source else move.destination)

    def _give_up(self, move: Move) -> None:
        """Let a move be over whose request is not at its source any more, or does not run there."""
        self._forget(move)
        if not move.is_cancelled and move.destination:
            self._tell(move, MoveVerb.RELEASE, move.destination)
        self._tell(move, MoveVerb.UNHOLD, move.source)
        self._end(move, Outcome.CANCELLED)

    def _stay(self, move: Move, outcome: Outcome) -> None:
        """Let a request go on at its source."""
        if move.destination:
            self._tell(move, MoveVerb.RELEASE, move.destination)
        if move.waits_for is MoveVerb.FREEZE:
            move.is_cancelled, move.until = True, inf
        else:
            self._forget(move)
            stands_still = move.is_frozen or move.is_stopped
            self._tell(move, MoveVerb.REATTACH if stands_still else MoveVerb.UNHOLD, move.source)
        self._end(move, outcome)

    def _forget(self, move: Move) -> None:
        self._by_id.pop(move.move_id, None)

    def _end(self, move: Move, outcome: Outcome) -> None:
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
        elif verb is MoveVerb.HOLD and move.is_early:
            num_blocks = move.num_held + 1
            why = "" if move.num_held else move.why
        elif verb is MoveVerb.PULL:
            num_blocks = move.num_copied
        self._act(MoveStep(replica, move.move_id, move.request_id, verb, num_blocks, why))
