"""What a request was promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Literal, get_args

from onbeat.core.errors import ConfigError

SHORTEST_OBJECTIVE = 1e-3
LONGEST_OBJECTIVE = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """The latency objectives of one request, seconds; None promises nothing.

    The deadline of token k (0 is the first) is `max(arrival + ttft, first token) + k * tbt`: a stream that
    is ahead of its deadlines may use that slack, one that starts late is not late for ever.

    Raises
    ------
    ConfigError : an objective outside [1 ms, 24 h].
    """

    ttft: float | None = None
    """From arrival to the first delivery."""
    tbt: float | None = None
    """Between tokens."""
    e2e: float | None = None
    """From arrival to the last delivery."""

    def __post_init__(self) -> None:
        for name in ("ttft", "tbt", "e2e"):
            value = getattr(self, name)
            if value is None:
                continue
            if not (isfinite(value) and SHORTEST_OBJECTIVE <= value <= LONGEST_OBJECTIVE):
                raise ConfigError(
                    f"the {name} objective is {value * 1e3:g} ms; it must lie between 1 ms and 24 h"
                )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is promised."""
        return self.ttft is None and self.tbt is None and self.e2e is None


SLO_CLASSES: Mapping[str, SLO] = {
    "interactive": SLO(ttft=0.5, tbt=0.05),
    "standard": SLO(ttft=2.0, tbt=0.1),
    "batch": SLO(ttft=10.0, tbt=0.5),
}
"""Objectives that go by a name."""


class ShedMode(StrEnum):
    """What becomes of a request that is predicted to miss its TTFT objective."""

    OFF = "off"
    """Nobody asks: it keeps its turn, by its deadline, even when that has passed."""
    RELEGATE = "relegate"
    """It is served as best effort, from what is left over."""
    REJECT = "reject"
    """It is refused at once with the predicted wait; queued past its deadline, it ends without an answer."""


ShedOrder = Literal["most", "longest-wait"]
SHED_ORDERS: tuple[ShedOrder, ...] = get_args(ShedOrder)
"""Whom to leave behind where not all prompts can be in time: `most`, those with the most work, so that as
many as possible are in time; `longest-wait`, those that came last, so that who has waited keeps its turn
however long its prompt is."""
DEFAULT_SHED_ORDER: ShedOrder = "most"
DEFAULT_QUEUE_SECONDS = 60.0
"""Longest predicted wait for which a request is taken that is not in time: so long do proxies wait for the
first byte of an answer (docs/decisions/queue-bound.md)."""

SLOMode = Literal["stream", "gap"]
SLO_MODES: tuple[SLOMode, ...] = get_args(SLOMode)
"""What keeping the TBT objective means: `stream`, 99 % of the tokens by their deadlines, so that a stream may
use slack that it has earned; `gap`, the P99 of the request's own gaps between deliveries within it."""
