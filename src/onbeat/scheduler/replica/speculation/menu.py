"""The drafts that a step could verify, best first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

LEVELS = 24
"""Steps in which acceptance is told apart here. Rows of one level are alike, so hundreds of rows make no more
choices than tens."""

Kind = tuple[int, float]
"""Rows that are alike: level of acceptance, and worth of a token."""

Entry = tuple[float, int, Kind, int]
"""The j-th drafts of all rows that are alike: minus the gain of one of them, so that they sort by it; j from
1; the rows' kind; how many rows could take a j-th draft. The gain is the worth of a token x the chance that
this draft and those before it are accepted."""


Offer = tuple[int, Kind]
"""Drafts that a row could verify, 0 for none, and its kind."""
NO_OFFER: Offer = (0, (0, 0.0))


def kind_of(acceptance: float, worth: float = 1.0) -> Kind:
    """Return the kind of a row.

    Parameters
    ----------
    acceptance : probability in (0, 1) that a draft is accepted if those before it are.
    worth : of each of its tokens.
    """
    return int(acceptance * LEVELS), worth


class DraftMenu:
    """What each decode row of a step could take.

    Parameters
    ----------
    offers : of each row.

    Attributes
    ----------
    deepest : most drafts of any row.
    """

    def __init__(self, offers: list[Offer]) -> None:
        self._offers = offers
        self._entries: list[Entry] | None = None
        self._most_of: dict[Kind, list[int]] = {}
        most_of = self._most_of
        for most, kind in offers:
            if most:
                if kind in most_of:
                    most_of[kind].append(most)
                else:
                    most_of[kind] = [most]
        self.deepest = max(map(max, most_of.values()), default=0)

    def ranking(self, deepest: int) -> Ranking:
        """Return the first `deepest` drafts of each row by falling gain."""
        if self._entries is None:
            self._entries = self._make_entries()
        if deepest >= self.deepest:
            return Ranking(self._entries)
        return Ranking([entry for entry in self._entries if entry[1] <= deepest])

    def split(self, ranking: Ranking, num_drafts: int) -> list[int]:
        """Return each row's share of the first drafts of a ranking; the first rows come first."""
        depths, last, num_left = ranking.take(num_drafts)
        last_position, last_kind = (0, None) if last is None else (last[1], last[2])
        shares = []
        for most, kind in self._offers:
            share = min(most, depths.get(kind, 0))
            if num_left and kind == last_kind and most >= last_position:
                share += 1
                num_left -= 1
            shares.append(share)
        return shares

    def _make_entries(self) -> list[Entry]:
        """Return all drafts by falling gain. The gain falls along a row, so each row's are in their order."""
        entries: list[Entry] = []
        for kind, mosts in self._most_of.items():
            mosts.sort()
            acceptance, gain = (kind[0] + 0.5) / LEVELS, kind[1]
            for position in range(1, mosts[-1] + 1):
                gain *= acceptance
                entries.append((-gain, position, kind, len(mosts) - bisect_left(mosts, position)))
        entries.sort()
        return entries


class Ranking:
    """The first n drafts of a menu, for any n: what they gain, and the rows that have any.

    Parameters
    ----------
    entries : by falling gain.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._ends = list(accumulate([entry[3] for entry in entries], initial=0))
        self._gains = list(accumulate([-entry[0] * entry[3] for entry in entries], initial=0.0))
        firsts = [entry[3] if entry[1] == 1 else 0 for entry in entries]
        self._num_rows = list(accumulate(firsts, initial=0))

    def __len__(self) -> int:
        """Return the number of drafts."""
        return self._ends[-1]

    def first(self, num_drafts: int) -> tuple[float, int]:
        """Return what the first drafts gain, and how many rows have any; `num_drafts` is 1 to `len(self)`."""
        index = bisect_left(self._ends, num_drafts) - 1
        gain, position, _, _ = self._entries[index]
        num_partial = num_drafts - self._ends[index]
        num_rows = self._num_rows[index] + (num_partial if position == 1 else 0)
        return self._gains[index] - gain * num_partial, num_rows

    def take(self, num_drafts: int) -> tuple[dict[Kind, int], Entry | None, int]:
        """Return the drafts of each row by its kind, and the entry of which only some rows take part."""
        depths: dict[Kind, int] = {}
        for entry in self._entries:
            _, position, kind, count = entry
            if num_drafts < count:
                return depths, entry, num_drafts
            depths[kind] = position
            num_drafts -= count
        return depths, None, 0
