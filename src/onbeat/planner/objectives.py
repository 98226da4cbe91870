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
from dataclasses import dataclass, replace
from math import floor, inf
from typing import Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE, SLO, SLOMode
from onbeat.metrics.attainment import TOLERANCE, USUAL_SHARE, Flags, good_requests, has_objectives
from onbeat.metrics.distribution import percentile
from onbeat.metrics.record import RequestRecord
from onbeat.report.units import duration
from onbeat.simulator.result import SimulationResult
from onbeat.workload.job_kinds import summarise_calls
from onbeat.workload.offered import OfferedLoad

Array = NDArray[np.float64]
JOBS_KEPT = "jobs kept"
"""Name of a share that is of jobs, not of requests."""
Unit = Literal["s", "share"]

# ---- what the search asks of an objective, and what it answers ----


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
    binds: str = ""
    """Of a share: what most of the others miss, in words."""

    @property
    def is_met(self) -> bool:
        if self.unit == "share":
            return self.value >= self.limit
        return self.value < self.limit if self.is_strict else self.value <= self.limit

    @property
    def pressure(self) -> float:
        """How near the limit is: above 1 it is missed. Shares count what is missed, not what is kept."""
        value, limit = (self.value, self.limit) if self.unit == "s" else (1 - self.value, 1 - self.limit)
        return value / limit if limit > 0 else (inf if value > 0 else 0.0)

    def __str__(self) -> str:
        kept, missed = (">=", "<") if self.unit == "share" else ("<", ">")
        sign = kept if self.is_met else missed
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
    binds: str = ""
    """What most requests that were not good missed, as `count_missed` names it, where somebody asked."""
    beyond: str = ""
    """See `SimulationResult.beyond`."""


def verdict_of(measures: tuple[Measure, ...]) -> Verdict:
    """Return the verdict that some measures make up: all must be met; the tightest is the reason."""
    missed = [measure for measure in measures if not measure.is_met]
    limiting = max(missed or measures, key=lambda measure: measure.pressure)
    return Verdict(is_met=not missed, reason=str(limiting), measures=measures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """So many may miss a limit; with one more, the objective is missed whatever comes."""

    what: str
    """`gaps above 100 ms`"""
    allowed: int
    count: Callable[[Sequence[RequestRecord]], int]
    """How many of some ended requests (or of their gaps) missed it."""
    is_lost: Callable[[RequestRecord, float], bool] = lambda _record, _now: False
    """Whether a request that has not ended is certain to miss it, at a time in the run."""


def allowed_above(num_values: int, percentile: float) -> int:
    """Return how many values may lie above a limit before their percentile does for certain.

    Parameters
    ----------
    percentile : in [0, 100], interpolated linearly (`metrics.distribution.percentile`).
    """
    return num_values - 1 - floor((num_values - 1) * percentile / 100)


class Objective(Protocol):
    """Judges a finished run."""

    @property
    def name(self) -> str:
        """As the command line spells it."""

    def judge(self, result: SimulationResult) -> Verdict:
        """Say whether the run kept the objective; one that was not finished did not."""

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        """Return what the objective allows of a run of this load; beyond that it is missed for certain.

        Raises
        ------
        ConfigError : it cannot judge this load.
        """


def unfinished(result: SimulationResult) -> Verdict | None:
    """Return the verdict on a run that did not come to its end; None for one that did."""
    if result.is_complete and len(result.records) == result.num_requests:
        return None
    num_ended = len(result.records)
    return Verdict(
        is_met=False, reason=f"the run was not finished: {num_ended} of {result.num_requests} requests ended"
    )


# ---- percentiles of a whole run ----


def scheduling_delays(records: Sequence[RequestRecord]) -> Array:
    """Return the seconds from arrival to the first step of each request; infinite where it never ran."""
    delays = (record.scheduling_delay for record in records)
    return np.array([inf if delay is None else delay for delay in delays], dtype=np.float64)


def pooled_gaps(records: Sequence[RequestRecord]) -> Array:
    """Return every gap between two deliveries of the completed requests, seconds."""
    gaps = [np.diff(np.frombuffer(record.delivery_times)) for record in records if record.is_completed]
    return np.concatenate(gaps) if gaps else np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A percentile of what a run shows that must not be above a limit."""

    name: str
    percentile: int
    seconds: float
    of_gaps: bool = False
    """Whether it is of gaps, not of scheduling delays."""
    is_strict: bool = False
    """Whether the limit itself already misses it."""

    def values(self, records: Sequence[RequestRecord]) -> Array:
        """Return the values of some requests, seconds."""
        return pooled_gaps(records) if self.of_gaps else scheduling_delays(records)

    def count(self, records: Sequence[RequestRecord]) -> int:
        """Return how many values of some requests missed it."""
        values = self.values(records)
        return int((values >= self.seconds if self.is_strict else values > self.seconds).sum())

    def measure(self, records: Sequence[RequestRecord]) -> Measure:
        """Return what all requests of a run make of it."""
        value = _percentile(self.values(records), self.percentile)
        return Measure(name=self.name, value=value, limit=self.seconds, is_strict=self.is_strict)

    def allowance(self, load: OfferedLoad) -> Allowance:
        """Return how many may miss it."""
        number = int(load.num_output_tokens.sum()) - len(load) if self.of_gaps else len(load)
        return Allowance(
            what=f"{'gaps' if self.of_gaps else 'scheduling delays'} above {duration(self.seconds)}",
            allowed=allowed_above(number, self.percentile) if number else 0,
            count=self.count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PercentileObjective:
    """Percentiles of the run keep their limits."""

    name: str
    limits: tuple[Limit, ...]

    def judge(self, result: SimulationResult) -> Verdict:
        return unfinished(result) or verdict_of(tuple(each.measure(result.records) for each in self.limits))

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        return tuple(each.allowance(load) for each in self.limits)


def sarathi(tbt: float) -> PercentileObjective:
    """Return the objective of no stalls and no growing queue.

    Parameters
    ----------
    tbt : limit of the 99th percentile over the gaps of all requests, seconds.
    """
    gaps = Limit(name="P99 TBT", percentile=99, seconds=tbt, of_gaps=True)
    delays = Limit(name="median scheduling delay", percentile=50, seconds=2.0)
    return PercentileObjective(name="sarathi", limits=(gaps, delays))


VIDUR = PercentileObjective(
    name="vidur",
    limits=(Limit(name="P99 scheduling delay", percentile=99, seconds=5.0, is_strict=True),),
)
"""No growing queue."""


def _percentile(values: Array, p: float) -> float:
    if not values.size:
        return 0.0
    if not np.isfinite(values).all():  # infinities have no point between them
        return float(np.percentile(values, p, method="higher"))
    return percentile(values, p)


# ---- shares of requests ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareObjective:
    """Enough requests are good.

    Parameters
    ----------
    share : of the offered requests with objectives, in (0, 1].
    mode : what good means (`metrics.attainment`).
    is_joint : whether good means TTFT and TPOT instead, as in DistServe; `tbt` is the limit of a TPOT.
    """

    share: float = USUAL_SHARE
    mode: SLOMode = "stream"
    is_joint: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"the share of good requests is {self.share:g}; it must lie in (0, 1], such as 0.9"
            )

    @property
    def name(self) -> str:
        return f"{'distserve' if self.is_joint else 'attainment'}:{self.share:g}"

    def of(self, load: OfferedLoad) -> ShareObjective:
        """Return what it is of a load: where jobs have deadlines and their calls no objectives, of jobs."""
        rows, has_own = load.jobs, bool(load.classes) or self.is_joint
        if rows is None or has_own or all(job.deadline == inf for job in rows.jobs):
            return self
        return JobsObjective(share=self.share, mode=self.mode)

    def refuse(self) -> NoReturn:
        """Raise ConfigError for a load in which nothing has objectives."""
        raise ConfigError(
            f"the objective {self.name} counts requests that keep their own objectives, but none has any; "
            "give --slo-ttft-ms, --slo-tbt-ms or --slo-config, or jobs a --job-deadline-ms"
        )

    def good(self, records: Sequence[RequestRecord]) -> Flags:
        """Return which of some requests are good."""
        if not self.is_joint:
            return good_requests(records, mode=self.mode)
        return np.array([_meets_ttft(record) and _meets_tpot(record) for record in records], dtype=np.bool_)

    def judge(self, result: SimulationResult) -> Verdict:
        if (missing := unfinished(result)) and not (result.is_complete and result.jobs):
            return missing
        records = list(filter(has_objectives, result.records))
        num_never_sent = result.num_requests - len(result.records)  # of jobs that were lost
        assert records, "a load without objectives is refused (`allowances`)"
        good = self.good(records)
        num_prompt_in_time = sum(map(_meets_ttft, records))
        kept = good.sum() / num_prompt_in_time if num_prompt_in_time else 0.0
        ttfts = [record.ttft for record in records if record.ttft is not None]
        slowest = f", at most {max(ttfts):.3f} s" if ttfts else ""
        is_first = len(records) - num_prompt_in_time >= num_prompt_in_time - good.sum()
        measure = Measure(
            name="attainment",
            value=float(good.sum()) / (len(records) + num_never_sent),
            limit=self.share,
            unit="share",
            detail=f"TTFT met by {num_prompt_in_time / len(records) * 100:.2f} %{slowest}; the rest of the "
            f"objective ({'TPOT' if self.is_joint else self.mode}) by {kept * 100:.2f} % of these",
            binds="time to the first token (TTFT)" if is_first else "time between tokens (TBT)",
        )
        return verdict_of((measure,))

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        num_with_slo = 0
        if load.class_ids is not None:
            has_slo = np.array([not each.slo.is_empty for each in load.classes])
            num_with_slo = int(has_slo[load.class_ids].sum())
        if not num_with_slo:
            self.refuse()

        def count(records: Sequence[RequestRecord]) -> int:
            judged = list(filter(has_objectives, records))
            return len(judged) - int(self.good(judged).sum())

        allowed = floor(num_with_slo * (1 - self.share) + 1e-9)  # so that 0.1 of 10 requests is 1
        return (
            Allowance(what="requests late or refused", allowed=allowed, count=count, is_lost=_is_overdue),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsObjective(ShareObjective):
    """Enough jobs are kept: all their calls end by the job's deadline."""

    def judge(self, result: SimulationResult) -> Verdict:
        if not result.is_complete or result.jobs is None:
            return Verdict(is_met=False, reason="the run was not finished")
        calls = {int(each.request_id): each for each in result.records}
        jobs = summarise_calls(result.jobs, calls).values()
        late, lost = sum(each.late for each in jobs), sum(each.lost for each in jobs)
        measure = Measure(
            name=JOBS_KEPT,
            value=1 - (late + lost) / sum(each.offered for each in jobs),
            limit=self.share,
            unit="share",
            detail=f"{late:,} late, {lost:,} lost",
            binds="deadline of the job",
        )
        return verdict_of((measure,))

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:  # noqa: ARG002 -- no call tells
        return ()


def _is_overdue(record: RequestRecord, now: float) -> bool:
    """Whether a request has no first token, and the time for it is over."""
    limit = record.slo.ttft if record.slo else None
    return limit is not None and not record.delivery_times and now > record.arrival + limit + TOLERANCE


def _meets_ttft(record: RequestRecord) -> bool:
    if not record.is_completed:
        return False
    limit = record.slo.ttft if record.slo else None
    return limit is None or (record.ttft is not None and record.ttft <= limit + TOLERANCE)


def _meets_tpot(record: RequestRecord) -> bool:
    limit = record.slo.tbt if record.slo else None
    return limit is None or record.tpot is None or record.tpot <= limit + TOLERANCE


def with_longer_objectives(load: OfferedLoad, factor: float) -> OfferedLoad:
    """Return the same requests with objectives so many times as long."""

    def longer(seconds: float | None) -> float | None:
        return None if seconds is None else min(max(seconds * factor, SHORTEST_OBJECTIVE), LONGEST_OBJECTIVE)

    classes = [
        replace(each, slo=SLO(ttft=longer(each.slo.ttft), tbt=longer(each.slo.tbt), e2e=longer(each.slo.e2e)))
        for each in load.classes
    ]
    return replace(load, classes=tuple(classes))


# ---- names ----


def _named_sarathi(tbt: float | None) -> Objective:
    if tbt is None:
        raise ConfigError("the objective sarathi limits the P99 of all gaps; give the limit: --slo-tbt-ms")
    return sarathi(tbt)


OBJECTIVES: dict[str, Callable[[float | None], Objective]] = {
    "sarathi": _named_sarathi,
    "vidur": lambda _tbt: VIDUR,
}
"""By name, those that take no share: made from the TBT objective."""
SHARES = {"attainment": False, "distserve": True}
"""By name, those that take a share: `ShareObjective.is_joint`."""


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
    if name in OBJECTIVES:
        if colon:
            raise ConfigError(f"the objective {name} takes no share, got {text!r}")
        return OBJECTIVES[name](tbt)
    if name not in SHARES:
        known = [*OBJECTIVES, *SHARES]
        near = likely_meant(name, known)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"unknown objective {text!r}; {hint}")
    try:
        share = float(argument) if colon else USUAL_SHARE
    except ValueError as error:
        raise ConfigError(f"expected a share such as {name}:0.9, got {text!r}") from error
    return ShareObjective(share=share, mode=mode, is_joint=SHARES[name])
