"""Which rows of a step attend together: few groups, little padding."""

from __future__ import annotations

import numpy as np

from onbeat.engine.attention.base import IntArray

FOLDED_QUERY_LIMIT = 32
"""Rows with more new tokens than this attend alone: their own work outweighs the cost of a call."""
QUERY_BUCKETS = (1, 8, FOLDED_QUERY_LIMIT)
"""Rows are padded to the longest of their bucket, so decodes are never padded to chunks."""
BUCKETS_PER_DOUBLING = 2


def group_rows(query_lens_R: IntArray, lengths_R: IntArray, group_cost: int) -> list[IntArray]:
    """Divide the rows of up to `FOLDED_QUERY_LIMIT` new tokens into groups that are padded to their longest.

    The number of groups is bounded by the logarithm of the longest context, not by the number of rows.

    Parameters
    ----------
    query_lens_R : new tokens of each row.
    lengths_R : key blocks that each row reads.
    group_cost : how many blocks of padding cost as much time as one more group.

    Returns
    -------
    Row indices of each group.
    """
    groups: list[IntArray] = []
    shortest = 0
    for longest in QUERY_BUCKETS:
        rows = np.flatnonzero((query_lens_R > shortest) & (query_lens_R <= longest))
        shortest = longest
        if len(rows):
            groups += split_by_length(rows, lengths_R[rows], group_cost)
    return groups


def split_by_length(rows: IntArray, lengths: IntArray, group_cost: int) -> list[IntArray]:
    """Divide rows where a group's padding would cost more than another group."""
    if (lengths.max() - lengths).sum() <= group_cost:
        return [rows]
    order = np.argsort(lengths, kind="stable")
    lengths = lengths[order]
    buckets = np.ceil(np.log2(np.maximum(lengths, 1)) * BUCKETS_PER_DOUBLING).astype(np.int64)
    ends = np.append(np.flatnonzero(np.diff(buckets)) + 1, len(order))
    cuts: list[int] = []
    start, end = 0, int(ends[0])
    for next_end in ends[1:]:
        padding = (end - start) * (int(lengths[next_end - 1]) - int(lengths[end - 1]))
        if padding > group_cost:
            cuts.append(end)
            start = end
        end = int(next_end)
    # In row order within a group, so that a group of all rows is the packed batch itself.
    return [np.sort(rows[part]) for part in np.split(order, cuts)]
