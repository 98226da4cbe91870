"""The flags that several commands have for objectives, beside those of `SLO`."""

from __future__ import annotations

from typing import Any

from onbeat.core.options import option
from onbeat.core.slo import OBJECTIVES, ShedMode


def slo_mode_option() -> Any:
    """Return the field of what keeping the TBT objective means."""
    return option(
        "stream",
        flag="--slo-mode",
        group=OBJECTIVES,
        help="what keeps a TBT objective; stream: 99% of the tokens meet their deadlines; gap: the P99 gap "
        "is within the objective",
    )


def shed_option() -> Any:
    """Return the field of what becomes of requests that are predicted to be late and do not say."""
    return option(
        ShedMode.RELEGATE,
        group=OBJECTIVES,
        help="what slo does with a request that it predicts to miss its TTFT objective; off: it takes its "
        "turn; relegate: it is served as best effort; reject: it gets 429",
    )
