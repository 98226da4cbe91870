"""Whose turn it is with what: A B, then B A, so that a drift of the machine favours nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def order_of_turns(
    names: Sequence[str], loads: Sequence[T], round_index: int, *, changes_with_load: bool
) -> list[tuple[str, list[T]]]:
    """Return (server, loads) for the turns of one round.

    Parameters
    ----------
    changes_with_load : each load is a turn of its own, so that equal loads follow each other; else a server
        gets all loads in one turn.
    """
    if not changes_with_load:
        return [(name, list(loads)) for name in _ordered(names, round_index)]
    return [
        (name, [load])
        for position, load in enumerate(loads)
        for name in _ordered(names, round_index + position)
    ]


def _ordered(names: Sequence[str], index: int) -> list[str]:
    return list(names) if index % 2 == 0 else list(reversed(names))
