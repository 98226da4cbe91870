"""Latency objectives (SLO) of requests, and what becomes of requests that cannot meet them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any, Literal, get_args

from onbeat.core.errors import ConfigError
from onbeat.core.options import option

SHORTEST_OBJECTIVE = 1e-3
LONGEST_OBJECTIVE = 24 * 3600.0
OBJECTIVES = "objectives"
"""Title of the flags of this module."""


def _objective(name: str, help: str) -> Any:
    return option(
        None, flag=f"--slo-{name}-ms", unit="ms", metavar="MS", group=OBJECTIVES, help=f"objective {help}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """The latency objectives of one request, seconds; None is no objective.

    The deadline of token k (0 is the first) is `max(arrival + ttft, first token) + k * tbt`: a stream that
    is ahead of its deadlines may use that slack, one that starts late is not late for ever.

    Raises
    ------
    ConfigError : an objective outside [1 ms, 24 h].
    """

    ttft: float | None = _objective("ttft", "from arrival to the first token")
    tbt: float | None = _objective("tbt", "between tokens")
    e2e: float | None = _objective("e2e", "from arrival to the last token")

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
        """Whether there is no objective."""
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
    """It keeps its turn, by its deadline, even when that has passed."""
    RELEGATE = "relegate"
    """It is served as best effort, in time that others leave."""
    REJECT = "reject"
    """It is rejected on arrival with the predicted wait; one that becomes infeasible is ended."""


class Fate(StrEnum):
    """What becomes of a request by its objectives. docs/slo.md says of each what its caller sees.

    A request is *late* once a deadline of it has passed; that alone is no fate. The values are names in
    metrics and records.
    """

    INFEASIBLE = "infeasible"
    """Its first token cannot be in time any more. `ShedMode` says what follows."""
    RELEGATED = "relegated"
    """It is served as best effort: it was infeasible, or its stream could no longer keep its objective."""
    REJECTED = "rejected"
    """It was not taken at its arrival."""
    EXPIRED = "expired"
    """It was infeasible in the queue, and was ended there, as its caller had asked not to be served late."""
    OVERDUE = "overdue"
    """It was ended in the queue, as best effort waits there for longer than `max_queue_seconds` allow."""
    IN_TIME = "good"
    """It has ended, and kept its objectives."""
    MISSED = "bad"
    """It has ended, and missed one."""
    ABANDONED = "abandoned"
    """Its caller left while its objectives were still kept: nobody can judge it."""


ShedOrder = Literal["most", "longest-wait"]
"""Which prompts to leave behind where not all can be in time: `most`, those with the most work, so that as
many as possible are in time; `longest-wait`, those that came last, so that a request that has waited
keeps its turn however long its prompt is."""
DEFAULT_SHED_ORDER: ShedOrder = "most"
DEFAULT_QUEUE_SECONDS = 60.0
"""Longest predicted wait for which a request is taken that is not in time: so long do proxies wait for the
first byte of an answer (docs/maintainers/decisions.md)."""

SLOMode = Literal["stream", "gap"]
SLO_MODES: tuple[SLOMode, ...] = get_args(SLOMode)
"""What keeping the TBT objective means: `stream`, 99 % of the tokens by their deadlines, so that a stream may
use the slack that it has; `gap`, the P99 of the request's own gaps between deliveries within it."""
