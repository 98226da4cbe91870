"""Whether the server takes requests, and how many it still owes an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from onbeat.core.errors import Overloaded


class Lifecycle:
    """Counts open generations; once draining, refuses new ones and says when the last has ended."""

    def __init__(self) -> None:
        self.is_draining = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._engine_ids: set[str] = set()

    @property
    def num_open(self) -> int:
        """HTTP requests that are generating now."""
        return self._num_open

    @property
    def engine_request_ids(self) -> list[str]:
        """Ids of the engine requests that are open now."""
        return list(self._engine_ids)

    def start_draining(self) -> None:
        """Refuse new generations from now on."""
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        """Return when no generation is open."""
        await self._idle.wait()

    def check_open(self) -> None:
        """Raise `Overloaded` if the server is going down."""
        if self.is_draining:
            raise Overloaded(
                "the server is shutting down and takes no new requests; try another or later", code="draining"
            )

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Count one generation while the block runs.

        Raises
        ------
        Overloaded : the server is going down.
        """
        self.check_open()
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    @contextmanager
    def engine_request(self, request_id: str) -> Iterator[None]:
        """Remember an engine request while the block runs, so that shutting down can abort it."""
        self._engine_ids.add(request_id)
        try:
            yield
        finally:
            self._engine_ids.discard(request_id)
