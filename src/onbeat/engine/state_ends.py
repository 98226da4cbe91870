"""How far the states of requests have come, of a model that keeps one of each.

A state takes in a token for good, so it takes in no draft before it is known to be right: what drafts put in
lies beside it, and the request's next step begins with those that were accepted.

Legend: R rows of a step, S slots of states.
"""

# ruff: noqa: N803, N806 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.kv_access import KVRegion


class StateEnds:
    """The tokens that each state has taken in; the number goes with the state, wherever that goes.

    Parameters
    ----------
    num_states : slots; none of a model that keeps no states.
    """

    def __init__(self, num_states: int) -> None:
        self._ends_S: NDArray[np.int64] = np.zeros(num_states, np.int64)

    def __len__(self) -> int:
        return len(self._ends_S)

    @property
    def region(self) -> KVRegion:
        """Where the numbers lie."""
        return KVRegion(int(self._ends_S.__array_interface__["data"][0]), self._ends_S.itemsize)

    def begin(self, slot: int, source: int | None) -> None:
        """Let a request begin, from a state that is kept in another slot, or from none."""
        if len(self._ends_S):
            self._ends_S[slot] = 0 if source is None else self._ends_S[source]

    def advance(
        self,
        slots_R: NDArray[np.int64],
        starts_R: NDArray[np.int64],
        ends_R: NDArray[np.int64] | None = None,
        kept: Iterable[tuple[int, int, int]] = (),
    ) -> NDArray[np.int64]:
        """Let the states of rows take in tokens, and return how many of these come before each row's own.

        Parameters
        ----------
        starts_R : tokens before each row's own.
        ends_R : tokens that its state has then taken in; None: no more than now.
        kept : as of `AttentionBatch`.
        """
        before_R = self._ends_S[slots_R]
        self._ends_S[slots_R] = before_R if ends_R is None else ends_R
        for row, num_tokens, slot in kept:
            self._ends_S[slot] = starts_R[row] + num_tokens
        return np.maximum(starts_R - before_R, 0)  # a padding row's state may be ahead of it
