"""The drafts that a step could verify, best first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

LEVELS = 64
"""Steps in which acceptance is told apart here. Rows of one level are alike, so hundreds of rows make no more
choices than tens."""

Kind = tuple[int, float]
"""Rows that are alike: level of acceptance, and worth of a token."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The j-th drafts of all rows that are alike."""

    gain: float
    """Of one of them: worth of a token x the chance that it and those before it are accepted."""
    position: int
    """j, from 1."""
    kind: Kind
    count: int
    """Rows that could take a j-th draft."""


class DraftMenu:
    """What each decode row of a step could take."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, Kind]] = []
        self._most_of: dict[Kind, list[int]] = {}

    def offer(self, most: int, acceptance: float, worth: float = 1.0) -> None:
        """Add the next row.

        Parameters
        ----------
        most : drafts that it could verify; 0 for none.
        acceptance : probability in (0, 1) that a draft is accepted if those before it are.
        worth : of each of its tokens.
        """
        kind = (int(acceptance * LEVELS), worth)
        self._rows.append((most, kind))
        if most:
            mosts = self._most_of.get(kind)
            if mosts is None:
                mosts = self._most_of[kind] = []
            mosts.append(most)

    @property
    def deepest(self) -> int:
        """Most drafts of any row."""
        return max((max(mosts) for mosts in self._most_of.values()), default=0)

    def entries(self) -> list[Entry]:
        """Return all drafts by falling gain. The gain falls along a row, so each row's are in their order."""
        entries = []
        for kind, mosts in self._most_of.items():
            mosts.sort()
            acceptance, gain = (kind[0] + 0.5) / LEVELS, kind[1]
            for position in range(1, mosts[-1] + 1):
                gain *= acceptance
                count = len(mosts) - bisect_left(mosts, position)
                entries.append(Entry(gain, position, kind, count))
        entries.sort(key=lambda entry: (-entry.gain, entry.position))
        return entries

    def split(self, ranking: Ranking, num_drafts: int) -> list[int]:
        """Return each row's share of the first drafts of a ranking; rows offered first come first."""
        depths, last, num_left = ranking.take(num_drafts)
        shares = []
        for most, kind in self._rows:
            share = min(most, depths.get(kind, 0))
            if num_left and last is not None and kind == last.kind and most >= last.position:
                share += 1
                num_left -= 1
            shares.append(share)
        return shares


class Ranking:
    """The first n drafts of a menu, for any n: what they gain, and the rows that have any.

    Parameters
    ----------
    entries : by falling gain.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._ends = list(accumulate((entry.count for entry in entries), initial=0))
        self._gains = list(accumulate((entry.gain * entry.count for entry in entries), initial=0.0))
        firsts = (entry.count if entry.position == 1 else 0 for entry in entries)
        self._firsts = list(accumulate(firsts, initial=0))

    def __len__(self) -> int:
        """Return the number of drafts."""
        return self._ends[-1]

    def first(self, num_drafts: int) -> tuple[float, int]:
        """Return what the first drafts gain, and how many rows have any; `num_drafts` is 1 to `len(self)`."""
        index = bisect_left(self._ends, num_drafts) - 1
        entry, num_partial = self._entries[index], num_drafts - self._ends[index]
        num_rows = self._firsts[index] + (num_partial if entry.position == 1 else 0)
        return self._gains[index] + entry.gain * num_partial, num_rows

    def take(self, num_drafts: int) -> tuple[dict[Kind, int], Entry | None, int]:
        """Return the drafts of each row by its kind, and the entry of which only some rows take part."""
        depths: dict[Kind, int] = {}
        for entry in self._entries:
            if num_drafts < entry.count:
                return depths, entry, num_drafts
            depths[entry.kind] = entry.position
            num_drafts -= entry.count
        return depths, None, 0
