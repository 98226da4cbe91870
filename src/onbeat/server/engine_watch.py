"""Notices that the engine has ended, or hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from onbeat.core.protocols import EngineClient, EnginePulse
from onbeat.server.config import HangLimits

logger = logging.getLogger("onbeat.server")

LOOK_SECONDS = 0.5
"""How often the engine is looked at."""


class EngineWatch:
    """Looks at an engine's pulse; its end is final, a hang may pass.

    Parameters
    ----------
    engine : whose pulse it is.
    limits : from when on it hangs.
    clock : the clock of the pulse, seconds.

    Attributes
    ----------
    ended : set once the engine process has ended.
    hang : what speaks for a hang; None while nothing does.
    """

    def __init__(
        self, engine: EngineClient, limits: HangLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ended = asyncio.Event()
        self.hang: str | None = None
        self._engine = engine
        self._limits = limits
        self._clock = clock

    async def run(self) -> None:
        """Look until the engine has ended."""
        while self._engine.is_alive:
            before = self._clock()
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock()
            # else this process stood still itself, and the engine's messages wait to be read
            if now - before < 2 * LOOK_SECONDS:
                self._judge(find_hang(self._engine.pulse, self._limits, now))
        self.hang = None
        self.ended.set()

    def _judge(self, hang: str | None) -> None:
        if hang is not None and self.hang is None:
            logger.error("the engine hangs: %s; /health answers 503 until it goes on", hang)
        elif hang is None and self.hang is not None:
            logger.warning("the engine goes on")
        self.hang = hang


def find_hang(pulse: EnginePulse, limits: HangLimits, now: float) -> str | None:
    """Return what speaks for a hang of the engine with this pulse, or None."""
    silence = now - pulse.time
    if silence > limits.silence_seconds:
        return f"it has said nothing for {silence:.0f} s"
    if pulse.step_start is None:
        return None
    age = now - pulse.step_start
    if pulse.step_predicted is None:
        return f"its step has run for {age:.0f} s" if age > limits.unpredicted_step_seconds else None
    if age > max(limits.step_seconds, limits.step_ratio * pulse.step_predicted):
        return f"its step has run for {age:.0f} s instead of {pulse.step_predicted:.3g} s"
    return None
