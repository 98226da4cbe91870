"""Prometheus names for speculation, labelled by what proposes the drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from onbeat.metrics.families import counter, counters, gauge, histogram
from onbeat.metrics.speculation_counts import SpeculationCounts


def speculation_metrics(counts: SpeculationCounts, proposer: str) -> Iterator[Metric]:
    """Yield the metrics of a server that speculates."""
    labels = {"proposer": proposer}
    for name, text, value in (
        ("drafts", "Decode rows that verified drafts", counts.num_drafts),
        ("draft_tokens", "Draft tokens verified", counts.num_drafted_tokens),
        ("accepted_tokens", "Of these, tokens accepted", counts.num_accepted_tokens),
        ("delivered_tokens", "Output tokens of decode rows", counts.num_tokens),
        ("expected_tokens", "Output tokens expected of decode rows", counts.expected_tokens),
    ):
        yield counter(f"onbeat_spec_{name}", text, value, labels)
    for name, text, values in (
        ("draft_tokens_at_position", "Draft tokens verified, the first of a row at 0", counts.drafted_at),
        ("accepted_tokens_at_position", "Of these, tokens accepted", counts.accepted_at),
    ):
        by_position = {(proposer, position): number for position, number in positions(values)}
        yield counters(f"onbeat_spec_{name}", text, ("proposer", "position"), by_position)
    yield histogram("onbeat_spec_draft_length", "Drafts planned for a decode row", counts.length, labels)
    for name, text, rate in (
        ("goodput", "Output tokens of decode rows / step time, of late", counts.goodput),
        (
            "goodput_predicted",
            "Expected tokens / predicted step time, of late",
            counts.predicted_goodput,
        ),
    ):
        if rate.per_second is not None:
            yield gauge(f"onbeat_spec_{name}_tokens_per_second", text, rate.per_second, labels)


def positions(values: Sequence[int]) -> list[tuple[str, int]]:
    """Return counts by position with the position as a label."""
    return [(str(position), number) for position, number in enumerate(values)]
