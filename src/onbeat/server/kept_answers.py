"""Answers of the Responses API that are kept for a while: to be read again, or on after a break.

Whoever decides for all front ends keeps them, as bytes that it does not look into. Together they are bounded:
what ended first goes first, of the owner who has most there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from onbeat.core.errors import InvalidRequest, Overloaded
from onbeat.server.errors import ApiError
from onbeat.server.server_config import MAX_QUOTED

KEPT_SECONDS = 300.0
"""From the end of an answer on."""
MOST_KEPT_BYTES = 2**27
BACKGROUND_BYTES = 2**16
"""What an answer of the background counts as, beside its bytes: no connection bounds how many there are."""
WAIT_SECONDS = 10.0
"""After so long a reader hears that nothing is new: one that has left is then forgotten."""
_READ_BYTES = 2**16


class KeptAnswer(msgspec.Struct):
    """An answer as it stands.

    Attributes
    ----------
    items : the conversation before it, a JSON array.
    response : JSON.
    is_background : whether it is made when nobody is connected, too; then its events are kept as well.
    is_running : whether it is being made.
    """

    items: bytes
    response: bytes
    is_background: bool
    is_running: bool


@dataclass(slots=True)
class _Kept:
    """An answer with its events; `changed` is set by the next change alone, `stopped` when it is to end."""

    owner: str
    shelf: AnswerShelf
    answer: KeptAnswer
    events: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self, *, ends: bool) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
        if ends:
            self.answer.is_running = False
            self.stopped.set()

    async def wait(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), WAIT_SECONDS)


class KeptAnswers:
    """What all front ends have had kept, by id."""

    def __init__(self) -> None:
        self.by_id: dict[str, _Kept] = {}
        self._held: Counter[str] = Counter()
        """Bytes of each owner."""
        self._ended: dict[str, dict[str, None]] = {}
        """The ids of each owner's answers that have ended, in the order of their ends."""

    def find(self, answer_id: str, owner: str) -> _Kept:
        """Return an answer of an owner.

        Raises
        ------
        ApiError : there is none (404).
        """
        kept = self.by_id.get(answer_id)
        if kept is None or kept.owner != owner:
            raise ApiError(
                404,
                f"the response {answer_id[:MAX_QUOTED]!r} is not kept here. Responses are kept for "
                f"{KEPT_SECONDS / 60:.0f} minutes, unless store is false; when they hold more than "
                f"{MOST_KEPT_BYTES // 2**20} MiB, the oldest go first",
                code="response_not_found",
            )
        return kept

    def grow(self, answer_id: str, num_bytes: int) -> None:
        """Count bytes of an answer, and make room for them.

        Raises
        ------
        Overloaded : all room is taken by answers that are being made; this one is dropped.
        """
        kept = self.by_id[answer_id]
        kept.num_bytes += num_bytes
        self._held[kept.owner] += num_bytes
        while self._held.total() > MOST_KEPT_BYTES:
            largest = max(self._ended, key=self._held.__getitem__, default=None)
            if largest is None:
                self.drop(answer_id)
                raise Overloaded(
                    f"responses that are made in the background hold {MOST_KEPT_BYTES // 2**20} MiB, as much "
                    "as they may; ask for fewer, or try again later",
                    code="background_full",
                )
            self.drop(next(iter(self._ended[largest])))

    def end(self, answer_id: str) -> None:
        """Hear that an answer has ended; it is dropped after a while."""
        self._ended.setdefault(self.by_id[answer_id].owner, {})[answer_id] = None
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self.drop, answer_id)

    def drop(self, answer_id: str) -> None:
        """Keep an answer no more; whoever reads it, or makes it, hears so."""
        if (kept := self.by_id.pop(answer_id, None)) is not None:
            self._held[kept.owner] -= kept.num_bytes
            ended = self._ended.get(kept.owner, {})
            ended.pop(answer_id, None)
            if not ended:
                self._ended.pop(kept.owner, None)
            kept.change(ends=True)


class AnswerShelf:
    """Where one front end has answers kept; it chooses their ids, and names their owners."""

    def __init__(self, answers: KeptAnswers) -> None:
        self._answers = answers

    def close(self) -> None:
        """Drop what a front end was making that has died."""
        for answer_id, kept in list(self._answers.by_id.items()):
            if kept.shelf is self and kept.answer.is_running:
                self._answers.drop(answer_id)

    async def keep(self, answer_id: str, owner: str, answer: KeptAnswer, events: bytes) -> None:
        """Keep an answer that has ended, or begin one with its first events; raise as `KeptAnswers.grow`."""
        self._answers.by_id[answer_id] = _Kept(owner, self, answer)
        self._answers.grow(answer_id, BACKGROUND_BYTES * answer.is_background + len(answer.items))
        await self.add(answer_id, events, answer.response, ends=not answer.is_running)

    async def add(self, answer_id: str, events: bytes, response: bytes, *, ends: bool) -> None:
        """Add events to an answer, and say how it stands, if that is new; raise as `KeptAnswers.grow`.

        Nothing happens where it is kept no more: whoever makes it is told to stop.
        """
        if (kept := self._answers.by_id.get(answer_id)) is None:
            return
        kept.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        kept.answer.response = response or kept.answer.response
        kept.change(ends=ends)
        if ends:
            self._answers.end(answer_id)
        self._answers.grow(answer_id, len(events) + len(response))

    async def get(self, answer_id: str, owner: str, number: int = 0) -> KeptAnswer:
        """Return an answer as it stands; raise as `KeptAnswers.find`.

        Raises
        ------
        InvalidRequest : it has kept events, and no reader of them can ask for a number as the next.
        """
        kept = self._answers.find(answer_id, owner)
        if kept.answer.is_background and number > len(kept.events):
            raise InvalidRequest(
                f"starting_after is {number - 1}, and the last event so far has the number "
                f"{len(kept.events) - 1}; send the sequence_number of the last event that you have read",
                param="starting_after",
            )
        return kept.answer

    async def read(self, answer_id: str, owner: str, number: int) -> tuple[bytes, int, bool]:
        """Return some events from a number on, that of the next event, and whether there will be none.

        Where there is nothing new yet it waits for a while. Raises as `get`.
        """
        kept = self._answers.find(answer_id, owner)
        if number >= len(kept.events) and kept.answer.is_running:
            await kept.wait()
            kept = self._answers.find(answer_id, owner)
        batch = bytearray()
        while number < len(kept.events) and len(batch) < _READ_BYTES:
            batch += kept.events[number]
            number += 1
        return bytes(batch), number, not kept.answer.is_running and number >= len(kept.events)

    async def forget(self, answer_id: str, owner: str) -> None:
        """Keep an answer no more; raise as `get`."""
        self._answers.find(answer_id, owner)
        self._answers.drop(answer_id)

    async def stop(self, answer_id: str, owner: str) -> KeptAnswer:
        """Have an answer end, and return it once it has; raise as `get`."""
        kept = self._answers.find(answer_id, owner)
        kept.stopped.set()
        while kept.answer.is_running:
            await kept.wait()
        return await self.get(answer_id, owner)

    async def until_stopped(self, answer_id: str) -> None:
        """Return when an answer has ended, or is to end."""
        if (kept := self._answers.by_id.get(answer_id)) is not None:
            await kept.stopped.wait()
