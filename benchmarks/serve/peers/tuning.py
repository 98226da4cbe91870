"""A peer at its best: the value of one of its flags with which most requests keep their objectives."""

from __future__ import annotations

from .entries import Entry
from .rounds import Loads, Runs
from .scores import best_server
from .stage import Stage


def tune(entry: Entry, loads: Loads) -> tuple[list[Entry], Runs]:
    """Start a peer with each value of its flag and load it.

    Returns
    -------
    The peer as it is, with its best variant after it where that is another one; and all runs.
    """
    assert entry.tune is not None
    variants = [entry.with_flag(entry.tune.flag, value) for value in entry.tune.values]
    print(f"looking for the best {entry.tune.flag} of {entry.name}", flush=True)
    runs: Runs = []
    with Stage(variants, keeps_up=False) as stage:
        for variant in variants:
            with stage.turn(variant.name) as turn:
                runs += loads.take_turn(turn, variant.name, loads.cells, f"tuning {variant.name}")
    best = best_server(runs)
    print(f"best: {best}", flush=True)
    is_better = best != entry.with_flag(entry.tune.flag, entry.tune.default).name
    return [entry, *(variant for variant in variants if variant.name == best and is_better)], runs
