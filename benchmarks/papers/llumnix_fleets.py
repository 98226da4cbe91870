"""Live migration between simulated replicas, in the set-up of Llumnix's experiments.

    python -m benchmarks.papers.llumnix_fleets --out FILE.jsonl [--rates ...]  # runs what it lacks
    python -m benchmarks.papers.llumnix_fleets --out FILE.jsonl --scaled [--lows ...]  # of no fixed size
    python -m benchmarks.papers.llumnix_fleets --out FILE.jsonl --priorities  # some of high priority
    python -m benchmarks.papers.llumnix_fleets --table FILE.jsonl  # the tables
    python -m benchmarks.papers.llumnix_fleets --stops  # how long a stream stops

Sun et al., "Llumnix", OSDI 2024, section 6: 16 A10G with Llama-2-7B, 13,616 tokens of KV each, 10,000
requests of medium lengths (M-M), gamma arrivals (CV 4), whole prompts first (policy prefill-first);
16 Gbit/s a replica.

* Rates are such that the fleet keeps up: over that, whoever comes later waits longer, whatever is moved.
* Routers: `least-outstanding`, `slo`, and `freeness`, the paper's dispatch.
* Rules by which streams move: `none` do, `mend`, and `llumnix`, the paper's.
* `--scaled`: up to 16 replicas by `--autoscale-policy freeness`, in bands of 50 blocks a request from
  `--lows` on, with moves and without; a replica takes 60 s to start.
* `--priorities`: a tenth of the requests has high priority (-1), as in section 6.4, or counts as all others.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.pages import markdown_table
from benchmarks.harness.store import Results, deadline_in, run_missing
from onbeat.core.handover import MoveVerb
from onbeat.core.options import change, make
from onbeat.scheduler.cluster.events import FleetAction, FleetEvent, MoveStep
from onbeat.scheduler.cluster.scaling import ScaleBounds
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import Simulation, build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import FleetChange, FleetTimes
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad

NUM_REQUESTS = 10_000
RATES = (7.0, 8.0, 9.0, 10.0)
SCALED_RATE = 4.5
LOWS = (5.0, 10.0, 20.0, 40.0, 80.0)
BLOCK_SIZE = 16
FLEET_ROUTERS = ("least-outstanding", "slo", "freeness")
RULES = ("none", "mend", "llumnix")
HIGH_SHARE = 0.1
PRIORITY_RATES = (5.0, 7.0, 8.0)
MEDIUM = ((0.0, 4), (0.5, 32), (0.8, 173), (0.95, 1288), (0.99, 4208), (1.0, 6000))
"""Quantiles of the medium lengths; the least is a guess, and the longest the paper's 6k."""


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


def make_fleet(router: str, rule: str, *, num_replicas: int = 16) -> Simulation:
    """Return the fleet; its model was made for 4,096 tokens, but the paper's lengths go up to 12,000."""
    settings = make(
        ReplicaSettings,
        model="meta-llama/Llama-2-7b-hf",
        device="a10g",
        replicas=num_replicas,
        router=router,
        num_blocks=13_616 // BLOCK_SIZE,
        max_num_seqs=256,
        policy="prefill-first",
        enable_prefix_caching=False,
        kv_bandwidth=None if rule == "none" else 16e9 / 8,
        move_rule="mend" if rule == "none" else rule,
        max_num_batched_tokens=12_288,
    )
    simulation = build_simulation(settings)
    config = simulation.config
    kinds = tuple(
        replace(each, scheduler=replace(each.scheduler, max_model_len=12_288)) for each in config.kinds
    )
    scheduler = replace(config.scheduler, max_model_len=12_288)
    return replace(simulation, config=replace(config, scheduler=scheduler, kinds=kinds))


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
    rule: str
    seed: int

    def run(self) -> dict[str, Any]:
        simulation = make_fleet(self.router, self.rule)
        return found_in(run_fleet(simulation, make_load(self.rate, self.seed)))


@dataclass(frozen=True, slots=True)
class Scaled:
    """A load on as many replicas as a band of freeness has it."""

    rate: float
    router: str
    rule: str
    low: float
    seed: int

    def run(self) -> dict[str, Any]:
        simulation = make_fleet(self.router, self.rule)
        config = replace(
            simulation.config,
            fleet=change(
                simulation.config.fleet,
                replicas=1,
                autoscale=ScaleBounds(1, 16),
                autoscale_policy=f"freeness:{self.low:g}..{self.low + 50:g}",
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


@dataclass(frozen=True, slots=True)
class Priorities:
    """A load of which a tenth has high priority, or would have."""

    rate: float
    router: str
    rule: str
    is_known: bool
    """Whether the fleet is told."""
    seed: int

    def run(self) -> dict[str, Any]:
        simulation = make_fleet(self.router, self.rule)
        config = simulation.config
        scheduler = replace(config.scheduler, scheduling_policy="priority")
        kinds = tuple(replace(each, scheduler=scheduler) for each in config.kinds)
        simulation = replace(simulation, config=replace(config, scheduler=scheduler, kinds=kinds))
        load = make_load(self.rate, self.seed)
        is_high = np.random.default_rng([self.seed, 1]).random(NUM_REQUESTS) < HIGH_SHARE
        if self.is_known:
            load = replace(load, priorities=np.where(is_high, -1, 0))
        result = run_fleet(simulation, load)
        found = {}
        for name, chosen in (("high", is_high), ("others", ~is_high)):
            records = [each for each, is_one in zip(result.records, chosen, strict=True) if is_one]
            found[f"{name}_e2e"] = fmean(each.e2e for each in records if each.e2e is not None)
            found[f"{name}_ttft"] = fmean(each.ttft for each in records if each.ttft is not None)
            found[f"{name}_tpot"] = fmean(each.tpot for each in records if each.tpot is not None)
            found[f"{name}_preempted"] = fmean(each.num_preemptions > 0 for each in records)
        return {**found_in(result), **found}


def print_tables(results: Results) -> None:
    """Print each load by rule, the sizes of fleets that scale themselves, and what priorities do."""
    found: defaultdict[str, defaultdict[tuple[Any, ...], defaultdict[Any, list[dict[str, Any]]]]]
    found = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in results.lines():
        names = line.names
        key = (names["rate"], names["router"], names.get("low"))
        if line.kind == "Priorities":
            key = (names["rate"], names["router"], names["rule"])
        found[line.kind][key][names.get("is_known", names["rule"])].append(line.found)
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
    for (rate, router, _), by_rule in sorted(found["Fixed"].items()):
        cells = [_changes(by_rule, name, "{:.2f}") for name in ("ttft_p50", "ttft_mean", "ttft_p99")]
        cells.append(_changes(by_rule, "preempted", "{:.2%}"))
        cells.append(_changes(by_rule, "tpot_p99", "{:.0f}", unit=1e3))
        cells.append(_changes(by_rule, "moved", "{:.0f}"))
        rows.append((f"{rate:g}", router, _num_seeds(by_rule), *cells))
    print(markdown_table(head, rows))
    scaled_head = ("router", "band", "seeds", "replica-hours", "TTFT P99, s", "preempted", "changes")
    rows = []
    for (_, router, low), by_rule in sorted(found["Scaled"].items()):
        cells = [_changes(by_rule, name, "{:.2f}") for name in ("replica_hours", "ttft_p99")]
        cells.append(_changes(by_rule, "preempted", "{:.2%}"))
        cells.append(_changes(by_rule, "changes", "{:.0f}"))
        rows.append((router, f"{low:g}..{low + 50:g}", _num_seeds(by_rule), *cells))
    print(markdown_table(scaled_head, rows))
    priority_head = (
        "requests/s",
        "router",
        "rule",
        "seeds",
        "",
        "E2E mean, s",
        "TTFT, s",
        "TPOT, ms",
        "preempted",
    )
    rows = []
    for (rate, router, rule), by_known in sorted(found["Priorities"].items()):
        for name in ("high", "others"):
            cells = [_changes(by_known, f"{name}_{each}", "{:.2f}") for each in ("e2e", "ttft")]
            cells.append(_changes(by_known, f"{name}_tpot", "{:.1f}", unit=1e3))
            cells.append(_changes(by_known, f"{name}_preempted", "{:.2%}"))
            rows.append((f"{rate:g}", router, rule, _num_seeds(by_known), name, *cells))
    print(markdown_table(priority_head, rows))


def _num_seeds(by_rule: Mapping[Any, Sequence[dict[str, Any]]]) -> str:
    return " ".join(dict.fromkeys(str(len(each)) for each in by_rule.values() if each))


def _changes(
    by_rule: Mapping[Any, Sequence[dict[str, Any]]], name: str, form: str, *, unit: float = 1.0
) -> str:
    """Return the mean of each rule that was run, in their order, or without and with priorities."""
    order = [each for each in (*RULES, False, True) if by_rule.get(each)]
    return " -> ".join(form.format(unit * fmean(found[name] for found in by_rule[each])) for each in order)


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
    simulation = make_fleet("least-outstanding", "mend", num_replicas=2)
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
    parser.add_argument("--priorities", action="store_true")
    parser.add_argument("--rates", type=float, nargs="*")
    parser.add_argument("--lows", type=float, nargs="*", default=LOWS)
    parser.add_argument("--routers", nargs="*", default=FLEET_ROUTERS, choices=FLEET_ROUTERS)
    parser.add_argument("--rules", nargs="*", default=RULES, choices=RULES)
    parser.add_argument("--seeds", type=int, nargs="*", default=[7, 8, 9])
    args = parser.parse_args()
    if args.stops:
        print_stops()
    if args.out is not None:
        cells = [
            (seed, router, rule) for seed in args.seeds for router in args.routers for rule in args.rules
        ]
        runs: list[Fixed | Scaled | Priorities]
        if args.scaled:
            runs = [
                Scaled(SCALED_RATE, router, rule, low, seed)
                for seed, router, rule in cells
                for low in args.lows
            ]
        elif args.priorities:
            runs = [
                Priorities(rate, router, rule, is_known, seed)
                for seed, router, rule in cells
                for rate in args.rates or PRIORITY_RATES
                for is_known in (False, True)
            ]
        else:
            runs = [
                Fixed(rate, router, rule, seed)
                for seed, router, rule in cells
                for rate in args.rates or RATES
            ]
        run_missing(runs, Results(args.out, "1"), jobs=1, deadline=deadline_in(None))
    if args.table is not None:
        print_tables(Results(args.table, "1"))


if __name__ == "__main__":
    main()
