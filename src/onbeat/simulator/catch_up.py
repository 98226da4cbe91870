"""A virtual draft model that has to read what its requests have become before it can go on with them.

As in the engine: the draft model is never told of prompts. When drafts are asked for, it runs the tokens that
it has no KV of, at most so many in a step; a row that is not through proposes nothing in that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class AskedRow(NamedTuple):
    """A decode row with drafts."""

    request_id: str
    num_tokens: int
    """Known ones, its last included."""
    num_drafts: int


class CatchUp:
    """Keeps count of the draft model's KV. What the prefix cache holds is new to it.

    Parameters
    ----------
    most : tokens that it reads in a step, over all rows that are far behind.
    num_near : rows no further behind than this are not held back, and cost nothing more than a decode.
    """

    def __init__(self, most: int, *, num_near: int) -> None:
        self._most = most
        self._num_near = num_near
        self._num_valid: dict[str, int] = {}
        """Leading tokens of each request that have KV."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """Let the KV of requests go that ended, were preempted, or come back."""
        for request_id in request_ids:
            self._num_valid.pop(request_id, None)

    def propose(self, rows: Sequence[AskedRow]) -> tuple[list[int], list[tuple[int, int]]]:
        """Run what rows are behind with, those first that are nearest to their ends.

        Returns
        -------
        The drafts of each row, none where it is not through; and (tokens before, tokens run) of each row that
        was far behind.
        """
        num_left = self._most
        num_drafted = [row.num_drafts for row in rows]
        chunks = []
        behind = [row.num_tokens - self._num_valid.get(row.request_id, 0) for row in rows]
        for place in sorted(range(len(rows)), key=behind.__getitem__):
            row, num_behind = rows[place], behind[place]
            if num_behind > self._num_near:
                start = row.num_tokens - num_behind
                num_taken = min(num_behind, num_left)
                num_left -= num_taken
                if num_taken:
                    chunks.append((start, num_taken))
                if num_taken < num_behind:
                    num_drafted[place] = 0
                    self._num_valid[row.request_id] = start + num_taken
                    continue
            self._num_valid[row.request_id] = row.num_tokens
        return num_drafted, chunks

    def confirm(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Count the KV of drafts that became tokens; the last one of a row has none."""
        if num_drafted:
            self._num_valid[request_id] += min(num_drafted - 1, num_accepted)
