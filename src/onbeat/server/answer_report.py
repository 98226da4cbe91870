"""What an answer says of itself: the tokens that it took, and how its objectives were kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, field
from numpy.typing import NDArray

from onbeat.core.slo import SLO, Fate, SLOMode
from onbeat.metrics.attainment import GAP_PERCENTILE, TOLERANCE, good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.server.choices import Choice, ChoiceDelta
from onbeat.server.errors import milliseconds


class AnswerTokens(NamedTuple):
    """The tokens of an answer."""

    prompt: int
    cached: int
    output: int
    reasoning: int
    accepted: int
    """Drafts that are in the answer; 0 without speculation."""
    rejected: int


def counts_of(choices: Sequence[Choice]) -> AnswerTokens:
    """Count the tokens of a request: each prompt counts once, however many choices it has."""
    first_choices = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    num_accepted = sum(each.num_accepted_tokens for each in choices)
    return AnswerTokens(
        prompt=sum(len(choice.request.prompt_token_ids) for choice in first_choices),
        cached=sum(choice.num_cached_tokens for choice in first_choices),
        output=sum(each.num_output_tokens for each in choices),
        reasoning=sum(each.num_reasoning_tokens for each in choices),
        accepted=num_accepted,
        rejected=sum(each.num_drafted_tokens for each in choices) - num_accepted,
    )


def counts_up_to(delta: ChoiceDelta) -> AnswerTokens:
    """Count the tokens of one choice, its output up to a delta."""
    return AnswerTokens(
        len(delta.choice.request.prompt_token_ids),
        delta.choice.num_cached_tokens,
        delta.num_output_tokens,
        delta.num_reasoning_tokens,
        delta.num_accepted_tokens,
        delta.num_drafted_tokens - delta.num_accepted_tokens,
    )


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: Annotated[
        int,
        Meta(description="Of the completion tokens, those that were drafts; 0 without speculation"),
    ]
    rejected_prediction_tokens: Annotated[
        int, Meta(description="Draft tokens that are not in the answer; they are not completion tokens")
    ]


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(counts: AnswerTokens) -> Usage:
    """Return the usage as completions tell it.

    Without speculation the prediction tokens are 0, as OpenAI's own answers have them.
    """
    return Usage(
        counts.prompt,
        counts.output,
        counts.prompt + counts.output,
        PromptTokensDetails(counts.cached),
        CompletionTokensDetails(counts.reasoning, counts.accepted, counts.rejected),
    )


class JobState(Struct):
    """How the job of a call stands after it."""

    id: str
    calls: int
    elapsed_ms: float | None
    in_calls_ms: float | None
    remaining_ms: float | None
    share_ms: float | None
    replica: str | None
    moved: str | None
    """Why another replica than that of the call before it served the call; null if it was the same."""
    met: bool | None


class SLOReport(Struct):
    """How the objectives were kept; of several choices, by the worst."""

    slo_class: str | None = field(name="class")
    ttft_ms: float | None
    """Measured where events are handed to the connection; so is `tbt_p99_ms`, which is interpolated."""
    engine_ttft_ms: float | None
    """To the end of the step that made the first token: the rest of `ttft_ms` is the server's."""
    predicted_ttft_ms: float | None
    """What the scheduler predicted at the arrival, of requests that ask to be rejected (`shed`)."""
    tbt_p99_ms: float | None = None
    token_attainment: float | None = None
    """Share of tokens that were in time (`gap`: of gaps within tbt)."""
    met: bool = False
    """Whether all objectives were kept."""
    relegated: bool = True
    """Whether its objectives were given up and the request served as best effort."""
    job: JobState | UnsetType = UNSET
    """Only of a call of a job."""


def slo_report(choice: Choice, mode: SLOMode) -> SLOReport | None:
    """Return how a finished choice fared, as the `slo` object of an answer. None without objectives.

    Times are those at which deliveries were handed to the connection; what the network adds is not in them.

    Parameters
    ----------
    mode : what keeping a TBT objective means.
    """
    return None if choice.record is None else record_report(choice.record, mode)


def record_report(record: RequestRecord, mode: SLOMode) -> SLOReport | None:
    """Return how a request fared whose record is complete. None without objectives.

    Parameters
    ----------
    mode : what keeping a TBT objective means.
    """
    slo = record.slo
    if slo is None or slo.is_empty:
        return None
    times = np.asarray(record.delivery_times, dtype=np.float64)
    gaps = np.diff(times)
    return msgspec.structs.replace(
        unjudged_report(record),
        tbt_p99_ms=milliseconds(float(np.percentile(gaps, GAP_PERCENTILE))) if len(gaps) else None,
        token_attainment=_token_attainment(record, gaps, slo, mode),
        met=bool(good_requests([record], mode=mode)[0]),
        relegated=record.fate is Fate.RELEGATED,
    )


def unjudged_report(record: RequestRecord) -> SLOReport:
    """Return the same of a request that was best effort from its arrival on, as its job was late by then."""
    return SLOReport(
        record.request_class,
        milliseconds(record.ttft),
        milliseconds(record.engine_ttft),
        milliseconds(record.predicted_ttft),
    )


def worst_report(reports: Sequence[SLOReport]) -> SLOReport | None:
    """Return the `slo` object of an answer: that of its worst choice. None without any.

    The worst is the first by: objectives not met, fewer tokens in time, later first token.
    """
    return min(reports, key=_goodness, default=None)


def _goodness(report: SLOReport) -> tuple[bool, float, float]:
    attained, ttft = report.token_attainment, report.ttft_ms
    return report.met, 1.0 if attained is None else attained, -(math.inf if ttft is None else ttft)


def _token_attainment(
    record: RequestRecord, gaps: NDArray[np.float64], slo: SLO, mode: SLOMode
) -> float | None:
    """Return the share of tokens (in `gap` mode, of gaps) in time; None where they had no deadline."""
    if slo.tbt is None or not record.is_streamed or not record.delivery_times:
        return None
    if mode == "gap":
        return float(np.mean(gaps <= slo.tbt + TOLERANCE)) if len(gaps) else 1.0
    sizes = np.asarray(record.delivery_sizes, dtype=np.int64)
    times = np.asarray(record.delivery_times, dtype=np.float64)
    first = max(record.delivery_times[0], record.arrival + (slo.ttft or -math.inf))
    # Of a delivery, the tokens below this index had their deadline before it.
    num_overdue = np.ceil((times - first - TOLERANCE) / slo.tbt)
    num_late = np.clip(num_overdue - (np.cumsum(sizes) - sizes), 0, sizes)
    return float(1 - num_late.sum() / sizes.sum())
