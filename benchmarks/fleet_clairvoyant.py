"""What a router would lose that knew all that is to come: arrivals, lengths and what every choice leads to.

    python benchmarks/fleet_clairvoyant.py --shared DIRECTORY --cell "one slow" --seeds 101 --out FILE.jsonl

The loads and fleets are those of `fleet_routing.py`. At each arrival this process is copied (fork): one copy
for each replica sends the request there and goes on, with the true lengths and arrivals, until `--ahead`
more requests have come; the copy with the fewest first tokens too late says which replica is chosen, the
router's own where that is no worse (a rollout, as in Bertsekas, Tsitsiklis and Wu, "Rollout algorithms for
combinatorial optimization", Journal of Heuristics 3, 1997). In copies of the first pass the router `slo`
chooses for those that come later; in those of a further pass they go where the pass before sent them, so that
each pass is a descent along one choice at a time. No router can know what this one does.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from fleet_routing import CELLS, SETTINGS, TEST_SEEDS, make_config, make_load
from harness.copies import branch

from onbeat.metrics.attainment import good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.cluster.events import Arrived, FleetAction, FleetEvent
from onbeat.scheduler.cluster.routing import Choice, RoutingRequest
from onbeat.scheduler.cluster.slo_router import SLORouter
from onbeat.simulator.observer import Collector
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate


@dataclass
class Rollouts:
    """Chooses by what copies of the run come to.

    Parameters
    ----------
    numbers : of the replicas.
    plan : where each request goes, by its place in the order of arrivals; empty leaves it to the router.
    ahead : requests that come in a copy before it is judged.
    """

    numbers: Sequence[int]
    plan: Sequence[int]
    ahead: int
    chosen: list[int] = field(default_factory=list)
    num_copies: int = 0
    num_changed: int = 0
    records: list[RequestRecord] = field(default_factory=list)
    """Of all that have come."""
    _is_copy: bool = False
    _own: int = -1
    """In a copy, the replica that it is for."""
    _last: int = 0
    """In a copy, how many have come when it ends."""
    _writer: int = -1

    def route(
        self, router: SLORouter, request: RoutingRequest, now: float, excluded: Collection[int]
    ) -> Choice | None:
        """Make a choice, or a copy's choice."""
        place = len(self.chosen)
        usual = self.plan[place] if self.plan else self._usual(router, request, now, excluded)
        best = usual
        if not self._is_copy:
            best = self._best(usual)
        self.chosen.append(best)
        self.num_changed += best != usual
        return _route(router, request, now, [each for each in self.numbers if each != best])

    def _usual(
        self, router: SLORouter, request: RoutingRequest, now: float, excluded: Collection[int]
    ) -> int:
        best = router._best(router._look_up(request), now, excluded)
        assert best is not None
        return best.number

    def _best(self, usual: int) -> int:
        """Return the replica after whose choice the fewest are late; in a copy, the one that it is for."""
        fewest = self._copy(usual)
        best = usual
        for number in self.numbers:
            if self._is_copy or not fewest:
                break
            if number != usual:
                late = self._copy(number)
                if not self._is_copy and late < fewest:
                    fewest, best = late, number
        return self._own if self._is_copy else best

    def _copy(self, number: int) -> int:
        """Return how many are late in a copy in which a replica is chosen; in the copy itself, at once."""
        self.num_copies += 1
        came = branch()
        if isinstance(came, bytes):
            return int(struct.unpack("q", came)[0])
        self._is_copy, self._own, self._writer = True, number, came
        self._last = len(self.chosen) + self.ahead
        return 0

    def on_decision(self, event: FleetEvent, now: float, actions: Sequence[FleetAction]) -> None:  # noqa: ARG002
        """End a copy in which enough have come."""
        if self._is_copy and isinstance(event, Arrived) and len(self.chosen) > self._last:
            self.end_copy(now)

    def end_copy(self, now: float) -> None:
        """Say how many are late, of those whose time is over, and end."""
        os.write(self._writer, struct.pack("q", sum(_is_late(record, now) for record in self.records)))
        os._exit(0)


def _is_late(record: RequestRecord, now: float) -> bool:
    """Return whether a first token came too late, or did not come by a time after its deadline."""
    assert record.slo is not None
    assert record.slo.ttft is not None
    due, times = record.arrival + record.slo.ttft, record.delivery_times
    return (times[0] > due) if len(times) else due <= now


_route = SLORouter.route


def run_pass(cell: str, seed: int, shared: Path, plan: Sequence[int], ahead: int) -> dict[str, Any]:
    """Run a load once; return what came of it, and where each request went."""
    load = make_load(CELLS[cell], seed, shared)
    config = make_config(CELLS[cell], "slo", seed)
    rollouts = Rollouts(range(config.num_replicas), plan, ahead)
    hear = Collector.on_request

    def on_request(collector: Collector, offered: Any) -> None:
        rollouts.records.append(offered.record)
        hear(collector, offered)

    def route(
        router: SLORouter, request: RoutingRequest, now: float = 0.0, excluded: Collection[int] = ()
    ) -> Choice | None:
        return rollouts.route(router, request, now, excluded)

    started = time.monotonic()
    with patch.object(Collector, "on_request", on_request), patch.object(SLORouter, "route", route):
        step_time = build_simulation(SETTINGS).step_time
        result = simulate(load, config, step_time, on_decision=rollouts.on_decision)
        if rollouts._is_copy:
            rollouts.end_copy(float("inf"))
    good = good_requests(result.records)
    shares = np.bincount(rollouts.chosen, minlength=config.num_replicas) / len(rollouts.chosen)
    return {
        "cell": cell,
        "seed": seed,
        "ahead": ahead,
        "misses": 100 * float(1 - good.mean()),
        "late": 100 * float(np.mean([_is_late(record, float("inf")) for record in result.records])),
        "changed": rollouts.num_changed,
        "copies": rollouts.num_copies,
        "shares": [round(100 * float(each), 1) for each in shares],
        "seconds": round(time.monotonic() - started, 1),
        "chosen": rollouts.chosen,
    }


def main() -> None:
    """Print a line for each pass, and keep them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--cell", choices=CELLS, default="one slow")
    parser.add_argument("--seeds", type=int, nargs="+", default=TEST_SEEDS)
    parser.add_argument("--ahead", type=int, default=150)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for seed in args.seeds:
        plan: Sequence[int] = ()
        for number in range(args.passes):
            found = run_pass(args.cell, seed, args.shared, plan, args.ahead)
            plan = found.pop("chosen")
            found["pass"] = number + 1
            print(found, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
