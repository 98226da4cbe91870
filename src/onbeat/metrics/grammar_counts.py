"""Count what grammars did."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.core.step import StepStats


@dataclass(slots=True)
class GrammarCounts:
    """Tokens that grammars were asked about, and what it took."""

    num_tokens: int = 0
    num_redrawn: int = 0
    """Of these, refused, and drawn again."""
    seconds: float = 0.0

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        self.num_tokens += stats.num_guided_tokens
        self.num_redrawn += stats.num_redrawn_tokens
        self.seconds += stats.guide_seconds
