"""Requests under a grammar in the model runner: guides, drafts, and what the scheduler is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from onbeat.core.errors import EngineError
from onbeat.core.request import Grammar
from onbeat.core.step import GuidedRows
from onbeat.engine.guided_draw import GuideOutcome
from onbeat.engine.sampling_row import SamplingRow
from onbeat.text.grammar.guide import GrammarTooComplex, Guide

_MOST_FORCED = 64
"""Tokens that are told to be forced; a step verifies fewer."""


class Guides(Protocol):
    """Where guides come from."""

    def guide(self, grammar: Grammar) -> Guide:
        """Return a guide at the start of a grammar.

        Raises
        ------
        RequestRejected : the grammar cannot be enforced.
        """
        ...


def begin_guide(row: SamplingRow, guides: Guides | None) -> None:
    """Give a row its guide, which stands behind the tokens that the row has: it may come from elsewhere."""
    grammar = row.params.grammar
    if grammar is None or guides is None:
        return
    try:
        guide = guides.guide(grammar)
        num_taken = guide.consume(row.output_token_ids)
    except Exception as error:  # told when it samples: the requests beside it are not to fail with it
        row.problem = error
        return
    if num_taken < len(row.output_token_ids):
        row.problem = EngineError(f"token {num_taken} of the answer so far is not what its grammar allows")
        return
    row.guide = guide


def guided_drafts(row: SamplingRow, drafts: list[int], most: int) -> list[int]:
    """Return drafts that a row's grammar allows: text that must come, else those proposed.

    They never end the grammar: a token is drawn behind the last draft.
    """
    guide = row.guide
    if guide is None or guide.is_complete:
        return drafts
    try:
        drafts = guide.forced(most) or drafts
        return drafts[: guide.num_drafts(drafts)]
    except GrammarTooComplex:
        return []  # which is found again when a token is drawn


def with_forced(rows: Sequence[SamplingRow], num_available: list[int]) -> list[int]:
    """Return how many drafts each row has, those of text that must come included."""
    return [
        max(num, len(guided_drafts(row, [], _MOST_FORCED))) if row.is_guided else num
        for row, num in zip(rows, num_available, strict=True)
    ]


def guided_rows(rows: Sequence[SamplingRow], request_ids: Sequence[str], outcome: GuideOutcome) -> GuidedRows:
    """Return what the scheduler is told of the grammars of a step's rows."""
    completed = [
        request_id
        for row, request_id in zip(rows, request_ids, strict=True)
        if row.guide is not None and row.guide.is_complete
    ]
    # Threads that worked at once took less than the sum; one that had to wait for a core took no more.
    share = min(1.0, outcome.seconds / max(sum(outcome.row_seconds.values()), 1e-9))
    return GuidedRows(
        frozenset(completed),
        {request_ids[index]: message for index, message in outcome.faults.items()},
        outcome.num_tokens,
        outcome.num_redrawn,
        outcome.seconds,
        {request_ids[index]: share * seconds for index, seconds in outcome.row_seconds.items()},
    )
