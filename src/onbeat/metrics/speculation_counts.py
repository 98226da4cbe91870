"""Count what speculation plans, and what comes of it: acceptance, draft lengths, goodput."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from onbeat.core.step import DraftStats
from onbeat.metrics.declare import counter, histogram, shown
from onbeat.metrics.histogram import DRAFT_LENGTHS, Histogram

GOODPUT_MEMORY = 64
"""Steps over which goodput forgets."""


class RecentRate:
    """Tokens per second of the last steps, older ones counting less and less."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Count a step."""
        kept = 1 - 1 / GOODPUT_MEMORY
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def per_second(self) -> float | None:
        """Tokens per second; None before any time has passed."""
        return self._tokens / self._seconds if self._seconds > 0 else None


@dataclass(slots=True)
class SpeculationCounts:
    """Counts steps that had decode rows while drafts could be planned; without speculation there are none."""

    length: Histogram = histogram(
        "spec_draft_length", "drafts planned for a decode row, rows with none included", DRAFT_LENGTHS
    )
    drafted_at: Counter[int] = counter(
        "spec_draft_tokens_at_position_total", "drafts verified, the first of a row at 0", "position"
    )
    accepted_at: Counter[int] = counter(
        "spec_accepted_tokens_at_position_total", "of these, drafts accepted", "position"
    )
    num_tokens: int = counter("spec_delivered_tokens_total", "output tokens of decode rows")
    expected_tokens: float = counter(
        "spec_expected_tokens_total", "output tokens expected of them when their steps were planned"
    )
    goodput: RecentRate = field(default_factory=RecentRate)
    predicted_goodput: RecentRate = field(default_factory=RecentRate)

    @shown("spec_drafts_total")
    def num_drafts(self) -> int:
        """Decode rows that verified drafts."""
        return self.drafted_at[0]

    @shown("spec_draft_tokens_total")
    def num_drafted_tokens(self) -> int:
        """Drafts verified; the proposer may have fewer than were planned."""
        return self.drafted_at.total()

    @shown("spec_accepted_tokens_total")
    def num_accepted_tokens(self) -> int:
        """Of these, drafts accepted, those behind the end of an answer too."""
        return self.accepted_at.total()

    @shown("spec_goodput_tokens_per_second")
    def goodput_per_second(self) -> float | None:
        """Output tokens of decode rows / step time, over the last 64 steps or so."""
        return self.goodput.per_second

    @shown("spec_goodput_predicted_tokens_per_second")
    def predicted_goodput_per_second(self) -> float | None:
        """Expected tokens / predicted step time, over the same steps; drafts are chosen by it."""
        return self.predicted_goodput.per_second

    def on_step(self, drafts: DraftStats, seconds: float, predicted_seconds: float | None) -> None:
        """Count a step.

        Parameters
        ----------
        seconds, predicted_seconds : its length, and what the step-time model expected; None without a model.
        """
        for length, num_rows in enumerate(drafts.lengths):
            if num_rows:
                self.length.observe_times(length, num_rows)
        for position, count in enumerate(drafts.drafted_at):
            self.drafted_at[position] += count
            self.accepted_at[position] += 0
        for position, count in enumerate(drafts.accepted_at):
            self.accepted_at[position] += count
        self.num_tokens += drafts.num_tokens
        self.expected_tokens += drafts.expected_tokens
        self.goodput.add(drafts.num_tokens, seconds)
        if predicted_seconds is not None:
            self.predicted_goodput.add(drafts.expected_tokens, predicted_seconds)
