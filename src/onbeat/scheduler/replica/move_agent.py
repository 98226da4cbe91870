"""The steps of moves at one replica, live or virtual: their order, who waits, and what is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol

from onbeat.core.errors import KVUnavailable, RequestRejected
from onbeat.core.handover import Detached, LentT, MoveTask, MoveVerb, TaskAnswer
from onbeat.core.request import Request

_MOST_ADOPTED = 64
"""Moves that may still be taken back; that comes within a second of the adoption."""
_UNANSWERED = (MoveVerb.TAKE, MoveVerb.REATTACH, MoveVerb.UNHOLD, MoveVerb.RELEASE)


@dataclass(frozen=True, slots=True)
class Departure(Generic[LentT]):
    """What became of a request that was to leave its batch."""

    request_id: str
    detached: Detached | None
    """None: it has not left; it has ended, or waits."""
    source: LentT | None
    """Where its KV is, the last block included; it is lent until the request is freed or put back."""


class KVPort(Protocol[LentT]):
    """The KV of one replica, and the requests that come and go with theirs.

    `LentT` is what another replica has to know to copy blocks. Calls come between two steps.
    """

    def num_full_tokens(self, request_id: str, /) -> int:
        """Return the tokens of the blocks of a request that `hold` would lend by now."""

    def hold(self, request_id: str, /) -> LentT | None:
        """Lend the full blocks of a request; None where it has none. Raises KVUnavailable."""

    def summed(self, source: LentT, /) -> Future[LentT]:
        """Return what is lent once others may copy it."""

    def unhold(self, request_id: str, /) -> None:
        """Lend it no longer."""

    def detach(self, request_id: str, /) -> None:
        """Take a request out of the batch at the end of the steps under way; `take_departures` answers."""

    def take_departures(self) -> list[Departure[LentT]]:
        """Return what became of those who were to leave since the last call."""

    def reattach(self, request_id: str, /) -> bool:
        """Let a request go on that has left; False where there is none."""

    def free(self, request_id: str, /) -> None:
        """Forget a request that has left, and lend its KV no longer."""

    def reserve(self, move: str, num_tokens: int, /) -> bool:
        """Keep a slot and blocks, or more of them; False where they lack."""

    def pull(self, move: str, source: LentT, first_block: int, /) -> Future[int]:
        """Copy lent blocks, from one of them on, into those that are kept; return the bytes, once copied."""

    def adopt(self, move: str, request: Request, detached: Detached, /) -> None:
        """Go on with a request whose KV has been copied. Raises KVUnavailable, RequestRejected."""

    def release(self, move: str, /) -> None:
        """Give a reservation back, once no copy writes there."""


@dataclass(slots=True)
class _Leaver(Generic[LentT]):
    """A request that is to leave the batch with the step under way, or has left."""

    departure: Departure[LentT] | None = None
    """What became of it, once it has left: it stands still."""
    move: str = ""
    """The move that waits for it to leave."""
    is_to_stay: bool = False
    """Whether it is put back as soon as it has left, unless a move waits for it."""


class MoveAgent(Generic[LentT]):
    """Does at a replica what its fleet asks for.

    A request leaves its batch once the step under way is back: it may be asked for, or told to go on, before
    it has. What is lent of a prompt is answered once so much of it has been computed.

    Parameters
    ----------
    port : the replica's KV and requests; None where nothing is handed over, and all is refused.
    answer : takes answers.
    ring : called when a copy has ended, or may begin, maybe by another thread; `look` is wanted then.
    """

    def __init__(
        self,
        port: KVPort[LentT] | None,
        *,
        answer: Callable[[TaskAnswer[LentT]], None],
        ring: Callable[[], None],
    ) -> None:
        self._port = port
        self._answer = answer
        self._ring = ring
        self._pulls: dict[str, Future[int]] = {}
        """By move."""
        self._loans: dict[str, tuple[MoveVerb, Detached | None, Future[LentT]]] = {}
        """Move -> what is to be answered once what is lent may be copied."""
        self._to_stop: set[str] = set()
        """Requests that are to stand still after their first token."""
        self.leavers: dict[str, _Leaver[LentT]] = {}
        """Requests that leave the batch, or have left it."""
        self._adopted: dict[str, str] = {}
        """Move -> request."""
        self._awaited: dict[str, MoveTask[LentT]] = {}
        """Request whose prompt is being computed -> what is asked for once there is more of it."""

    def take(self, task: MoveTask[LentT]) -> list[str]:
        """Do a step of a move; return the requests that are to be dropped."""
        port = self._port
        if port is None:
            if task.verb not in _UNANSWERED:
                self._refuse(task, "this engine does not hand KV over")
            return []
        if task.verb is MoveVerb.RELEASE:
            return self._release(port, task.move)
        try:
            self._do(port, task)
        except (KVUnavailable, RequestRejected) as error:
            self._refuse(task, str(error))
        return []

    def stop_after_first(self, request_id: str) -> None:
        """Let a request that is new stand still after its first token, until it is moved or put back."""
        if self._port is not None:
            self._to_stop.add(request_id)

    @property
    def waits_for_first_tokens(self) -> bool:
        """Whether `on_first_token` is to be told of any."""
        return bool(self._to_stop)

    def on_first_token(self, request_id: str, *, is_finished: bool) -> bool:
        """Hear of a first token, before the next step is planned; return whether its request leaves now."""
        if request_id not in self._to_stop:
            return False
        self._to_stop.discard(request_id)
        if is_finished:
            return False
        assert self._port is not None
        self.leavers[request_id] = _Leaver()
        self._port.detach(request_id)
        return True

    def forget(self, request_ids: Iterable[str]) -> None:
        """Hear of requests that are aborted; who waits for one that is leaving is still answered."""
        for request_id in request_ids:
            self._to_stop.discard(request_id)
            self._put_back(request_id)

    def look(self) -> None:
        """Answer what is done by now; after each step, and when rung."""
        self.look_at_copies()
        if self._port is not None:
            self._look_at_batch(self._port)

    def look_at_copies(self) -> None:
        """Answer for copies that have ended, and for what may be copied by now."""
        for move in [move for move, pull in self._pulls.items() if pull.done()]:
            self._end_pull(move, self._pulls.pop(move))
        for move in [move for move, (*_, source) in self._loans.items() if source.done()]:
            verb, detached, lent = self._loans.pop(move)
            self._answer(TaskAnswer(move, verb, ok=True, source=lent.result(), detached=detached))

    def _look_at_batch(self, port: KVPort[LentT]) -> None:
        """Answer for requests that have left, and for prompts of which there is enough by now."""
        gone: list[tuple[str, Departure[LentT]]] = []
        for departure in port.take_departures():
            request_id = departure.request_id
            leaver = self.leavers.pop(request_id, None) or _Leaver()
            if leaver.move:
                gone.append((leaver.move, departure))
            elif leaver.is_to_stay:
                port.reattach(request_id)
            else:
                leaver.departure, self.leavers[request_id] = departure, leaver
        for move, departure in gone:
            self._answer_freeze(port, move, departure)
        for task in list(self._awaited.values()):
            self._hold(port, task)

    # --- one step -------------------------------------------------------------------------------------

    def _do(self, port: KVPort[LentT], task: MoveTask[LentT]) -> None:
        match task.verb:
            case MoveVerb.RESERVE:
                is_kept = port.reserve(task.move, task.num_tokens)
                self._answer(TaskAnswer(task.move, task.verb, is_kept, why="" if is_kept else "no capacity"))
            case MoveVerb.PULL:
                assert task.source is not None
                pull = self._pulls[task.move] = port.pull(task.move, task.source, task.first_block)
                pull.add_done_callback(lambda _: self._ring())
            case MoveVerb.ADOPT:
                self._adopt(port, task)
            case MoveVerb.HOLD:
                self._hold(port, task)
            case MoveVerb.FREEZE:
                self._freeze(port, task)
            case MoveVerb.TAKE:
                port.free(task.request_id)
            case _:
                self._put_back(task.request_id)
                if task.verb is MoveVerb.REATTACH:
                    port.reattach(task.request_id)
                port.unhold(task.request_id)

    def _hold(self, port: KVPort[LentT], task: MoveTask[LentT]) -> None:
        """Lend what is full, once that is as much as was asked for."""
        if port.num_full_tokens(task.request_id) < task.num_tokens:
            self._awaited[task.request_id] = task
            return
        self._awaited.pop(task.request_id, None)
        try:
            source = port.hold(task.request_id)
        except KVUnavailable as error:
            self._refuse(task, str(error))
        else:
            if source is None:
                self._answer(TaskAnswer(task.move, task.verb, ok=False))
            else:
                self._lend(port, task.move, task.verb, source)

    def _freeze(self, port: KVPort[LentT], task: MoveTask[LentT]) -> None:
        """Take a request out of the batch for a move, unless it leaves or has left already."""
        request_id = task.request_id
        self._awaited.pop(request_id, None)
        leaver = self.leavers.get(request_id)
        if leaver is None:
            self.leavers[request_id] = _Leaver(move=task.move)
            port.detach(request_id)
        elif leaver.departure is None:
            leaver.move = task.move
        else:
            del self.leavers[request_id]
            self._answer_freeze(port, task.move, leaver.departure)
        self._look_at_batch(port)

    def _put_back(self, request_id: str) -> None:
        """Let a request not stand still any more; one that has left is put back by whoever says this."""
        self._awaited.pop(request_id, None)
        leaver = self.leavers.get(request_id)
        if leaver is not None and leaver.departure is None:
            leaver.is_to_stay = True
        elif leaver is not None:
            del self.leavers[request_id]

    def _adopt(self, port: KVPort[LentT], task: MoveTask[LentT]) -> None:
        assert task.request is not None
        assert task.detached is not None
        port.adopt(task.move, task.request, task.detached)
        self._adopted[task.move] = task.request.request_id
        if len(self._adopted) > _MOST_ADOPTED:
            del self._adopted[next(iter(self._adopted))]
        self._answer(TaskAnswer(task.move, task.verb, ok=True))

    def _release(self, port: KVPort[LentT], move: str) -> list[str]:
        self._pulls.pop(move, None)
        port.release(move)
        adopted = self._adopted.pop(move, None)
        return [] if adopted is None else [adopted]

    # --- answers --------------------------------------------------------------------------------------

    def _answer_freeze(self, port: KVPort[LentT], move: str, departure: Departure[LentT]) -> None:
        if departure.source is None:
            self._answer(TaskAnswer(move, MoveVerb.FREEZE, ok=False))
        else:
            self._lend(port, move, MoveVerb.FREEZE, departure.source, departure.detached)

    def _lend(
        self, port: KVPort[LentT], move: str, verb: MoveVerb, source: LentT, detached: Detached | None = None
    ) -> None:
        """Answer with what is lent, once others may copy it."""
        summed = port.summed(source)
        self._loans[move] = verb, detached, summed
        summed.add_done_callback(lambda _: self._ring())

    def _end_pull(self, move: str, pull: Future[int]) -> None:
        try:
            num_bytes = pull.result()
        except Exception as error:  # what a copy meets is not to end the engine that waits for it
            self._answer(TaskAnswer(move, MoveVerb.PULL, ok=False, why=str(error)))
        else:
            self._answer(TaskAnswer(move, MoveVerb.PULL, ok=True, num_bytes=num_bytes))

    def _refuse(self, task: MoveTask[LentT], why: str) -> None:
        self._answer(TaskAnswer(task.move, task.verb, ok=False, why=why))
