"""Prometheus names for grammars."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from onbeat.metrics.families import counter, counters
from onbeat.metrics.grammar_counts import GrammarCounts


def grammar_metrics(counts: GrammarCounts) -> Iterator[Metric]:
    """Yield the metrics of answers that must match something."""
    yield counters(
        "onbeat_guided_tokens",
        "Tokens under a grammar, as sampled: accepted, or refused and drawn again",
        ("result",),
        {("accepted",): counts.num_tokens - counts.num_redrawn, ("refused",): counts.num_redrawn},
    )
    yield counter("onbeat_guide_seconds", "Seconds that grammars took of steps", counts.seconds)
