"""Requests that leave their batch to be moved: which stand still after their first token, and who waits."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Left(Protocol):
    """What is told of a request that was to leave its batch, whether it has or not."""

    @property
    def request_id(self) -> str: ...


LeftT = TypeVar("LeftT", bound=Left)


class Departures(Generic[LeftT]):
    """Those of one replica, live or virtual.

    A request leaves its batch once the step under way is back: it may be asked for, or told to go on, before
    it has. Whoever holds this takes requests out of the batch and puts them back, with `Handovers`.
    """

    def __init__(self) -> None:
        self._stopping: set[str] = set()
        """Requests that are to stand still after their first token."""
        self._stopped: dict[str, LeftT | None] = {}
        """Those that do; None until they have left the batch."""
        self._going_on: set[str] = set()
        """Requests that have yet to leave the batch, and are to go on then."""
        self._asked: dict[str, str] = {}
        """Request that is to leave -> the move that waits for it."""
        self._gone: list[tuple[str, LeftT]] = []
        self._to_put_back: list[str] = []

    @property
    def is_any_to_stop(self) -> bool:
        """Whether first tokens are waited for."""
        return bool(self._stopping)

    def stop_after_first(self, request_id: str) -> None:
        """Let a request that is new stand still after its first token, until it is moved or goes on."""
        self._stopping.add(request_id)

    def on_first_token(self, request_id: str, *, is_finished: bool) -> bool:
        """Hear of a first token; return whether its request is to be taken out of the batch now."""
        if request_id not in self._stopping:
            return False
        self._stopping.discard(request_id)
        if not is_finished:
            self._stopped[request_id] = None
        return not is_finished

    def ask(self, request_id: str, move: str) -> bool:
        """Let a move wait for a request; return whether that is to be taken out of the batch now."""
        if request_id not in self._stopped:
            self._asked[request_id] = move
            return True
        left = self._stopped[request_id]
        if left is None:  # it leaves with the step under way
            self._asked[request_id] = move
        else:
            del self._stopped[request_id]
            self._gone.append((move, left))
        return False

    def on_left(self, left: LeftT) -> None:
        """Hear what became of a request that was taken out of the batch."""
        request_id = left.request_id
        is_going_on = request_id in self._going_on
        self._going_on.discard(request_id)
        if request_id in self._asked:
            self._stopped.pop(request_id, None)
            self._gone.append((self._asked.pop(request_id), left))
        elif is_going_on:
            self._to_put_back.append(request_id)
        else:
            self._stopped[request_id] = left

    def take_gone(self) -> list[tuple[str, LeftT]]:
        """Return the moves that have waited for a request, and what became of it, since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def take_to_put_back(self) -> list[str]:
        """Return the requests that have left since the last call, and are to go on here after all."""
        going_on, self._to_put_back = self._to_put_back, []
        return going_on

    def go_on(self, request_id: str) -> None:
        """Let a request not stand still any more; one that has left is put back by whoever says this."""
        if request_id in self._stopped and self._stopped.pop(request_id) is None:
            self._going_on.add(request_id)

    def forget(self, request_id: str) -> None:
        """Hear that a request is gone; what waits for it is still answered."""
        self._stopping.discard(request_id)
        self.go_on(request_id)
