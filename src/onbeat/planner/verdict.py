"""What an objective says about a run: each measure beside its limit, and which of them binds."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

Unit = Literal["s", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number that an objective limits: seconds from above, a share from below."""

    name: str
    value: float
    limit: float
    unit: Unit = "s"
    is_strict: bool = False
    """Whether the limit itself already misses it."""
    detail: str = ""
    """More numbers that explain it."""

    @property
    def is_met(self) -> bool:
        if self.unit == "share":
            return self.value >= self.limit
        return self.value < self.limit if self.is_strict else self.value <= self.limit

    @property
    def pressure(self) -> float:
        """How near the limit is: above 1 it is missed. Shares count what is lost, not what is kept."""
        value, limit = (self.value, self.limit) if self.unit == "s" else (1 - self.value, 1 - self.limit)
        return value / limit if limit > 0 else (inf if value > 0 else 0.0)

    def __str__(self) -> str:
        sign = (
            (">=" if self.unit == "share" else "<") if self.is_met else ("<" if self.unit == "share" else ">")
        )
        text = f"{self.name} {self._format(self.value)} {sign} {self._format(self.limit)}"
        return f"{text} ({self.detail})" if self.detail else text

    def _format(self, value: float) -> str:
        if self.unit == "share":
            return f"{value * 100:.2f} %"
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.3f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a run kept an objective, and why or why not."""

    is_met: bool
    reason: str
    """The measure that binds most, with its numbers."""
    measures: tuple[Measure, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the keys of a saved result."""
        return {
            "is_met": self.is_met,
            "reason": self.reason,
            "measures": {measure.name: measure.value for measure in self.measures},
        }


def verdict_of(measures: tuple[Measure, ...]) -> Verdict:
    """Return the verdict that some measures make up: all must be met; the tightest is the reason."""
    missed = [measure for measure in measures if not measure.is_met]
    limiting = max(missed or measures, key=lambda measure: measure.pressure)
    return Verdict(is_met=not missed, reason=str(limiting), measures=measures)
