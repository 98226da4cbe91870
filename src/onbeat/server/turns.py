"""Long work on the event loop, done a little at a time."""

from __future__ import annotations

import asyncio
import time

TURN_SECONDS = 0.002
"""What one request may take of the event loop before all others have their turn."""


class Turns:
    """Gives the event loop back now and then, while one request has much to do."""

    def __init__(self) -> None:
        self._end = time.monotonic() + TURN_SECONDS

    async def rest(self) -> None:
        """Let others go on if this turn is over; call it between two small pieces of work."""
        if time.monotonic() >= self._end:
            await asyncio.sleep(0)
            self._end = time.monotonic() + TURN_SECONDS
