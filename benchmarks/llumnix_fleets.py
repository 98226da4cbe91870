"""Live migration between simulated replicas, in the set-up of Llumnix's experiments.

    python benchmarks/llumnix_fleets.py --out FILE.jsonl [--rates ... --seeds ...]   # runs what it lacks
    python benchmarks/llumnix_fleets.py --out FILE.jsonl --scaled [--lows ...]       # fleets of no fixed size
    python benchmarks/llumnix_fleets.py --table FILE.jsonl                           # the tables
    python benchmarks/llumnix_fleets.py --stops                                      # how long a stream stops

Sun et al., "Llumnix", OSDI 2024, section 6: 16 A10G with Llama-2-7B, 13,616 tokens of KV each, 10,000
requests of medium lengths (M-M), gamma arrivals (CV 4), whole prompts first (policy prefill-first);
16 Gbit/s a replica.

* Rates are such that the fleet keeps up: over that, whoever comes later waits longer, whatever is moved.
* Routers: `least-outstanding`, `slo`, and `freeness`, which is here alone and is what the paper compares
  with: a request goes to the replica that has the most free blocks for each request, those that its prompt
  and the first in the queue want taken off.
* `--scaled`: up to 16 replicas by `--autoscale-policy freeness`, in bands of 50 blocks a request from
  `--lows` on, with moves and without; a replica takes 60 s to start.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from harness.pages import markdown_table
from harness.store import Results, deadline_in, run_missing
from numpy.typing import NDArray

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.core.handover import MoveVerb
from onbeat.core.options import make
from onbeat.scheduler.cluster.events import FleetAction, FleetEvent, MoveStep
from onbeat.scheduler.cluster.least_loaded import NONE_EXCLUDED
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.cluster.routing import Choice, RoutingRequest
from onbeat.scheduler.cluster.scaling import ScaleBounds
from onbeat.simulator.config import AutoscaleConfig, FleetChange, FleetTimes
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.setup import ReplicaSettings, Simulation, build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad

NUM_REQUESTS = 10_000
RATES = (7.0, 8.0, 9.0, 10.0)
SCALED_RATE = 4.5
LOWS = (5.0, 10.0, 20.0, 40.0, 80.0)
BLOCK_SIZE = 16
FLEET_ROUTERS = ("least-outstanding", "slo", "freeness")
MEDIUM = ((0.0, 4), (0.5, 32), (0.8, 173), (0.95, 1288), (0.99, 4208), (1.0, 6000))
"""Quantiles of the medium lengths; the least is a guess, and the longest the paper's 6k."""


class FreenessRouter:
    """The replica with the most free blocks for each of its requests, the new one included."""

    ignores_state = False
    weighs_work = False

    def __init__(self, num_replicas: int) -> None:
        self._limits: dict[int, ReplicaLimits | None] = dict.fromkeys(range(num_replicas))
        self._loads: dict[int, ReplicaLoad] = {}
        self._sent: defaultdict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
        """Replica -> request -> how many it had been sent with it, and its blocks; until a report counts it.
        """
        self._num_sent: defaultdict[int, int] = defaultdict(int)
        self._last_choices: dict[int, int] = {}
        self._num_choices = 0

    def route(
        self,
        request: RoutingRequest,
        now: float = 0.0,  # noqa: ARG002
        excluded: Collection[int] = NONE_EXCLUDED,
    ) -> Choice | None:
        members = [each for each in self._limits if each not in excluded]
        if not members:
            return None
        # Of equal ones the least recently chosen.
        best = max(members, key=lambda each: (self._freeness(each), -self._last_choices.get(each, -1)))
        self._num_choices += 1
        self._last_choices[best] = self._num_choices
        self._num_sent[best] += 1
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        self._sent[best][request.request_id] = (self._num_sent[best], -(-num_tokens // BLOCK_SIZE))
        return Choice(best, "load")

    def _freeness(self, replica: int) -> float:
        load, limits = self._loads.get(replica), self._limits[replica]
        sent = self._sent[replica].values()
        num_blocks = sum(blocks for _, blocks in sent)
        if load is None:
            return ((limits.num_blocks if limits else 0) - num_blocks) / (1 + len(sent))
        # The first that waits lacks some blocks, and will take those that are free, too.
        num_wanted = load.num_wanted_blocks + (load.num_free_blocks if load.num_wanted_blocks else 0)
        num_left = load.num_free_blocks - num_wanted - num_blocks
        return num_left / (1 + load.num_running + len(sent)) if num_left > 0 else num_left

    def take(self, replica: int, request: RoutingRequest) -> None:
        """The next report counts it."""

    def num_held(self, request: RoutingRequest) -> Mapping[int, int]:  # noqa: ARG002
        return {}

    def on_first_token(self, replica: int, request: RoutingRequest) -> None:
        """Reports say what is done."""

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        self._sent[replica].pop(request.request_id, None)

    def on_report(self, replica: int, load: ReplicaLoad, now: float) -> None:  # noqa: ARG002
        self._loads[replica] = load
        sent = self._sent[replica]
        self._sent[replica] = {name: each for name, each in sent.items() if each[0] > load.num_taken}

    def least_wait(self, request: RoutingRequest, now: float) -> float | None:
        """Nothing is predicted."""

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        self._limits[replica] = limits

    def leave(self, replica: int) -> None:
        self._limits.pop(replica, None)


ROUTERS["freeness"] = lambda num_replicas, seed: FreenessRouter(num_replicas)  # noqa: ARG005


def medium_lengths(num: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw lengths whose logarithm is linear between the paper's quantiles."""
    shares, lengths = zip(*MEDIUM, strict=True)
    drawn = np.exp(np.interp(rng.random(num), shares, np.log(lengths)))
    return np.asarray(np.rint(drawn), dtype=np.int64)


def make_load(rate: float, seed: int) -> OfferedLoad:
    rng = np.random.default_rng(seed)
    return OfferedLoad(
        name="M-M",
        num_prompt_tokens=medium_lengths(NUM_REQUESTS, rng),
        num_output_tokens=medium_lengths(NUM_REQUESTS, rng),
        arrivals=gamma_arrivals(NUM_REQUESTS, rate=rate, burstiness=1 / 16, rng=rng),
    )


def make_fleet(router: str, *, moves: bool, num_replicas: int = 16) -> Simulation:
    """Return the fleet; its model was made for 4,096 tokens, but the paper's lengths go up to 12,000."""
    settings = make(
        ReplicaSettings,
        model="meta-llama/Llama-2-7b-hf",
        device="a10g",
        replicas=num_replicas,
        num_blocks=13_616 // BLOCK_SIZE,
        max_num_seqs=256,
        policy="prefill-first",
        enable_prefix_caching=False,
        kv_bandwidth=16e9 / 8 if moves else None,
        max_num_batched_tokens=12_288,
    )
    simulation = build_simulation(settings)
    config = simulation.config
    kinds = tuple(
        replace(each, scheduler=replace(each.scheduler, max_model_len=12_288)) for each in config.kinds
    )
    scheduler = replace(config.scheduler, max_model_len=12_288)
    return replace(simulation, config=replace(config, router=router, scheduler=scheduler, kinds=kinds))


def run_fleet(simulation: Simulation, load: OfferedLoad) -> SimulationResult:
    return simulate(load, simulation.config, simulation.step_time, on_decision=lambda *_: None)


def found_in(result: SimulationResult) -> dict[str, Any]:
    """Return what tables are made of."""
    records = result.records
    times = np.array([inf if each.ttft is None else each.ttft for each in records])
    tpots = np.array([each.tpot for each in records if each.tpot is not None])
    moved = sum(count for why, count in result.decisions.items() if why.startswith("moved:"))
    return {
        "ttft_p50": float(np.median(times)),
        "ttft_mean": float(times.mean()),
        "ttft_p99": float(np.percentile(times, 99)),
        "preempted": fmean(each.num_preemptions > 0 for each in records),
        "tpot_p99": float(np.percentile(tpots, 99)),
        "moved": moved,
    }


@dataclass(frozen=True, slots=True)
class Fixed:
    """A load on 16 replicas."""

    rate: float
    router: str
    moves: bool
    seed: int

    def run(self) -> dict[str, Any]:
        simulation = make_fleet(self.router, moves=self.moves)
        return found_in(run_fleet(simulation, make_load(self.rate, self.seed)))


@dataclass(frozen=True, slots=True)
class Scaled:
    """A load on as many replicas as a band of freeness has it."""

    rate: float
    router: str
    moves: bool
    low: float
    seed: int

    def run(self) -> dict[str, Any]:
        simulation = make_fleet(self.router, moves=self.moves)
        config = replace(
            simulation.config,
            autoscale=AutoscaleConfig(
                bounds=ScaleBounds(1, 16), policy=f"freeness:{self.low:g}..{self.low + 50:g}"
            ),
            fleet_times=FleetTimes(start=60.0),
        )
        result = run_fleet(replace(simulation, config=config), make_load(self.rate, self.seed))
        assert result.replica_seconds is not None
        return {
            **found_in(result),
            "replica_hours": result.replica_seconds / 3600,
            "changes": max(0, len(result.sizes) - 1),
        }


def print_tables(results: Results) -> None:
    """Print each load with moves and without, and the sizes of fleets that scale themselves."""
    found: defaultdict[str, defaultdict[tuple[Any, ...], dict[bool, list[dict[str, Any]]]]]
    found = defaultdict(lambda: defaultdict(lambda: {False: [], True: []}))
    for line in results.lines():
        names = line.names
        key = (names["rate"], names["router"], names.get("low"))
        found[line.kind][key][names["moves"]].append(line.found)
    head = (
        "requests/s",
        "router",
        "seeds",
        "TTFT P50, s",
        "mean",
        "P99",
        "preempted",
        "TPOT P99, ms",
        "moved",
    )
    rows = []
    for (rate, router, _), both in sorted(found["Fixed"].items()):
        without, moved = both[False], both[True]
        cells = [_change(without, moved, name, "{:.2f}") for name in ("ttft_p50", "ttft_mean", "ttft_p99")]
        cells.append(_change(without, moved, "preempted", "{:.2%}"))
        cells.append(_change(without, moved, "tpot_p99", "{:.0f}", unit=1e3))
        num_moved = round(_mean(moved, "moved"))
        rows.append((f"{rate:g}", router, f"{len(moved)}", *cells, f"{num_moved}"))
    print(markdown_table(head, rows))
    scaled_head = ("router", "band", "seeds", "replica-hours", "TTFT P99, s", "preempted", "changes")
    rows = []
    for (_, router, low), both in sorted(found["Scaled"].items()):
        cells = [_change(both[False], both[True], name, "{:.2f}") for name in ("replica_hours", "ttft_p99")]
        cells.append(_change(both[False], both[True], "preempted", "{:.2%}"))
        cells.append(_change(both[False], both[True], "changes", "{:.0f}"))
        rows.append((router, f"{low:g}..{low + 50:g}", f"{len(both[True])}", *cells))
    print(markdown_table(scaled_head, rows))


def _mean(found: Iterable[dict[str, Any]], name: str) -> float:
    values = [each[name] for each in found]
    return fmean(values) if values else float("nan")


def _change(
    without: Sequence[dict[str, Any]],
    moved: Sequence[dict[str, Any]],
    name: str,
    form: str,
    *,
    unit: float = 1.0,
) -> str:
    """Return what there is without moves, and with them."""
    return " -> ".join(form.format(unit * _mean(each, name)) for each in (without, moved))


def print_stops() -> None:
    """Print for how long a stream stands still that leaves a draining replica, by its length."""
    print("| prompt | usual gap ms | gaps of five moves, in usual gaps | mean ms | copies | prefill s |")
    print("|---:|---:|---|---:|---:|---:|")
    for num_tokens in (1000, 2000, 4000, 8000):
        found = [one_stop(num_tokens, 8.0 + 0.11 * number) for number in range(5)]
        gaps, usual = [gap for gap, _, _, _ in found], fmean(gap for _, gap, _, _ in found)
        print(
            f"| {num_tokens:,} | {usual * 1e3:.1f} | {', '.join(f'{gap / usual:.1f}' for gap in gaps)} | "
            f"{fmean(gaps) * 1e3:.1f} | {max(copies for _, _, copies, _ in found)} | {found[0][3]:.2f} |"
        )


def one_stop(num_tokens: int, when: float) -> tuple[float, float, int, float]:
    """Return the gap of a move, the usual one, the copies, and the time of the prompt."""
    simulation = make_fleet("least-outstanding", moves=True, num_replicas=2)
    config = replace(
        simulation.config,
        fleet_changes=(FleetChange(when, "drain", 0),),
        fleet_times=FleetTimes(drain=300.0),
    )
    load = OfferedLoad(
        name="one and others",
        num_prompt_tokens=np.array([num_tokens, 200, 200, 200]),
        num_output_tokens=np.full(4, 800),
        arrivals=np.array([0.0, 0.03, 0.06, 0.1]),
    )
    copies: list[str] = []

    def watch(_event: FleetEvent, _now: float, actions: Sequence[FleetAction]) -> None:
        steps = [each for each in actions if isinstance(each, MoveStep)]
        copies.extend(each.request_id for each in steps if each.verb is MoveVerb.PULL)

    (record, *_) = simulate(load, config, simulation.step_time, on_decision=watch).records
    gaps = [b - a for a, b in pairwise(record.delivery_times)]
    assert record.ttft is not None
    return max(gaps[5:]), median(gaps), copies.count("0"), record.ttft


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines; what is there is not run again")
    parser.add_argument("--table", type=Path, help="print the tables of such a file")
    parser.add_argument("--stops", action="store_true")
    parser.add_argument("--scaled", action="store_true")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--lows", type=float, nargs="*", default=LOWS)
    parser.add_argument("--routers", nargs="*", default=FLEET_ROUTERS, choices=FLEET_ROUTERS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[7, 8, 9])
    args = parser.parse_args()
    if args.stops:
        print_stops()
    if args.out is not None:
        both = (False, True)
        runs: list[Fixed | Scaled] = [
            Scaled(SCALED_RATE, router, moves, low, seed)
            for seed in args.seeds
            for low in args.lows
            for router in args.routers
            for moves in both
        ]
        if not args.scaled:
            runs = [
                Fixed(rate, router, moves, seed)
                for seed in args.seeds
                for rate in args.rates
                for router in args.routers
                for moves in both
            ]
        run_missing(runs, Results(args.out, "1"), jobs=1, deadline=deadline_in(None))
    if args.table is not None:
        print_tables(Results(args.table, "1"))


if __name__ == "__main__":
    main()
