"""No drafts of its own: what is left is text that grammars prescribe, which any proposer has besides."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.engine.input_batch import InputBatch
from onbeat.engine.speculation.proposer import DraftRow, Proposer


class NoDrafts(Proposer):
    """Proposes nothing; see `engine.guided_rows.guided_drafts` for what comes in its place."""

    def admit(self, batch: InputBatch, slot: int, num_computed_tokens: int) -> None:
        """Keep nothing of a request."""

    def release(self, slot: int) -> None:
        """Have nothing to forget."""

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:  # noqa: ARG002
        """Return no draft for any row."""
        return [[] for _ in rows]

    def num_available(
        self,
        batch: InputBatch,  # noqa: ARG002
        slots: Sequence[int],
        num_tokens: Sequence[int],  # noqa: ARG002
    ) -> list[int]:
        """Return that there is none."""
        return [0] * len(slots)

    def close(self) -> None:
        """Let go of nothing."""
