"""What became of the requests of a simulated run, beside their latencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from onbeat.core.request import FinishReason
from onbeat.core.slo import Fate
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import GroupSummary, RunSummary, with_expired


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcomes:
    """What became of some requests of a run."""

    num_relegated: int
    """Ended as best effort."""
    num_infeasible: int | None
    """Even an idle machine would miss their objectives; None where no request carries any."""
    median_predicted_ttft_error: float | None
    """Median of |predicted - actual| / actual TTFT; None where nothing was predicted."""

    @property
    def values(self) -> dict[str, float | None]:
        """As a file has them."""
        return {
            "relegated": self.num_relegated,
            "hopeless": self.num_infeasible,
            "median_predicted_ttft_error": self.median_predicted_ttft_error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcomes:
    """A run whose rejected, expired, relegated, failed and infeasible requests are told apart."""

    summary: RunSummary
    """Expired requests are counted apart from failed ones."""
    whole: GroupOutcomes
    classes: Mapping[str, GroupOutcomes]
    """By the name of the class of objectives."""


def tell_outcomes(
    summary: RunSummary, records: Sequence[RequestRecord], is_infeasible: Callable[[RequestRecord], bool]
) -> RunOutcomes:
    """Tell rejected, expired, relegated, failed and infeasible requests apart, in a run and in its classes.

    Parameters
    ----------
    summary : of the same records.
    is_infeasible : whether even an idle machine would miss a request's objectives.
    """
    expired = [record for record in records if record.finish_reason == FinishReason.EXPIRED]
    return RunOutcomes(
        summary=with_expired(summary, expired),
        whole=_of_some(summary, records, is_infeasible),
        classes={
            name: _of_some(own, [record for record in records if record.request_class == name], is_infeasible)
            for name, own in summary.classes.items()
        },
    )


def _of_some(
    summary: GroupSummary, records: Sequence[RequestRecord], is_infeasible: Callable[[RequestRecord], bool]
) -> GroupOutcomes:
    return GroupOutcomes(
        num_relegated=sum(record.fate is Fate.RELEGATED for record in records),
        num_infeasible=None if summary.score.num_good is None else sum(map(is_infeasible, records)),
        median_predicted_ttft_error=_median_prediction_error(records),
    )


def _median_prediction_error(records: Sequence[RequestRecord]) -> float | None:
    errors = [
        abs(record.predicted_ttft - record.ttft) / record.ttft
        for record in records
        if record.predicted_ttft is not None and record.ttft
    ]
    return median(errors) if errors else None
