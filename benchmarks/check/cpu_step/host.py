"""What of a step of the engine's loop is not its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.core.step import StepStats

SKIPPED_STEPS = 4
"""Decodes at the start and at the end that are not counted: requests join and leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """Of decode steps of one batch size."""

    batch: int
    num_steps: int
    step: float
    """Mean seconds from the end of a step to the end of the next."""
    forward: float
    """Mean seconds of them in the forward pass."""

    @property
    def share(self) -> float:
        """What of a step is not the forward pass."""
        return 1 - self.forward / self.step


def host_share(steps: Sequence[StepStats], forward_seconds: Sequence[float], batch: int) -> HostShare:
    """Return the share of the steps that decode the whole batch, those at the ends left out.

    Parameters
    ----------
    forward_seconds : of every step, in their order.
    """
    full = [
        index
        for index, step in enumerate(steps)
        if step.shape.num_decodes == batch and not step.shape.num_chunks
    ][SKIPPED_STEPS:-SKIPPED_STEPS]
    if len(full) < 2:
        raise ValueError(f"only {len(full)} steps decode all {batch} requests")
    first, *others = full
    seconds = steps[full[-1]].end - steps[first].end
    forward = sum(forward_seconds[index] for index in others)
    return HostShare(
        batch=batch, num_steps=len(others), step=seconds / len(others), forward=forward / len(others)
    )
