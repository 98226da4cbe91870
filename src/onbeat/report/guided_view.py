"""What grammars do in a running server, from its metrics. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.metrics.exposition import ScrapeWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedView:
    """Answers that must match something, of late."""

    rows: float | None
    """Rows of a step under a grammar, on average."""
    redrawn: float | None
    """Of their tokens, those that the grammar refused."""
    step_share: float | None
    """Of the steps' time, what grammars took."""
    compile_p99: float | None
    """Seconds of a new grammar."""
    refused: float
    """Requests since the start."""


def guided_view(recent: ScrapeWindow, longer: ScrapeWindow) -> GuidedView | None:
    """Return what there is to show; None before any request had a grammar."""
    new, tokens = recent.new, "onbeat_guided_tokens_total"
    refused = new.total("onbeat_grammar_refusals_total") or 0.0
    if not (new.total(tokens) or refused):
        return None
    asked = recent.delta(tokens)
    return GuidedView(
        rows=recent.share(tokens, "onbeat_steps_total"),
        redrawn=(recent.delta(tokens, result="refused") or 0.0) / asked if asked else None,
        step_share=recent.share("onbeat_guide_seconds_total", "onbeat_step_seconds_sum"),
        compile_p99=longer.quantile("onbeat_grammar_compile_seconds", 0.99),
        refused=refused,
    )
