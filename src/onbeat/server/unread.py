"""Answers that wait for their readers: what they hold in memory is bounded over all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol

from onbeat.server.errors import ApiError

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
