#!/usr/bin/env python3
"""Why a fleet does not do what its plan says: the very arrivals of a check, simulated, with more time a step.

    onbeat serve --config plan.yaml --load-format stand-in --device l4 --record run.rec
    onbeat bench serve --check-plan plan.yaml --json run.json --save-detailed
    benchmarks/plan_check.py plan.yaml run.json

The fleet is simulated as the plan was, with the live router and scheduler. If the first row is as good as the
plan and the live fleet is not, then arrivals, router and scheduler are not what differs; the rows below say
how much longer steps would have to take.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from onbeat.cluster.kinds import parse_kind
from onbeat.core.slo import SLO
from onbeat.metrics.attainment import good_requests
from onbeat.planner.fleets import FleetCase
from onbeat.planner.units import Unit
from onbeat.scheduler.config import SchedulerLimits
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass


def fleet_of(plan: dict[str, Any], device: str, overhead: float) -> FleetCase:
    """Return the fleet of a plan file; `device` is that of a plan with one kind."""
    degree, fleet = plan.get("tensor-parallel-size", 1), plan["fleet"]
    kinds = fleet.get("kinds") or [f"device={device},tp={degree},replicas={fleet['replicas']}"]
    parts = []
    for kind in map(parse_kind, kinds):
        settings = ReplicaSettings(
            model=plan["model"],
            device=kind.device,
            tensor_parallel=kind.tensor_parallel_size,
            host_overhead=overhead,
            limits=SchedulerLimits(
                policy="slo",
                max_num_seqs=plan.get("max-num-seqs", 256),
                max_model_len=plan.get("max-model-len"),
            ),
        )
        parts.append((Unit(settings=settings, usd_per_hour=1.0, watts=1.0), kind.replicas))
    return FleetCase(parts=tuple(parts))


def load_of(plan: dict[str, Any], run: dict[str, Any]) -> OfferedLoad:
    """Return the requests of a check as they came; the objectives are those of all requests."""
    order = np.argsort(run["start_times"])
    arrivals = np.asarray(run["start_times"])[order]
    rate = plan["plan"]["promise"]["request-rate"]
    slo = SLO(ttft=plan["slo-ttft-ms"] / 1e3, tbt=plan["slo-tbt-ms"] / 1e3)
    load = OfferedLoad(
        name="check",
        num_prompt_tokens=np.asarray(run["input_lens"])[order],
        num_output_tokens=np.maximum(np.asarray(run["output_lens"])[order], 1),
        arrivals=arrivals - arrivals[0] + 1 / rate,
    )
    return load.with_classes((SLOClass(name="all", slo=slo, share=1.0),), seed=0)


def row(name: str, good: float, ttfts: np.ndarray) -> str:
    cells = " | ".join(f"{value * 1e3:.0f}" for value in np.percentile(ttfts, (50, 90, 99)))
    return f"| {name} | {good * 100:.1f} % | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("run", type=Path, help="of bench serve --json, with --save-detailed")
    parser.add_argument("--device", default="", help="of a plan with one kind of replica")
    parser.add_argument("--host-overhead-ms", type=float, nargs="*", default=[0, 1, 2, 4, 8])
    args = parser.parse_args()
    plan, run = yaml.safe_load(args.plan.read_text()), json.loads(args.run.read_text())
    load = load_of(plan, run)
    print("| run | good | TTFT P50, ms | P90 | P99 |\n| --- | --- | --- | --- | --- |")
    planned = plan["plan"]["verified"]["attainment"]
    print(f"| planned | {planned[0] * 100:.1f} % | | | |")
    print(row("live", run["attainment"], np.asarray(run["ttfts"])))
    for overhead in args.host_overhead_ms:
        built = fleet_of(plan, args.device, overhead / 1e3).build()
        records = simulate(load, built.config, built.step_time).records
        good = good_requests(records)
        print(
            row(f"simulated, {overhead:g} ms a step more", good.mean(), np.array([r.ttft for r in records]))
        )


if __name__ == "__main__":
    main()
