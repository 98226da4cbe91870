"""JSON that may be long, sent in pieces.

What answers that wait for their readers hold in memory is bounded over all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import orjson
from msgspec import Raw, Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onbeat.server.errors import ApiError
from onbeat.server.fair_threads import Turns
from onbeat.server.middleware import context_of

logger = logging.getLogger("onbeat.server")

LOOK_SECONDS = 0.2
"""How often it is looked who waits for a reader."""


class UnreadAnswer(Protocol):
    """An answer that is being sent."""

    @property
    def name(self) -> str:
        """What the log calls it."""

    @property
    def num_unread_bytes(self) -> int:
        """What it holds until its client reads on, roughly."""


class SlowReaders:
    """Knows the answers that wait for their readers, and ends the longest where they hold too much together.

    Parameters
    ----------
    most_bytes : what they may hold together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._waiting: dict[asyncio.Task[object], UnreadAnswer] = {}
        self._ended: set[asyncio.Task[object]] = set()

    async def sent(self, answer: UnreadAnswer, sending: Awaitable[None]) -> None:
        """Wait until a piece of an answer is on its way; the task that waits sends no other one.

        Raises
        ------
        ApiError : the answer was ended, since its client is too far behind.
        """
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = answer
        try:
            await sending
        except asyncio.CancelledError:
            if task in self._ended and task.uncancel() == 0:
                raise ApiError(
                    408,
                    "the answer was read too slowly: it was ended when all that wait for their readers held "
                    f"more than {self._most_bytes} bytes, and this one the most. Read answers as they come",
                    code="read_too_slowly",
                ) from None
            raise
        finally:
            del self._waiting[task]
            self._ended.discard(task)

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        held = {task: answer.num_unread_bytes for task, answer in self._waiting.items()}
        total = sum(held.values())
        while total > self._most_bytes:
            task = max(held, key=held.__getitem__)
            num_bytes = held.pop(task)
            logger.warning(
                "%s is ended, because its client does not read: it holds %.1f MB of %.1f MB that "
                "clients have not read (at most %.1f MB are kept)",
                self._waiting[task].name,
                *(number / 1e6 for number in (num_bytes, total, self._most_bytes)),
            )
            total -= num_bytes
            self._ended.add(task)
            task.cancel()


PIECE_BYTES = 2**16
"""What is sent at a time."""
PIECE_VALUES = 2**14
"""Of a list, what is written at a time."""

Piece = bytes | bytearray


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


class Long:
    """A JSON value that is there already, or is made piece by piece. It stands for any value of a Struct."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = pieces


def written(*pieces: Piece) -> Any:
    """Return a value of a Struct whose JSON is these pieces."""
    return Long(pieces) if sum(map(len, pieces)) > PIECE_BYTES else Raw(b"".join(pieces))


def _at_once(value: object) -> Raw:
    assert isinstance(value, Long), "Structs hold nothing else that JSON lacks"
    return Raw(b"".join(value.pieces))


encode = msgspec.json.Encoder(enc_hook=_at_once).encode
"""Makes JSON of a Struct."""


def in_pieces(answer: Struct) -> Iterator[Piece]:
    """Yield the JSON of an answer, each `Long` value of it piece by piece."""
    values: list[Long] = []

    def mark(value: Any) -> Raw:
        values.append(value)
        return Raw(b"\0")  # which no JSON has

    first, *others = msgspec.json.encode(answer, enc_hook=mark).split(b"\0")
    yield first
    for value, rest in zip(values, others, strict=True):
        yield from value.pieces
        yield rest


def list_of(answers: Iterable[Struct | None]) -> Any:
    """Return a value of a Struct: a list that is made one after another; None lets others have their turn."""

    def pieces() -> Iterator[Piece]:
        start = b"["
        for answer in answers:
            if answer is None:
                yield b""
                continue
            yield start
            yield from in_pieces(answer)
            start = b","
        yield b"]" if start == b"," else b"[]"

    return Long(pieces())


def json_response(answer: Struct | Sequence[Struct]) -> Response:
    """Return a short answer."""
    return Response(encode(answer), media_type="application/json")


async def gathered(answer: Struct) -> list[Piece]:
    """Return the JSON of an answer in pieces; others have their turn while it is made."""
    pieces, turns = list[Piece](), Turns()
    for piece in in_pieces(answer):
        pieces.append(piece)
        await turns.rest()
    return pieces


def json_inside(value: str | Sequence[Any]) -> bytes:
    """Return what stands between the quotes of a text in JSON, or between the brackets of a list."""
    return orjson.dumps(value)[1:-1]


def list_in_pieces(values: Sequence[Any], shown: Callable[[Any], object] | None = None) -> Any:
    """Return a value of a Struct: a list, given how each of its values is shown."""

    def pieces() -> Iterator[Piece]:
        yield b"["
        for start in range(0, len(values), PIECE_VALUES):
            part = values[start : start + PIECE_VALUES]
            yield (b"," if start else b"") + json_inside(part if shown is None else list(map(shown, part)))
        yield b"]"

    return Long(pieces())
