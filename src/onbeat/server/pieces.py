"""JSON that may be long, sent in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onbeat.server.errors import ApiError
from onbeat.server.fair_threads import Turns
from onbeat.server.middleware import context_of
from onbeat.server.unread import SlowReaders

PIECE_BYTES = 2**16
"""What is sent at a time."""
PIECE_VALUES = 2**14
"""Of a list, what is written at a time."""

Piece = bytes | bytearray
_T = TypeVar("_T")


class PiecesResponse(Response):
    """Sends JSON that is there already, a piece at a time, so that others have their turn.

    Parameters
    ----------
    pieces : of one JSON value.
    slow_readers : may end it half sent, where its client does not read; the connection closes then.
    headers : sent along.
    """

    def __init__(
        self, pieces: Sequence[Piece], slow_readers: SlowReaders, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._pieces = pieces
        self._slow_readers = slow_readers
        num_bytes = sum(map(len, pieces))
        about = {"content-type": "application/json", "content-length": str(num_bytes), **(headers or {})}
        self._head = [(name.encode(), value.encode()) for name, value in about.items()]
        self.name = ""
        self.num_unread_bytes = num_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's
        context = context_of(scope)
        self.name = context.request_id
        await send({"type": "http.response.start", "status": 200, "headers": self._head})
        turns = Turns()
        try:
            for body, is_last in _bodies(self._pieces):
                # The last one says so: whoever has the announced length may ask again at once.
                sending = send({"type": "http.response.body", "body": body, "more_body": not is_last})
                await self._slow_readers.sent(self, sending)
                self.num_unread_bytes -= len(body)
                await turns.rest()
        except ApiError as error:  # half of it is out: only that the connection closes tells the client
            context.error_code = error.code


def _bodies(pieces: Sequence[Piece]) -> Iterator[tuple[bytes, bool]]:
    """Yield the same bytes in pieces that are quickly sent, and not many of them; and which is the last."""
    gathered = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), PIECE_BYTES):
            if len(gathered) >= PIECE_BYTES:
                yield bytes(gathered), False
                gathered.clear()
            gathered += memoryview(piece)[start : start + PIECE_BYTES]
    yield bytes(gathered), True


def json_inside(value: str | Sequence[Any]) -> bytes:
    """Return what stands between the quotes of a text in JSON, or between the brackets of a list."""
    return orjson.dumps(value)[1:-1]


def list_in_pieces(
    values: Sequence[_T], inside: Callable[[Sequence[_T]], bytes] = json_inside
) -> Iterator[bytes]:
    """Yield the JSON of a list, given how the inside of a part of it is written."""
    yield b"["
    for start in range(0, len(values), PIECE_VALUES):
        if start:
            yield b","
        yield inside(values[start : start + PIECE_VALUES])
    yield b"]"
