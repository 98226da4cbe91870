"""What prefixes can be worth at most to a router.

    python benchmarks/fleet_prefix_bound.py --shared DIRECTORY

The loads and fleets are those of `fleet_routing.py` whose prompts have prefixes. Two bounds:

* The most tokens of prompts that caches can have: those of one for the whole fleet that forgets nothing.
  Somebody has to compute each prefix once.
* The share in time of a fleet whose caches have all prefixes before the load comes, and room for all blocks:
  each replica has computed each prefix once, alone. What is late there is late for want of slots or steps, or
  by its own tokens, and no choice of a replica costs a prefix.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import numpy as np
from fleet_routing import CELLS, SETTINGS, TEST_SEEDS, Cell, make_config, make_load
from harness.pages import markdown_table

from onbeat.metrics.attainment import good_requests
from onbeat.scheduler.cluster.routing import Choice, RoutingRequest
from onbeat.scheduler.cluster.slo_router import SLORouter
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad

PREFIX_CELLS = tuple(name for name, cell in CELLS.items() if cell.prefixes is not None)
MANY_BLOCKS = 200_000
"""More than a run fills."""
_WARM_SECONDS = 1.0
"""For a prefix on a replica, by itself."""
_route = SLORouter.route


def warmed(cell: Cell, seed: int, shared: Path, num_replicas: int) -> tuple[OfferedLoad, int]:
    """Return a load behind requests that compute each prefix on each replica, and how many these are."""
    load, known = make_load(cell, seed, shared), cell.prefixes
    assert known is not None
    assert load.arrivals is not None
    assert load.block_ids is not None
    num_blocks = known.num_tokens // load.block_size
    num_warm = known.num * num_replicas
    prefixes = [tuple(range(index * num_blocks, (index + 1) * num_blocks)) for index in range(known.num)]
    times = _WARM_SECONDS * np.arange(num_warm + 1)
    before = np.full(num_warm, known.num_tokens + 1), np.ones(num_warm, dtype=np.int64)
    joined = OfferedLoad(
        name=load.name,
        num_prompt_tokens=np.concatenate([before[0], load.num_prompt_tokens]),
        num_output_tokens=np.concatenate([before[1], load.num_output_tokens]),
        arrivals=np.concatenate([times[:-1], times[-1] + load.arrivals]),
        block_ids=(*(prefixes[row // num_replicas] for row in range(num_warm)), *load.block_ids),
        block_size=load.block_size,
    )
    return joined.with_classes(cell.classes, seed=seed), num_warm


def most_hits(name: str, seed: int, shared: Path) -> float:
    """Return the share of prompt tokens that one cache for all replicas would have, in per cent."""
    load = make_load(CELLS[name], seed, shared)
    assert load.block_ids is not None
    known: set[int] = set()
    num_hits = 0
    for block_ids, num_tokens in zip(load.block_ids, load.num_prompt_tokens.tolist(), strict=True):
        num_held = next((place for place, each in enumerate(block_ids) if each not in known), len(block_ids))
        num_hits += min(num_held * load.block_size, num_tokens - 1)
        known.update(block_ids)
    return 100 * num_hits / float(load.num_prompt_tokens.sum())


def run(name: str, seed: int, shared: Path) -> dict[str, float]:
    """Return the share of the requests of a cell in time where all caches hold all prefixes, in per cent."""
    cell = replace(CELLS[name], limits=(("num_blocks", MANY_BLOCKS),))
    config = make_config(cell, "slo", seed)
    load, num_warm = warmed(cell, seed, shared, config.num_replicas)

    def route(
        router: SLORouter, request: RoutingRequest, now: float = 0.0, excluded: Collection[int] = ()
    ) -> Choice | None:
        row = int(request.request_id)
        if row < num_warm:
            excluded = [each for each in range(config.num_replicas) if each != row % config.num_replicas]
        return _route(router, request, now, excluded)

    with patch.object(SLORouter, "route", route):
        step_time = build_simulation(SETTINGS).step_time
        records = simulate(load, config, step_time, on_decision=lambda *_: None).records[num_warm:]
    cached = sum(each.num_cached_tokens for each in records) / sum(each.num_prompt_tokens for each in records)
    good = 100 * float(good_requests(records).mean())
    return {"attainment": good, "hits": 100 * cached}


def main() -> None:
    """Print a row for each load."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--seeds", type=int, nargs="+", default=TEST_SEEDS)
    parser.add_argument("--cells", nargs="+", choices=PREFIX_CELLS, default=PREFIX_CELLS)
    args = parser.parse_args()
    rows = []
    for cell in args.cells:
        most = fmean(most_hits(cell, seed, args.shared) for seed in args.seeds)
        found = [run(cell, seed, args.shared) for seed in args.seeds]
        means = (fmean(each[name] for each in found) for name in ("attainment", "hits"))
        rows.append((cell, *(f"{value:.1f}" for value in (most, *means))))
    print(markdown_table(("load", "most hits, %", "all held: in time, %", "hits, %"), rows))


if __name__ == "__main__":
    main()
