#!/usr/bin/env python3
"""What plans cost beside fleets picked by hand: the best of one kind of replica, and the best of all fleets.

    benchmarks/plan_vs_search.py --trace examples/azure2023_conv.csv.gz --out FILE.jsonl       # what it lacks
    benchmarks/plan_vs_search.py --models llama-3b --loads short --objectives loose ...        # some cells
    benchmarks/plan_vs_search.py --table FILE.jsonl

The search over everything simulates every fleet that costs less than the plan, cheapest first, on the same
requests and with the same verdicts, but for fleets with no more of any kind of replica than one that failed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.planner.buckets import buckets_of
from onbeat.planner.fleet_plan import Planner
from onbeat.planner.mix_search import most_of
from onbeat.planner.plan_store import PlanStore
from onbeat.planner.plan_task import Fleet, FleetPlan, PlanTask
from onbeat.planner.prices import Prices
from onbeat.planner.share_objectives import AttainmentObjective
from onbeat.planner.units import Unit, make_units, rate_unit
from onbeat.simulator.settings import ReplicaSettings
from onbeat.workload.arrivals import poisson_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.trace import read_trace

MODELS = {
    "llama-3b": ("meta-llama/Llama-3.2-3B", {"l4": 6, "a10g": 4}),
    "llama-8b": ("meta-llama/Llama-3.1-8B", {"l4": 8, "a10g": 6}),
    "qwen-14b": ("Qwen/Qwen2.5-14B", {"l4": 12, "a100-80-sxm": 2}),
}
"""Name -> the model, and the devices to plan with."""
LOADS = {"azure": None, "short": (200, 150), "long": (3000, 100)}
"""Name -> mean prompt and output tokens, log-normal (sigma 0.8); None is the trace."""
OBJECTIVES = {
    "tight": SLO(ttft=0.6, tbt=0.06),
    "medium": SLO(ttft=1.0, tbt=0.1),
    "loose": SLO(ttft=3.0, tbt=0.2),
}
RATES = {"azure": 8.0, "short": 16.0, "long": 4.0}
"""Requests per second."""


def lengths_of(name: str, trace: Path, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    means = LOADS[name]
    if means is None:
        rows = read_trace(trace)
        first = 4000 * seed
        window = slice(first, first + count)
        return rows.num_prompt_tokens[window], rows.num_output_tokens[window]
    random = np.random.default_rng([seed, 7])
    drawn = [random.lognormal(np.log(mean) - 0.32, 0.8, count) for mean in means]
    prompts, outputs = (np.clip(np.round(each), 2, 16000).astype(np.int64) for each in drawn)
    return prompts, outputs


def load_of(name: str, slo: SLO, trace: Path, count: int, seed: int) -> OfferedLoad:
    prompts, outputs = lengths_of(name, trace, count, seed)
    load = OfferedLoad(
        name=name,
        num_prompt_tokens=prompts,
        num_output_tokens=outputs,
        arrivals=poisson_arrivals(len(prompts), rate=1.0, rng=np.random.default_rng(seed)),
    )
    return load.with_classes([SLOClass(name="all", slo=slo)], seed=seed).at_rate(RATES[name])


def cheaper(
    units: list[Unit], available: dict[str, int], cost: float
) -> Iterator[tuple[tuple[Unit, int], ...]]:
    """Yield every fleet that costs less, cheapest first."""
    most = [range(int(min(most_of(unit, available), cost // unit.usd_per_hour)) + 1) for unit in units]
    found = []
    for counts in product(*most):
        price = sum(unit.usd_per_hour * n for unit, n in zip(units, counts, strict=True))
        used = dict.fromkeys(available, 0)
        for unit, n in zip(units, counts, strict=True):
            used[unit.device] += n * unit.num_devices
        if 0 < price < cost - 1e-9 and all(used[device] <= available[device] for device in used):
            found.append((price, counts))
    for _, counts in sorted(found):
        yield tuple((unit, n) for unit, n in zip(units, counts, strict=True) if n)


def search_everything(
    planner: Planner, units: list[Unit], available: dict[str, int], plan: FleetPlan
) -> tuple[Fleet, int]:
    """Return the cheapest fleet of all, and how many were simulated for it."""
    assert plan.best is not None
    failed = [dict(fleet.parts) for fleet in plan.failed]
    num_simulated = 0
    for parts in cheaper(units, available, plan.best.usd_per_hour):
        counts = dict(parts)
        if any(all(counts[unit] <= known.get(unit, 0) for unit in counts) for known in failed):
            continue
        num_simulated += 1
        fleet = planner.judge(parts)
        if fleet.is_kept:
            return fleet, num_simulated
        failed.append(counts)
    return plan.best, num_simulated


def run_cell(args: argparse.Namespace, model: str, load_name: str, objective: str) -> dict[str, object]:
    name, available = MODELS[model]
    slo = OBJECTIVES[objective]
    count = round(args.seconds * RATES[load_name])
    runs = tuple(load_of(load_name, slo, args.trace, count, seed) for seed in range(args.repeats))
    base = make(ReplicaSettings, model=name, device=next(iter(available)))
    bounds = {device: float(count) for device, count in available.items()}
    units, left_out = make_units(
        base, devices=list(available), tensor_parallel=[1, 2], available=bounds, prices=Prices()
    )
    task = PlanTask(
        rate=RATES[load_name],
        objective=AttainmentObjective(share=0.9),
        load=runs[0],
        runs=runs,
        available=tuple(bounds.items()),
    )
    planner = Planner(task=task, store=PlanStore(args.store), jobs=args.jobs)
    started = time.perf_counter()
    buckets = buckets_of(task.load)
    plan = planner.plan([rate_unit(unit, buckets) for unit in units], left_out)
    cell: dict[str, object] = {"model": model, "load": load_name, "objective": objective}
    cell |= {
        "seconds": time.perf_counter() - started,
        "num_simulated": len(plan.failed) + 1 + len(plan.alternatives),
    }
    if plan.best is None:
        return cell | {"plan": None, "infeasible": plan.infeasible}
    alone = [fleet for fleet in (plan.best, *plan.alternatives) if len(fleet.parts) == 1]
    cheapest, num_more = search_everything(planner, units, available, plan)
    return cell | {
        "plan": plan.best.name,
        "cost": plan.best.usd_per_hour,
        "alone": min(alone, key=lambda fleet: fleet.usd_per_hour).name if alone else None,
        "alone_cost": min((fleet.usd_per_hour for fleet in alone), default=None),
        "search": cheapest.name,
        "search_cost": cheapest.usd_per_hour,
        "num_more": num_more,
    }


def table(path: Path) -> None:
    print("| model | load | objective | plan | $/h | one kind | $/h | all fleets | above | runs | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for line in path.read_text().splitlines():
        cell = json.loads(line)
        head = f"| {cell['model']} | {cell['load']} | {cell['objective']} "
        if cell["plan"] is None:
            print(f"{head}| INFEASIBLE | | | | | | {cell['num_simulated']} | {cell['seconds']:.0f} |")
            continue
        alone = "-" if cell["alone_cost"] is None else f"{cell['alone_cost']:.2f}"
        above = cell["cost"] / cell["search_cost"] - 1
        print(
            f"{head}| {cell['plan']} | {cell['cost']:.2f} | {cell['alone'] or '-'} | {alone} "
            f"| {cell['search']} | "
            f"{above * 100:.1f} % | {cell['num_simulated']} + {cell['num_more']} | {cell['seconds']:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=Path("examples/azure2023_conv.csv.gz"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--seconds", type=float, default=40.0, help="length of a simulated run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--store", type=Path, help="results of runs, to go on from")
    parser.add_argument("--out", type=Path, default=Path("plan-vs-search.jsonl"))
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print the table of a file, and nothing else"
    )
    args = parser.parse_args()
    if args.table is not None:
        table(args.table)
        return
    done = set()
    if args.out.exists():
        cells = map(json.loads, args.out.read_text().splitlines())
        done = {(cell["model"], cell["load"], cell["objective"]) for cell in cells}
    for cell in product(args.models, args.loads, args.objectives):
        if cell not in done:
            result = run_cell(args, *cell)
            print(result, flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
