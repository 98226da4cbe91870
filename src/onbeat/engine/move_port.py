"""Where an engine is asked for the steps of moves, and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future

from onbeat.core.errors import KVUnavailable, RequestRejected
from onbeat.core.handover import Detached, MoveVerb
from onbeat.core.request import RequestOutput
from onbeat.engine.kv_handover import Departure, KVHandover
from onbeat.engine.kv_transfer.source import KVSource
from onbeat.engine.messages import AskMove, MoveAnswer
from onbeat.scheduler.replica.departures import Departures

_MOST_ADOPTED = 64
"""Moves that may still be taken back; that comes within a second of the adoption."""
_UNANSWERED = (MoveVerb.TAKE, MoveVerb.REATTACH, MoveVerb.UNHOLD, MoveVerb.RELEASE)


class MovePort:
    """Carries out what a fleet asks for. Used by the step loop's thread only, between steps.

    Parameters
    ----------
    kv : the engine's hand-over; None where it has none, and all is refused.
    answer : sends an answer.
    ring : wakes the step loop; called by other threads.
    """

    def __init__(
        self, kv: KVHandover | None, *, answer: Callable[[MoveAnswer], None], ring: Callable[[], None]
    ) -> None:
        self._kv = kv
        self._answer = answer
        self._ring = ring
        self._pulls: dict[str, Future[int]] = {}
        """By move."""
        self._lendings: dict[str, tuple[MoveVerb, Detached | None, Future[KVSource]]] = {}
        """Move -> what is to be answered once the blocks that are lent have checksums."""
        self._departures: Departures[Departure] = Departures()
        self._adopted: dict[str, str] = {}
        """Move -> request."""
        self._awaited: dict[str, AskMove] = {}
        """Request whose prompt is being computed -> what is asked for once there is more of it."""

    def take(self, message: AskMove) -> list[str]:
        """Do a step of a move; return the requests that are to be dropped."""
        if self._kv is None:
            if message.verb not in _UNANSWERED:
                self._refuse(message, "this engine does not hand KV over")
            return []
        try:
            return self._do(self._kv, message)
        except (KVUnavailable, RequestRejected) as error:
            self._refuse(message, str(error))
            return []

    def stop_after_first(self, request_id: str) -> None:
        """Let a request that is new stand still after its first token, until it is moved or put back."""
        if self._kv is not None:
            self._departures.stop_after_first(request_id)

    def on_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        """Hear what requests are sent, before the next step is planned."""
        if self._kv is None or not self._departures.is_any_to_stop:
            return
        for output in outputs:
            is_finished = output.finish_reason is not None
            if (output.new_token_ids or is_finished) and self._departures.on_first_token(
                output.request_id, is_finished=is_finished
            ):
                self._kv.detach(output.request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Hear of requests that are aborted."""
        for request_id in request_ids:
            self._departures.forget(request_id)
            self._awaited.pop(request_id, None)

    def look(self) -> None:
        """Answer what is done by now: copies, and requests that have left; after each step, and when rung."""
        for move in [move for move, pull in self._pulls.items() if pull.done()]:
            self._end_pull(move, self._pulls.pop(move))
        for move in [move for move, (*_, source) in self._lendings.items() if source.done()]:
            verb, detached, lent = self._lendings.pop(move)
            self._answer(MoveAnswer(move, verb, ok=True, source=lent.result(), detached=detached))
        if self._kv is not None:
            self._look_who_left(self._kv)
            for message in list(self._awaited.values()):
                self._hold(self._kv, message)

    def _look_who_left(self, kv: KVHandover) -> None:
        for departure in kv.take_departures():
            self._departures.on_left(departure)
        for request_id in self._departures.take_to_put_back():
            kv.reattach(request_id)
        for move, departure in self._departures.take_gone():
            if departure.source is None:
                self._answer(MoveAnswer(move, MoveVerb.FREEZE, ok=False))
            else:
                self._lend(kv, move, MoveVerb.FREEZE, departure.source, departure.detached)

    def _do(self, kv: KVHandover, message: AskMove) -> list[str]:
        match message.verb:
            case MoveVerb.RESERVE | MoveVerb.PULL | MoveVerb.ADOPT:
                self._do_at_destination(kv, message)
            case MoveVerb.HOLD | MoveVerb.FREEZE:
                self._do_at_source(kv, message)
            case MoveVerb.TAKE:
                kv.free(message.request_id)
            case MoveVerb.RELEASE:
                return self._release(kv, message.move)
            case _:
                self._departures.go_on(message.request_id)
                self._awaited.pop(message.request_id, None)
                if message.verb is MoveVerb.REATTACH:
                    kv.reattach(message.request_id)
                kv.unhold(message.request_id)
        return []

    def _do_at_destination(self, kv: KVHandover, message: AskMove) -> None:
        move = message.move
        match message.verb:
            case MoveVerb.RESERVE:
                has_room = kv.reserve(move, message.num_tokens)
                self._answer(MoveAnswer(move, message.verb, has_room, why="" if has_room else "no room"))
            case MoveVerb.PULL:
                assert message.source is not None
                pull = self._pulls[move] = kv.pull(move, message.source, message.first_block)
                pull.add_done_callback(lambda _: self._ring())
            case MoveVerb.ADOPT:
                assert message.request is not None
                assert message.detached is not None
                kv.adopt(move, message.request, message.detached)
                self._adopted[move] = message.request.request_id
                if len(self._adopted) > _MOST_ADOPTED:
                    del self._adopted[next(iter(self._adopted))]
                self._answer(MoveAnswer(move, message.verb, ok=True))

    def _do_at_source(self, kv: KVHandover, message: AskMove) -> None:
        if message.verb is MoveVerb.HOLD:
            self._hold(kv, message)
        else:
            self._awaited.pop(message.request_id, None)
            if self._departures.ask(message.request_id, message.move):
                kv.detach(message.request_id)
            self._look_who_left(kv)

    def _hold(self, kv: KVHandover, message: AskMove) -> None:
        """Lend what is full, once that is as much as was asked for."""
        if kv.num_full_tokens(message.request_id) < message.num_tokens:
            self._awaited[message.request_id] = message
            return
        self._awaited.pop(message.request_id, None)
        try:
            source = kv.hold(message.request_id)
        except KVUnavailable as error:
            self._refuse(message, str(error))
        else:
            if source is None:
                self._answer(MoveAnswer(message.move, message.verb, ok=False))
            else:
                self._lend(kv, message.move, message.verb, source)

    def _lend(
        self, kv: KVHandover, move: str, verb: MoveVerb, source: KVSource, detached: Detached | None = None
    ) -> None:
        """Answer with what is lent, once it has checksums."""
        summed = kv.summed(source)
        self._lendings[move] = verb, detached, summed
        summed.add_done_callback(lambda _: self._ring())

    def _release(self, kv: KVHandover, move: str) -> list[str]:
        self._pulls.pop(move, None)
        kv.release(move)
        adopted = self._adopted.pop(move, None)
        return [] if adopted is None else [adopted]

    def _end_pull(self, move: str, pull: Future[int]) -> None:
        try:
            num_bytes = pull.result()
        except (KVUnavailable, CancelledError) as error:
            self._answer(MoveAnswer(move, MoveVerb.PULL, ok=False, why=str(error)))
        else:
            self._answer(MoveAnswer(move, MoveVerb.PULL, ok=True, num_bytes=num_bytes))

    def _refuse(self, message: AskMove, why: str) -> None:
        self._answer(MoveAnswer(message.move, message.verb, ok=False, why=why))
