"""When an engine that gives signs of life, or gives none any more, is held to hang.

Time in which it wanted to run and could not does not count: a starved engine is slow, and starting it again
costs more than waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.core.protocols import EnginePulse


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """When an engine is held to hang. It gives a sign of life twice a second, also while a step runs."""

    silence_seconds: float = 30.0
    """Longest time without a sign of life."""
    step_seconds: float = 30.0
    """A step may always take this long."""
    step_ratio: float = 100.0
    """Beyond that, it may take this many times what was predicted."""
    unpredicted_step_seconds: float = 600.0
    """What a step may take where nothing predicts."""


def find_hang(pulse: EnginePulse, limits: HangLimits, now: float) -> str | None:
    """Return what speaks for a hang of the engine with this pulse, or None."""
    besides = f", not counting {pulse.waited:.0f} s without a processor" if pulse.waited >= 1 else ""
    silence = now - pulse.time - pulse.waited
    if silence > limits.silence_seconds:
        return f"it has said nothing for {silence:.0f} s{besides}"
    if pulse.step_start is None:
        return None
    age = now - pulse.step_start - pulse.waited
    if pulse.step_predicted is None:
        is_long = age > limits.unpredicted_step_seconds
        return f"its step has run for {age:.0f} s{besides}" if is_long else None
    if age > max(limits.step_seconds, limits.step_ratio * pulse.step_predicted):
        return f"its step has run for {age:.0f} s instead of {pulse.step_predicted:.3g} s{besides}"
    return None
