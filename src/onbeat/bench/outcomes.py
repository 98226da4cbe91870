"""Numbers of a run with objectives that its latencies do not show: refusals, verdicts, groups of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onbeat.bench.record import SentRequest, Status
from onbeat.metrics.attainment import good_requests, has_objectives
from onbeat.metrics.distribution import Distribution, describe, percentile
from onbeat.metrics.summary import RunSummary, SummaryOptions, summarise, ttft
from onbeat.report.result import Fact, Show
from onbeat.report.run import milliseconds
from onbeat.report.units import exact_percent, number

Seconds = Sequence[float]


def response_times(records: Sequence[SentRequest], options: SummaryOptions) -> dict[str, Distribution]:
    """Return how long callers waited for a refusal, or for their end in the queue."""

    def times(status: Status) -> Distribution:
        seconds = [record.response_time for record in records if record.status is status]
        return describe(np.array(seconds, dtype=np.float64), options.percentiles)

    return {"rejection": times(Status.REJECTED), "expiry": times(Status.EXPIRED)}


def objective_facts(
    summary: RunSummary, times: Mapping[str, Distribution], records: Sequence[SentRequest]
) -> list[Fact]:
    """Return what became of requests with objectives or without an answer.

    Parameters
    ----------
    times : those of `response_times`.
    """
    counts = summary.counts
    is_told = summary.score.num_good is not None or counts.num_rejected + counts.num_expired
    refused = [record for record in records if record.status in {Status.REJECTED, Status.EXPIRED}]
    predicted = _median([r.predicted_ttft for r in refused if r.predicted_ttft is not None])
    retry = _median([r.retry_after for r in refused if r.retry_after is not None])
    admitted = summary.attainment_admitted
    facts = [
        Fact("admitted", counts.num_admitted, "admitted", lambda num: f"{num:,} of {counts.num_offered:,}"),
        Fact("expired", counts.num_expired, "expired in the queue"),
        # Without refusals, the share of all, which stands with the counts of the run.
        Fact(
            "attainment_admitted",
            admitted,
            "objectives met, of admitted" if counts.num_rejected else "",
            exact_percent,
        ),
    ]
    for key, title in (("rejection", "refused after"), ("expiry", "expired after")):
        spread = _spread(times[key])
        facts.append(Fact(f"median_{key}_ms", times[key].median_ms, f"{title} P50 / P99 / max (ms)", spread))
    title = "TTFT predicted for the refused, median (ms)"
    facts.append(Fact("median_rejected_predicted_ttft_ms", milliseconds(predicted), title))
    facts.append(Fact("median_retry_after_ms", milliseconds(retry)))
    return facts if is_told else [fact._replace(title="") for fact in facts]


def verdict_facts(records: Sequence[SentRequest], options: SummaryOptions) -> list[Fact]:
    """Compare the server's own score of each request with the client's; nothing where it gave none.

    Only completed requests with objectives are compared: of others both say the same.
    """
    scored = [
        (record, record.verdict)
        for record in records
        if record.verdict is not None and record.is_completed and has_objectives(record)
    ]
    if not scored:
        return []
    own = good_requests([record for record, _ in scored], mode=options.slo_mode).tolist()
    pairs = [
        (good, verdict.is_met)
        for good, (_, verdict) in zip(own, scored, strict=True)
        if verdict.is_met is not None
    ]
    both = [(ttft(record), verdict.ttft) for record, verdict in scored if verdict.ttft is not None]
    errors = [
        abs(verdict.predicted_ttft - verdict.ttft) / verdict.ttft
        for _, verdict in scored
        if verdict.predicted_ttft is not None and verdict.ttft
    ]
    agreement, differences = _share(good == met for good, met in pairs), [a - b for a, b in both]
    client, server = (milliseconds(_median([pair[place] for pair in both])) for place in (0, 1))
    of_all = f" of {len(scored):,}"
    ttfts = ("TTFT here / in the server, median (ms)", lambda here: f"{number(here)} / {number(server)}")
    met = ("met by the server's verdict" if agreement != 1 else "", exact_percent)
    return [
        Fact("requests", len(scored)),
        Fact("agreement", agreement, "same verdict by the server", lambda own: exact_percent(own) + of_all),
        Fact("met", _share(met for _, met in pairs), *met),
        Fact("only_client_good", sum(good and not met for good, met in pairs)),
        Fact("only_server_met", sum(met and not good for good, met in pairs)),
        Fact("relegated", sum(verdict.is_relegated for _, verdict in scored), "relegated to best effort"),
        Fact("median_client_ttft_ms", client, *ttfts),
        Fact("median_server_ttft_ms", server),
        Fact("median_ttft_difference_ms", milliseconds(_median(differences))),
        Fact(
            "median_predicted_ttft_error",
            _median(errors),
            "error of the predicted TTFT, median",
            exact_percent,
        ),
    ]


def summarise_groups(
    records: Sequence[SentRequest], *, duration: float, options: SummaryOptions
) -> dict[str, RunSummary]:
    """Return the numbers of each group of prompts by its name; {} where there are none.

    Parameters
    ----------
    duration : of the run, seconds.
    """
    names = sorted({record.group for record in records if record.group is not None})
    return {
        name: summarise(
            [record for record in records if record.group == name], duration=duration, options=options
        )
        for name in names
    }


def group_errors(records: Sequence[SentRequest]) -> list[dict[str, Any]]:
    """Return failures and rejections grouped by cause, the most frequent first, each with an example."""
    groups: dict[tuple[str, str], list[SentRequest]] = {}
    for record in records:
        if record.cause is not None:
            groups.setdefault((record.status.value, record.cause), []).append(record)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [
        {"status": status, "cause": cause, "count": len(members), "example": members[0].detail}
        for (status, cause), members in ordered
    ]


def _spread(times: Distribution) -> Show:
    tail = times.statistics_ms.get("p99")
    return lambda median: " / ".join(map(number, (median, tail, times.max_ms)))


def _median(values: Seconds) -> float | None:
    return percentile(values, 50) if values else None


def _share(flags: Iterable[bool]) -> float | None:
    values = list(flags)
    return sum(values) / len(values) if values else None
