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

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.metrics.attainment import TOLERANCE, SLOMode, good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import percentile
from onbeat.planner.verdict import Measure, Verdict, verdict_of
from onbeat.simulator.result import SimulationResult

Array = NDArray[np.float64]

SARATHI_MEDIAN_DELAY = 2.0
VIDUR_P99_DELAY = 5.0
DEFAULT_SHARE = 0.9


class Objective(Protocol):
    """Judges a finished run."""

    @property
    def name(self) -> str:
        """As the command line spells it."""
        ...

    def judge(self, result: SimulationResult) -> Verdict:
        """Say whether the run kept the objective; one that was not finished did not."""
        ...


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
        if unfinished := _unfinished(result):
            return unfinished
        gaps = pooled_gaps(result.records)
        delays = scheduling_delays(result.records)
        return verdict_of(
            (
                Measure(name="P99 TBT", value=_percentile(gaps, 99), limit=self.tbt),
                Measure(
                    name="median scheduling delay",
                    value=_percentile(delays, 50),
                    limit=SARATHI_MEDIAN_DELAY,
                ),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VidurObjective:
    """No growing queue."""

    @property
    def name(self) -> str:
        return "vidur"

    def judge(self, result: SimulationResult) -> Verdict:
        if unfinished := _unfinished(result):
            return unfinished
        delay = _percentile(scheduling_delays(result.records), 99)
        return verdict_of(
            (Measure(name="P99 scheduling delay", value=delay, limit=VIDUR_P99_DELAY, is_strict=True),)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttainmentObjective:
    """Enough requests are good.

    Parameters
    ----------
    share : of the offered requests with objectives, in (0, 1].
    mode : what good means (`metrics.attainment`).
    """

    share: float = DEFAULT_SHARE
    mode: SLOMode = "stream"

    def __post_init__(self) -> None:
        _check_share(self.share)

    @property
    def name(self) -> str:
        return f"attainment:{self.share:g}"

    def judge(self, result: SimulationResult) -> Verdict:
        if unfinished := _unfinished(result):
            return unfinished
        records = _promised(result.records, self.name)
        return _judge_share(records, good_requests(records, mode=self.mode), self.share, self.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeObjective:
    """Enough requests meet TTFT and TPOT jointly.

    Parameters
    ----------
    share : of the offered requests with objectives, in (0, 1]. A request's `tbt` is the limit of its TPOT.
    """

    share: float = DEFAULT_SHARE

    def __post_init__(self) -> None:
        _check_share(self.share)

    @property
    def name(self) -> str:
        return f"distserve:{self.share:g}"

    def judge(self, result: SimulationResult) -> Verdict:
        if unfinished := _unfinished(result):
            return unfinished
        records = _promised(result.records, self.name)
        good = np.array([_meets_ttft(record) and _meets_tpot(record) for record in records])
        return _judge_share(records, good, self.share, "TPOT")


def scheduling_delays(records: Sequence[RequestRecord]) -> Array:
    """Return the seconds from arrival to the first step of each request; infinite where it never ran."""
    delays = (record.scheduling_delay for record in records)
    return np.array([inf if delay is None else delay for delay in delays], dtype=np.float64)


def pooled_gaps(records: Sequence[RequestRecord]) -> Array:
    """Return every gap between two deliveries of the completed requests, seconds."""
    gaps = [np.diff(np.frombuffer(record.delivery_times)) for record in records if record.is_completed]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _judge_share(
    records: Sequence[RequestRecord], good: NDArray[np.bool_], limit: float, tokens: str
) -> Verdict:
    num_prompt_in_time = sum(map(_meets_ttft, records))
    kept = good.sum() / num_prompt_in_time if num_prompt_in_time else 0.0
    detail = (
        f"TTFT met by {num_prompt_in_time / len(records) * 100:.2f} %, "
        f"the rest of the objective ({tokens}) by {kept * 100:.2f} % of these"
    )
    share = float(good.mean())
    return verdict_of((Measure(name="attainment", value=share, limit=limit, unit="share", detail=detail),))


def _meets_ttft(record: RequestRecord) -> bool:
    if not record.is_completed:
        return False
    limit = record.slo.ttft if record.slo else None
    return limit is None or (record.ttft is not None and record.ttft <= limit + TOLERANCE)


def _meets_tpot(record: RequestRecord) -> bool:
    limit = record.slo.tbt if record.slo else None
    return limit is None or record.tpot is None or record.tpot <= limit + TOLERANCE


def _promised(records: Sequence[RequestRecord], name: str) -> list[RequestRecord]:
    promised = [record for record in records if record.slo is not None and not record.slo.is_empty]
    if not promised:
        raise ConfigError(
            f"the objective {name} counts requests that keep their own objectives, but none has any; give "
            "--slo-ttft-ms, --slo-tbt-ms or --slo-config"
        )
    return promised


def _unfinished(result: SimulationResult) -> Verdict | None:
    if result.is_complete and len(result.records) == result.num_requests:
        return None
    num_ended = len(result.records)
    return Verdict(
        is_met=False, reason=f"the run was not finished: {num_ended} of {result.num_requests} requests ended"
    )


def _percentile(values: Array, p: float) -> float:
    if not values.size:
        return 0.0
    if not np.isfinite(values).all():  # infinities have no point between them
        return float(np.percentile(values, p, method="higher"))
    return percentile(values, p)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ConfigError(f"the share of good requests is {share:g}; it must lie in (0, 1], such as 0.9")


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
        near = difflib.get_close_matches(name, OBJECTIVES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(OBJECTIVES)}"
        raise ConfigError(f"unknown objective {text!r}; {hint}")
    takes_share = name in ("attainment", "distserve")
    if colon and not takes_share:
        raise ConfigError(f"the objective {name} takes no share, got {text!r}")
    try:
        share = float(argument) if colon else DEFAULT_SHARE
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
