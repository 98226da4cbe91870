"""Count what speculation plans, and what comes of it: acceptance, draft lengths, goodput."""

from __future__ import annotations

from onbeat.core.step import DraftStats
from onbeat.metrics.buckets import DRAFT_LENGTHS
from onbeat.metrics.histogram import Histogram

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


class SpeculationCounts:
    """Counts steps that had decode rows while drafts could be planned; without speculation there are none.

    Attributes
    ----------
    length : drafts planned for a decode row, none included.
    drafted_at : index j counts the drafts verified at position j of their row, the first at 0.
    accepted_at : likewise, those accepted.
    num_tokens : output tokens that decode rows delivered.
    expected_tokens : what they were expected to deliver when their steps were planned.
    goodput : output tokens of decode rows / step time, of late.
    predicted_goodput : expected tokens / predicted step time, of late; the planner chooses drafts by it.
    """

    def __init__(self) -> None:
        self.length = Histogram(DRAFT_LENGTHS)
        self.drafted_at: list[int] = []
        self.accepted_at: list[int] = []
        self.num_tokens = 0
        self.expected_tokens = 0.0
        self.goodput = RecentRate()
        self.predicted_goodput = RecentRate()

    @property
    def num_drafts(self) -> int:
        """Rows that verified drafts."""
        return self.drafted_at[0] if self.drafted_at else 0

    @property
    def num_drafted_tokens(self) -> int:
        """Drafts verified."""
        return sum(self.drafted_at)

    @property
    def num_accepted_tokens(self) -> int:
        """Of these, drafts accepted."""
        return sum(self.accepted_at)

    def on_step(self, drafts: DraftStats, seconds: float, predicted_seconds: float | None) -> None:
        """Count a step.

        Parameters
        ----------
        seconds, predicted_seconds : its length, and what the step-time model expected; None without a model.
        """
        for length, num_rows in enumerate(drafts.lengths):
            if num_rows:
                self.length.observe_times(length, num_rows)
        _add(self.drafted_at, drafts.drafted_at)
        _add(self.accepted_at, drafts.accepted_at)
        self.accepted_at += [0] * (len(self.drafted_at) - len(self.accepted_at))
        self.num_tokens += drafts.num_tokens
        self.expected_tokens += drafts.expected_tokens
        self.goodput.add(drafts.num_tokens, seconds)
        if predicted_seconds is not None:
            self.predicted_goodput.add(drafts.expected_tokens, predicted_seconds)


def _add(totals: list[int], counts: list[int]) -> None:
    """Add counts by position; totals grow with the longest."""
    totals += [0] * (len(counts) - len(totals))
    for position, count in enumerate(counts):
        totals[position] += count
