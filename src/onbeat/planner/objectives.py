"""Named objectives of a run as a whole: what it means that a rate can be sustained.

===================  ====================================================================  =============
name                 kept if                                                               published by
===================  ====================================================================  =============
``sarathi``          P99 of all gaps <= the TBT objective, median scheduling delay <= 2 s  Sarathi-Serve
``vidur``            P99 scheduling delay < 5 s                                            Vidur
``attainment:A``     at least the share A of the requests is good (`metrics.attainment`)   this project
``distserve:A``      at least the share A meets TTFT and TPOT, both at once                DistServe
===================  ====================================================================  =============

The *scheduling delay* lies between a request's arrival and the first step it is part of. A request that never
ran, was rejected or failed has an infinite delay and is not good.

References
----------
Agrawal et al., "Sarathi-Serve", OSDI 2024, section 5; Agrawal et al., "Vidur", MLSys 2024, section 6;
Zhong et al., "DistServe", OSDI 2024, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.core.slo import SLOMode
from onbeat.metrics.attainment import USUAL_SHARE
from onbeat.metrics.distribution import percentile
from onbeat.metrics.record import RequestRecord
from onbeat.planner.objective import (
    Allowance,
    Measure,
    Objective,
    Verdict,
    allowed_above,
    unfinished,
    verdict_of,
)
from onbeat.planner.share_objectives import AttainmentObjective, DistServeObjective
from onbeat.simulator.result import SimulationResult
from onbeat.workload.offered import OfferedLoad

Array = NDArray[np.float64]

SARATHI_MEDIAN_DELAY = 2.0
VIDUR_P99_DELAY = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SarathiObjective:
    """No stalls and no growing queue.

    Parameters
    ----------
    tbt : limit of the 99th percentile over the gaps of all requests, seconds.
    """

    tbt: float

    @property
    def name(self) -> str:
        return "sarathi"

    def judge(self, result: SimulationResult) -> Verdict:
        if missing := unfinished(result):
            return missing
        gaps = pooled_gaps(result.records)
        delays = scheduling_delays(result.records)
        return verdict_of(
            (
                Measure(name="P99 TBT", value=_percentile(gaps, 99), limit=self.tbt),
                Measure(
                    name="median scheduling delay", value=_percentile(delays, 50), limit=SARATHI_MEDIAN_DELAY
                ),
            )
        )

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        num_gaps = int(load.num_output_tokens.sum()) - len(load)
        gaps = Allowance(
            what=f"gaps above {self.tbt * 1e3:g} ms",
            allowed=allowed_above(num_gaps, 99),
            count=lambda records: int((pooled_gaps(records) > self.tbt).sum()),
        )
        delays = Allowance(
            what=f"scheduling delays above {SARATHI_MEDIAN_DELAY:g} s",
            allowed=allowed_above(len(load), 50),
            count=lambda records: int((scheduling_delays(records) > SARATHI_MEDIAN_DELAY).sum()),
        )
        return (gaps, delays) if num_gaps else (delays,)


@dataclass(frozen=True, slots=True, kw_only=True)
class VidurObjective:
    """No growing queue."""

    @property
    def name(self) -> str:
        return "vidur"

    def judge(self, result: SimulationResult) -> Verdict:
        if missing := unfinished(result):
            return missing
        delay = _percentile(scheduling_delays(result.records), 99)
        return verdict_of(
            (Measure(name="P99 scheduling delay", value=delay, limit=VIDUR_P99_DELAY, is_strict=True),)
        )

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        return (
            Allowance(
                what=f"scheduling delays of {VIDUR_P99_DELAY:g} s or more",
                allowed=allowed_above(len(load), 99),
                count=lambda records: int((scheduling_delays(records) >= VIDUR_P99_DELAY).sum()),
            ),
        )


def scheduling_delays(records: Sequence[RequestRecord]) -> Array:
    """Return the seconds from arrival to the first step of each request; infinite where it never ran."""
    delays = (record.scheduling_delay for record in records)
    return np.array([inf if delay is None else delay for delay in delays], dtype=np.float64)


def pooled_gaps(records: Sequence[RequestRecord]) -> Array:
    """Return every gap between two deliveries of the completed requests, seconds."""
    gaps = [np.diff(np.frombuffer(record.delivery_times)) for record in records if record.is_completed]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _percentile(values: Array, p: float) -> float:
    if not values.size:
        return 0.0
    if not np.isfinite(values).all():  # infinities have no point between them
        return float(np.percentile(values, p, method="higher"))
    return percentile(values, p)


def parse_objective(text: str, *, tbt: float | None = None, mode: SLOMode = "stream") -> Objective:
    """Return the objective that a command line names, such as `sarathi` or `attainment:0.99`.

    Parameters
    ----------
    tbt : the TBT objective, seconds; only `sarathi` needs it.
    mode : only `attainment` asks for it.

    Raises
    ------
    ConfigError : an unknown name, a share that is none, or no `tbt` where it is needed.
    """
    name, colon, argument = text.partition(":")
    if name not in OBJECTIVES:
        near = likely_meant(name, OBJECTIVES)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(OBJECTIVES)}"
        raise ConfigError(f"unknown objective {text!r}; {hint}")
    takes_share = name in ("attainment", "distserve")
    if colon and not takes_share:
        raise ConfigError(f"the objective {name} takes no share, got {text!r}")
    try:
        share = float(argument) if colon else USUAL_SHARE
    except ValueError as error:
        raise ConfigError(f"expected a share such as {name}:0.9, got {text!r}") from error
    return OBJECTIVES[name](tbt, share, mode)


def _sarathi(tbt: float | None, share: float, mode: SLOMode) -> Objective:  # noqa: ARG001
    if tbt is None:
        raise ConfigError("the objective sarathi limits the P99 of all gaps; give the limit: --slo-tbt-ms")
    return SarathiObjective(tbt=tbt)


OBJECTIVES: dict[str, Callable[[float | None, float, SLOMode], Objective]] = {
    "sarathi": _sarathi,
    "vidur": lambda _tbt, _share, _mode: VidurObjective(),
    "attainment": lambda _tbt, share, mode: AttainmentObjective(share=share, mode=mode),
    "distserve": lambda _tbt, share, _mode: DistServeObjective(share=share),
}
