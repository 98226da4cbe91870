#!/usr/bin/env python3
"""Two shapes that published plans have: the sizes of pools by load, and cost over the objective as steps.

    python benchmarks/plan_papers.py pools --shared DIRECTORY
    python benchmarks/plan_papers.py steps --shared DIRECTORY

DIRECTORY (or the variable ONBEAT_SHARED) has `data/traces`: the Azure LLM inference traces of 2023.

pools  Splitwise (Patel et al., ISCA 2024, section VI) divides 40 machines of 8 H100 between prompts and
       generation of Llama-2-70B: 35 and 5 for code, 25 and 15 for conversations. Here as many machines are
       divided by what one of each serves alone, as DistServe's search finds it (`planner.placement`), for
       Llama-3.1-70B, which has the same layers and takes the traces' longest prompts. Once with steps of
       data sheets, and once with those of Splitwise's own table, which divided its machines by them: the
       roofline calibrated by the measured steps of Llama-2-70B on eight H100 (`data/profiles`).
steps  Vidur (Agrawal et al., MLSys 2024, section 7.3) shows the requests per second and dollar of the best
       configuration over the objective: a staircase. Here the cheapest fleet for Llama-3.1-8B and
       conversations over both objectives: by the plan's estimates, of which the fleet at 120 ms is simulated;
       with --every each objective has a plan, and so simulations, of its own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from math import inf
from pathlib import Path

import numpy as np
from harness.pages import markdown_table
from step_tables import splitwise_tables, write_table

from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.planner.buckets import buckets_of
from onbeat.planner.fleet_plan import Planner
from onbeat.planner.placement import PLENTY, PlacementSearch
from onbeat.planner.plan_task import FleetPlan, PlanTask
from onbeat.planner.prices import Prices
from onbeat.planner.share_objectives import AttainmentObjective
from onbeat.planner.units import make_units, rate_unit
from onbeat.simulator.settings import ReplicaSettings
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.trace import read_trace

TRACES = {"code": "azure2023_code.csv.gz", "conversation": "azure2023_conv.csv.gz"}
NUM_MACHINES = 40
LINK = 8 * 400e9 / 8
"""Of a DGX H100, bytes/s: eight ports of 400 gigabit/s (data sheet of NVIDIA)."""
STEP_TABLE = "splitwise llama2-70b h100-80gb TP 8"
PUBLISHED = {"code": (35, 5), "conversation": (25, 15)}
POOL_OBJECTIVE = SLO(ttft=0.555, tbt=0.078)
"""Three times the TTFT and 1.5 times the TBT that Splitwise's table IV has of an idle machine of A100: what
its P90 may be."""
OBJECTIVES_MS = (60, 70, 80, 100, 120, 160, 200, 300)
"""Of TBT."""
PLANNED_MS = 120
TTFT_OF_TBT = 20
"""TTFT objectives, times those of TBT."""
DEVICES = ("l4", "a10g", "h100-sxm")
SEED = 0


def load_of(shared: Path, name: str, slo: SLO, count: int) -> OfferedLoad:
    """Return requests drawn from a trace; they come one a second, until they are stretched."""
    trace = read_trace(shared / "data" / "traces" / TRACES[name])
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, len(trace), count)
    return OfferedLoad(
        name=name,
        arrivals=np.cumsum(rng.exponential(1.0, count)),
        num_prompt_tokens=trace.num_prompt_tokens[rows],
        num_output_tokens=np.maximum(1, trace.num_output_tokens[rows]),
    ).with_classes((SLOClass(name="all", slo=slo, share=1.0),), seed=SEED)


# ---- pools ----


def divided(prompts: float, tokens: float, num_machines: int) -> tuple[int, int]:
    """Return how many machines are for prompts, and for generation, where together they serve the most.

    Parameters
    ----------
    prompts, tokens : requests per second that one of each serves.
    """
    return max(
        ((count, num_machines - count) for count in range(1, num_machines)),
        key=lambda sizes: min(sizes[0] * prompts, sizes[1] * tokens),
    )


def pools(shared: Path, count: int) -> str:
    """Return the table of pool sizes."""
    header = [
        *("step times", "load", "tokens in / out", "prompts/s", "generation/s", "machines", "share"),
        *("published", "share"),
    ]
    profiles = shared / "data" / "profiles"
    measured = next(each for each in splitwise_tables(profiles) if each.name == STEP_TABLE)
    with tempfile.TemporaryDirectory() as scratch:
        table = write_table(measured, Path(scratch))
        rows = pool_rows(shared, count, "data sheets", "roofline")
        rows += pool_rows(shared, count, "Splitwise's", str(table))
    return markdown_table(header, rows)


def pool_rows(shared: Path, count: int, times: str, step_time: str) -> list[list[object]]:
    """Return the rows of one kind of step times.

    Parameters
    ----------
    times : what the rows call them.
    """
    base = make(
        ReplicaSettings,
        model="meta-llama/Llama-3.1-70B",
        device="h100-sxm",
        max_model_len=16384,
        kv_bandwidth=LINK,
        step_time=step_time,
    )
    units, left_out = make_units(
        base,
        devices=["h100-sxm"],
        tensor_parallel=[8],
        available={"h100-sxm": 8.0 * NUM_MACHINES},
        prices=Prices(),
    )
    assert units, left_out
    rows: list[list[object]] = []
    for name in TRACES:
        load = load_of(shared, name, POOL_OBJECTIVE, count)
        task = PlanTask(
            rate=1.0,
            objective=AttainmentObjective(share=0.9),
            load=load,
            runs=(load,),
            available=(("h100-sxm", inf),),
        )
        (prompts,), (tokens,) = PlacementSearch(task, units, Planner(task=task).results).goodputs()
        most = PLENTY * prompts  # more do not come: then one replica for generation serves at least as many
        generation = f"{tokens:.1f}" if tokens < most else f"{most:.0f} or more"
        tokens = min(tokens, most)
        sizes = divided(prompts, tokens, NUM_MACHINES)
        theirs = PUBLISHED[name]
        rows.append(
            [
                *(times, name, f"{load.num_prompt_tokens.mean():.0f} / {load.num_output_tokens.mean():.0f}"),
                *(prompts, generation, f"{sizes[0]} : {sizes[1]}", f"{sizes[0] / NUM_MACHINES:.2f}"),
                *(f"{theirs[0]} : {theirs[1]}", f"{theirs[0] / NUM_MACHINES:.2f}"),
            ]
        )
    return rows


# ---- steps ----


def cheapest(shared: Path, limit: float, *, rate: float, count: int) -> FleetPlan:
    """Return the plan for a TBT objective, seconds."""
    slo = SLO(ttft=TTFT_OF_TBT * limit, tbt=limit)
    load = load_of(shared, "conversation", slo, count).at_rate(rate)
    base = make(ReplicaSettings, model="meta-llama/Llama-3.1-8B", device=DEVICES[0], max_model_len=8192)
    available = dict.fromkeys(DEVICES, inf)
    units, left_out = make_units(
        base, devices=DEVICES, tensor_parallel=[1, 2], available=available, prices=Prices()
    )
    task = PlanTask(
        rate=rate,
        objective=AttainmentObjective(share=0.9),
        load=load,
        runs=(load,),
        available=tuple(available.items()),
    )
    buckets = buckets_of(load)
    return Planner(task=task).plan([rate_unit(unit, buckets) for unit in units], left_out)


def steps(shared: Path, *, rate: float, count: int, every: bool) -> str:
    """Return the table of the cheapest fleet by objective."""
    found: dict[float, tuple[str, float]] = {}
    """TBT objective, ms -> fleet and dollars an hour."""
    if every:
        for limit in OBJECTIVES_MS:
            best = cheapest(shared, limit / 1e3, rate=rate, count=count).best
            if best is not None:
                found[limit] = (best.name, best.usd_per_hour)
    else:
        for cost in cheapest(shared, PLANNED_MS / 1e3, rate=rate, count=count).costs:
            limit = cost.scale * PLANNED_MS
            if OBJECTIVES_MS[0] <= limit <= OBJECTIVES_MS[-1]:
                found[limit] = (cost.fleet, cost.usd_per_hour)
    rows, before = [], 0.0
    for limit, (name, cost_per_hour) in sorted(found.items()):
        per_dollar = rate / cost_per_hour
        growth = per_dollar / before if before else None
        rows.append([f"{limit:g}", name, f"{cost_per_hour:.2f}", per_dollar, growth])
        before = per_dollar
    header = ["TBT, ms", "cheapest fleet", "$/h", "requests/s per $/h", "times the one before"]
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = os.environ.get("ONBEAT_SHARED")
    parser.add_argument("shape", choices=("pools", "steps"))
    parser.add_argument("--shared", type=Path, default=shared, required=shared is None)
    parser.add_argument("--num-prompts", type=int, default=400)
    parser.add_argument("--every", action="store_true", help="plan for each objective")
    parser.add_argument("--rate", type=float, default=3.0, help="of the load whose fleets are planned")
    args = parser.parse_args()
    if args.shape == "pools":
        print(pools(args.shared, args.num_prompts))
    else:
        print(steps(args.shared, rate=args.rate, count=args.num_prompts, every=args.every))


if __name__ == "__main__":
    main()
