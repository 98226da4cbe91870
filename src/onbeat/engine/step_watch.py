"""Judges every step that ran: what it reached of the device, and whether its time still follows the model."""

from __future__ import annotations

import logging
from collections.abc import Callable

from onbeat.core.step import StepStats
from onbeat.perfmodel.correction import Drift
from onbeat.perfmodel.speculative import BatchOperations

logger = logging.getLogger("onbeat.engine")

_SETTLED_SECONDS = 60.0
"""A machine that other work disturbs comes and goes; what lasts this long is said."""


class StepWatch:
    """Fills in what a step reached, and says in the log when step times leave their model and come back.

    Parameters
    ----------
    operations : operations and bytes of a batch.
    memory_bandwidth : the device's peak, bytes per second.
    peak_flops : the device's peak in the engine's number format, operations per second.
    drift : asks the step-time model whether it still describes the machine; None where nobody predicts.
    was_measured : whether the model was fitted to this machine. What was only computed is off from the start,
        which is no news.
    """

    def __init__(
        self,
        operations: BatchOperations,
        *,
        memory_bandwidth: float,
        peak_flops: float,
        drift: Callable[[], Drift | None] | None = None,
        was_measured: bool = False,
    ) -> None:
        self._operations = operations
        self._seconds_per_byte = 1.0 / memory_bandwidth
        self._seconds_per_flop = 1.0 / peak_flops
        self._drift = drift
        self._was_measured = was_measured
        self._is_drifting = False
        self._changed: float | None = None

    def judge(self, stats: StepStats) -> None:
        """Set `mbu`, `mfu` and `is_drifting`; the first two stay None for a step that took no time."""
        seconds = stats.end - stats.start
        if seconds > 0:
            stats.mbu = self._operations.bytes_read(stats.shape) * self._seconds_per_byte / seconds
            stats.mfu = self._operations.flops(stats.shape) * self._seconds_per_flop / seconds
        if self._drift is not None and (drift := self._drift()) is not None:
            stats.is_drifting = drift.is_alarming
            if self._was_measured:
                self._follow(drift, stats.end)

    def _follow(self, drift: Drift, now: float) -> None:
        if drift.is_alarming == self._is_drifting:
            self._changed = None
            return
        if self._changed is None:
            self._changed = now
        if now - self._changed < _SETTLED_SECONDS:
            return
        self._is_drifting = drift.is_alarming
        self._changed = None
        if not drift.is_alarming:
            logger.warning("steps take what their profile says again (%.2f times)", drift.ratio)
            return
        cause = "something else loads the machine, or it" if drift.ratio > 1 else "the machine"
        logger.warning(
            "steps take %.2f times what their profile says (before it is corrected): %s has changed; "
            "`onbeat profile` measures it again",
            drift.ratio,
            cause,
        )
