"""Whether the engine goes on, and when the server looks for garbage.

A full round of garbage collection stops the event loop for longer the more is open.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onbeat.core.hang import HangLimits, OwnPauses, find_hang
from onbeat.core.protocols import EngineClient
from onbeat.server.generation import Lifecycle

logger = logging.getLogger("onbeat.server")

LOOK_SECONDS = 0.5
"""How often the engine is looked at."""
TIDY_SECONDS = 5.0
"""How often garbage is looked for while nothing is open."""
LONGEST_UNTIDY_SECONDS = 600.0
"""How long that may wait for such a moment."""
_NEVER = 2**30


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Leave full rounds of garbage collection to `tidy` while the block runs."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


async def tidy(lifecycle: Lifecycle) -> None:
    """Collect garbage while no generation is open, or after a long time without such a moment; for ever."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        is_due = lifecycle.num_open == 0 or time.monotonic() - last > LONGEST_UNTIDY_SECONDS
        if is_due and gc.get_count()[2]:  # there have been smaller rounds, and what outlived them
            gc.collect()
            last = time.monotonic()


class EngineHealth:
    """Looks at an engine's pulse, while it lives; a hang may pass.

    Parameters
    ----------
    engine : whose pulse it is.
    limits : from when on it hangs.
    clock : the clock of the pulse, seconds.

    Attributes
    ----------
    hang : what speaks for a hang; None while nothing does.
    """

    def __init__(
        self, engine: EngineClient, limits: HangLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.hang: str | None = None
        self._engine = engine
        self._limits = limits
        self._clock = clock

    async def run(self) -> None:
        """Look, for ever."""
        pauses = OwnPauses(2 * LOOK_SECONDS)
        pauses.look(self._clock())
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            is_in_time = pauses.look(now := self._clock())
            if not self._engine.is_alive:
                self.hang = None
            elif is_in_time:
                self._judge(find_hang(pauses.without(self._engine.pulse), self._limits, now))

    def _judge(self, hang: str | None) -> None:
        if hang is not None and self.hang is None:
            logger.error("the engine hangs: %s; /ready answers 503 until it goes on", hang)
        elif hang is None and self.hang is not None:
            logger.warning("the engine goes on")
        self.hang = hang
