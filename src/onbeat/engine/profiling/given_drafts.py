"""Drafts that cost nothing to make: measured steps show what it takes to verify them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from onbeat.engine.input_batch import InputBatch
from onbeat.engine.speculation.proposer import DraftRow, Proposer


class GivenDrafts(Proposer):
    """Proposes any tokens, as many as are asked for.

    Parameters
    ----------
    token_ids : proposed in turn.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = cycle(token_ids)

    def admit(self, batch: InputBatch, slot: int, num_computed_tokens: int) -> None:
        """Take in a request: there is nothing to remember."""

    def release(self, slot: int) -> None:
        """Forget a request: nothing was remembered."""

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:  # noqa: ARG002
        """Return the drafts of each row."""
        return [list(islice(self._token_ids, row.num_drafts)) for row in rows]

    def close(self) -> None:
        """Let go of nothing."""
