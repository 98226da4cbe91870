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
    """The tokens that each state has taken in, and those of which it has what they put in.

    These numbers go with the state, wherever that goes.

    Parameters
    ----------
    num_states : slots; none of a model that keeps no states.
    """

    def __init__(self, num_states: int) -> None:
        self._ends_S2: NDArray[np.int64] = np.zeros((num_states, 2), np.int64)

    def __len__(self) -> int:
        return len(self._ends_S2)

    @property
    def region(self) -> KVRegion:
        """Where the numbers lie."""
        return KVRegion(int(self._ends_S2.__array_interface__["data"][0]), self._ends_S2.strides[0])

    def begin(self, slot: int, source: int | None) -> None:
        """Let a request begin, from a state that is kept in another slot, or from none."""
        if len(self._ends_S2):
            self._ends_S2[slot] = 0 if source is None else self._ends_S2[source]

    def put(self, slot: int, num_tokens: int, num_beside: int) -> None:
        """Say how far a state has come, whatever is in it: for a step that is timed."""
        if len(self._ends_S2):
            self._ends_S2[slot] = num_tokens, num_beside

    def advance(
        self,
        slots_R: NDArray[np.int64],
        starts_R: NDArray[np.int64],
        ends_R: NDArray[np.int64],
        untaken_R: NDArray[np.int64] | None = None,
        kept: Iterable[tuple[int, int, int]] = (),
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Let the states of rows take in tokens; return `AttentionBatch.pending_R` and `untaken_R`.

        Parameters
        ----------
        starts_R, ends_R : tokens before each row's own, and with these.
        untaken_R : the last of them that its state must not take in; None: it takes in none at all.
        kept : as of `AttentionBatch`.
        """
        taken_R, beside_R = self._ends_S2[slots_R].T
        # A padding row's state may be ahead of it.
        pending_R = np.clip(starts_R - taken_R, 0, beside_R)
        if untaken_R is None:
            untaken_R = pending_R + ends_R - starts_R
        self._ends_S2[slots_R, 0], self._ends_S2[slots_R, 1] = ends_R - untaken_R, untaken_R
        for row, num_tokens, slot in kept:
            self._ends_S2[slot] = starts_R[row] + num_tokens, 0
        return pending_R, untaken_R
