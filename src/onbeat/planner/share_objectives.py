"""Objectives that count requests: how many must keep their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE, SLO, SLOMode
from onbeat.metrics.attainment import TOLERANCE, USUAL_SHARE, Flags, good_requests, has_objectives
from onbeat.metrics.record import RequestRecord
from onbeat.planner.objective import Allowance, Measure, Verdict, unfinished, verdict_of
from onbeat.simulator.result import SimulationResult
from onbeat.workload.offered import OfferedLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class AttainmentObjective:
    """Enough requests are good.

    Parameters
    ----------
    share : of the offered requests with objectives, in (0, 1].
    mode : what good means (`metrics.attainment`).
    """

    share: float = USUAL_SHARE
    mode: SLOMode = "stream"

    def __post_init__(self) -> None:
        _check_share(self.share)

    @property
    def name(self) -> str:
        return f"attainment:{self.share:g}"

    def judge(self, result: SimulationResult) -> Verdict:
        if missing := unfinished(result):
            return missing
        records = _with_objectives(result.records, self.name)
        return _judge_share(records, good_requests(records, mode=self.mode), self.share, self.mode)

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        return (_allowed_bad(load, self.share, lambda records: good_requests(records, mode=self.mode)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeObjective:
    """Enough requests meet TTFT and TPOT jointly.

    Parameters
    ----------
    share : of the offered requests with objectives, in (0, 1]. A request's `tbt` is the limit of its TPOT.
    """

    share: float = USUAL_SHARE

    def __post_init__(self) -> None:
        _check_share(self.share)

    @property
    def name(self) -> str:
        return f"distserve:{self.share:g}"

    def judge(self, result: SimulationResult) -> Verdict:
        if missing := unfinished(result):
            return missing
        records = _with_objectives(result.records, self.name)
        return _judge_share(records, _meets_both(records), self.share, "TPOT")

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        return (_allowed_bad(load, self.share, _meets_both),)


def _allowed_bad(
    load: OfferedLoad, share: float, good: Callable[[Sequence[RequestRecord]], Flags]
) -> Allowance:
    num_with_slo = 0
    if load.class_ids is not None:
        has_slo = np.array([not each.slo.is_empty for each in load.classes])
        num_with_slo = int(has_slo[load.class_ids].sum())
    if not num_with_slo:
        raise ConfigError(
            f"an objective over the share of good requests needs requests with objectives of their own, but "
            f"the {load.name} load has none; give --slo-ttft-ms, --slo-tbt-ms or --slo-config"
        )

    def count(records: Sequence[RequestRecord]) -> int:
        judged = [record for record in records if has_objectives(record)]
        return len(judged) - int(good(judged).sum())

    allowed = floor(num_with_slo * (1 - share) + 1e-9)  # so that 0.1 of 10 requests is 1
    return Allowance(what="requests late or refused", allowed=allowed, count=count, is_lost=_is_overdue)


def _is_overdue(record: RequestRecord, now: float) -> bool:
    """Whether a request has no first token, and the time for it is over."""
    limit = record.slo.ttft if record.slo else None
    return limit is not None and not record.delivery_times and now > record.arrival + limit + TOLERANCE


def _judge_share(records: Sequence[RequestRecord], good: Flags, limit: float, tokens: str) -> Verdict:
    num_prompt_in_time = sum(map(_meets_ttft, records))
    kept = good.sum() / num_prompt_in_time if num_prompt_in_time else 0.0
    ttfts = [record.ttft for record in records if record.ttft is not None]
    slowest = f", at most {max(ttfts):.3f} s" if ttfts else ""
    detail = (
        f"TTFT met by {num_prompt_in_time / len(records) * 100:.2f} %{slowest}; "
        f"the rest of the objective ({tokens}) by {kept * 100:.2f} % of these"
    )
    share = float(good.mean())
    is_first = len(records) - num_prompt_in_time >= num_prompt_in_time - good.sum()
    binds = "time to the first token (TTFT)" if is_first else "time between tokens (TBT)"
    measure = Measure(name="attainment", value=share, limit=limit, unit="share", detail=detail, binds=binds)
    return verdict_of((measure,))


def _meets_both(records: Sequence[RequestRecord]) -> Flags:
    return np.array([_meets_ttft(record) and _meets_tpot(record) for record in records], dtype=np.bool_)


def _meets_ttft(record: RequestRecord) -> bool:
    if not record.is_completed:
        return False
    limit = record.slo.ttft if record.slo else None
    return limit is None or (record.ttft is not None and record.ttft <= limit + TOLERANCE)


def _meets_tpot(record: RequestRecord) -> bool:
    limit = record.slo.tbt if record.slo else None
    return limit is None or record.tpot is None or record.tpot <= limit + TOLERANCE


def _with_objectives(records: Sequence[RequestRecord], name: str) -> list[RequestRecord]:
    judged = [record for record in records if has_objectives(record)]
    if not judged:
        raise ConfigError(
            f"the objective {name} counts requests that keep their own objectives, but none has any; give "
            "--slo-ttft-ms, --slo-tbt-ms or --slo-config"
        )
    return judged


def with_longer_objectives(load: OfferedLoad, factor: float) -> OfferedLoad:
    """Return the same requests with objectives so many times as long."""

    def longer(seconds: float | None) -> float | None:
        return None if seconds is None else min(max(seconds * factor, SHORTEST_OBJECTIVE), LONGEST_OBJECTIVE)

    classes = [
        replace(each, slo=SLO(ttft=longer(each.slo.ttft), tbt=longer(each.slo.tbt), e2e=longer(each.slo.e2e)))
        for each in load.classes
    ]
    return replace(load, classes=tuple(classes))


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ConfigError(f"the share of good requests is {share:g}; it must lie in (0, 1], such as 0.9")
