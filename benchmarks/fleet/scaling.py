"""What a fleet that changes its own size costs, beside a fixed fleet and a band of freeness.

    python -m benchmarks.fleet.scaling --shared DIRECTORY --out FILE.jsonl     # what it lacks
    python -m benchmarks.fleet.scaling --shared DIRECTORY --cells "one step" --seeds 0 1 --numbers
    python -m benchmarks.fleet.scaling --shared DIRECTORY --shares             # one replica, at several rates
    python -m benchmarks.fleet.scaling --table FILE.jsonl                      # the tables

DIRECTORY (or the variable ONBEAT_SHARED) has `data/traces`. Llama-3.1-8B on L4, TTFT 5 s and TBT 250 ms,
policy and router slo, unless a cell says otherwise; a replica takes 60 s to start. Lengths are those of
Azure's code completions of 2023, drawn at random; arrivals are Poisson at a rate that changes. A day is three
hours long here, eight times as fast as a real one, which is harder: a start takes eight times as much of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.policies.llumnix import FreenessScaling
from onbeat.core.options import change, make
from onbeat.core.slo import SLO
from onbeat.metrics.attainment import good_requests
from onbeat.scheduler.cluster import objective_scaling, offered_work, scaling
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.cluster.scaling import DOWN_SECONDS, ScaleBounds
from onbeat.scheduler.cluster.scaling_policy import FleetLoad, Wanted
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import FleetTimes, SimulationConfig
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.trace import Trace, read_trace


def _band(low: float, high: float, _down_seconds: float) -> FreenessScaling:
    """Return Llumnix's policy with a band of its own."""
    return FreenessScaling(low, high)


BANDS = {
    f"freeness:{low}..{low + 50}": partial(_band, float(low), float(low + 50)) for low in (5, 10, 20, 40)
}
scaling.SCALING_POLICIES.update(BANDS)
SEEDS = (11, 12, 13)
HOUR = 3600.0
Floats = NDArray[np.float64]
STANDARD = SLOClass(name="standard", slo=SLO(ttft=5.0, tbt=0.25))
SETTINGS = make(
    ReplicaSettings,
    model="meta-llama/Llama-3.1-8B",
    device="l4",
    max_model_len=8192,
    max_num_seqs=256,
    policy="slo",
)


LLUMNIX = make(
    ReplicaSettings,
    model="meta-llama/Llama-2-7b-hf",
    device="a10g",
    max_model_len=4096,
    num_blocks=851,
    max_num_seqs=256,
    policy="slo",
)
"""7B on an A10 with KV for 13,616 tokens (Sun et al., "Llumnix", OSDI 2024, 6.1), and its medium lengths:
half of them up to 32 tokens, 5 % above 1,288; cut at 2,000."""


def sine(least: float, most: float, period: float, when: Floats) -> Floats:
    """Return the rate of a day that begins at its least."""
    return least + (most - least) * 0.5 * (1 - np.cos(2 * np.pi * when / period))


def steady(rate: float, when: Floats) -> Floats:
    return np.full_like(when, rate)


def steps(low: float, high: float, period: float, when: Floats) -> Floats:
    """Return a rate that goes up and down at once, half of the time each."""
    return np.where(when % period < period / 2, low, high)


@dataclass(frozen=True)
class Cell:
    """A load and the fleets that get it."""

    rate: Callable[[Floats], Floats]
    most_rate: float
    seconds: float
    fixed: int
    """Replicas of the fixed fleet, and the most of the others."""
    least: int = 1
    burst: float = 1.0
    """Of the arrivals: coefficient of variation of gaps that are long, as a gamma law has it."""
    is_long_tailed: bool = False
    """Whether lengths and replicas are those of Llumnix's experiments, see `LLUMNIX`."""


CELLS = {
    "day": Cell(partial(sine, 0.9, 6.0, 3 * HOUR), 6.0, 3 * HOUR, 4),
    "day with a night": Cell(partial(steps, 0.0, 4.0, 1.5 * HOUR), 4.0, 3 * HOUR, 4, least=0),
    "steps": Cell(partial(steps, 1.0, 4.5, HOUR), 4.5, 3 * HOUR, 4),
    "one step": Cell(partial(steps, 1.0, 4.5, HOUR / 1.5), 4.5, HOUR, 4),
    "long-tailed day": Cell(
        partial(sine, 0.8, 5.5, 2 * HOUR), 5.5, 2 * HOUR, 4, burst=2.0, is_long_tailed=True
    ),
    **{f"steady {rate:g}": Cell(partial(steady, rate), rate, 3 * HOUR, 4) for rate in (1.0, 2.0, 3.0, 4.0)},
}
"""The fixed fleet is the smallest that keeps 99 % of the requests of the day within their objectives."""
NUMBERS: dict[str, dict[tuple[Any, str], Any]] = {
    "as it is": {},
    "planned share 0.95": {(objective_scaling, "PLANNED_SHARE"): 0.95},
    "spare 0.95": {(objective_scaling, "SPARE"): 0.95},
    "sure by 0 deviations": {(offered_work, "_SURE"): 0.0},
    "late requests do nothing": {(offered_work, "LATE_SHARE"): 2.0},
    "down after 120 s": {(sys.modules[__name__], "DOWN_SECONDS"): 120.0},
    "a window of 60 s alone": {(objective_scaling, "_WINDOWS"): (60,)},
    "backlog within 10 s": {(objective_scaling, "_BACKLOG_SECONDS"): 10.0},
    "planned share 0.75": {(objective_scaling, "PLANNED_SHARE"): 0.75},
    "sure by 2 deviations": {(offered_work, "_SURE"): 2.0},
    "late 5 %": {(offered_work, "LATE_SHARE"): 0.05},
    "spare 0.7": {(objective_scaling, "SPARE"): 0.7},
    "backlog within 1e9 s": {(objective_scaling, "_BACKLOG_SECONDS"): 1e9},
    "down after 1,200 s": {(sys.modules[__name__], "DOWN_SECONDS"): 1200.0},
}


def make_load(cell: Cell, seed: int, shared: Path) -> OfferedLoad:
    """Return the requests of a cell."""
    rng = np.random.default_rng([seed, 20])
    arrivals = _arrivals(cell, rng)
    num = len(arrivals)
    if cell.is_long_tailed:
        prompts, outputs = _power_law(num, rng), _power_law(num, rng)
    else:
        trace = _trace(shared / "data" / "traces" / "azure2023_code.csv.gz")
        rows = rng.integers(0, len(trace), num)
        prompts, outputs = trace.num_prompt_tokens[rows], np.maximum(1, trace.num_output_tokens[rows])
    load = OfferedLoad(
        name="azure" if not cell.is_long_tailed else "long-tailed",
        num_prompt_tokens=prompts,
        num_output_tokens=outputs,
        arrivals=arrivals,
    )
    return load.with_classes((STANDARD,), seed=seed)


def _arrivals(cell: Cell, rng: np.random.Generator) -> Floats:
    """Return arrivals at the highest rate, of which those are kept that the rate of their time has."""
    num = int(cell.most_rate * cell.seconds * 1.1)
    arrivals = gamma_arrivals(num, rate=cell.most_rate, burstiness=1 / cell.burst**2, rng=rng)
    arrivals = arrivals[arrivals < cell.seconds]
    return arrivals[rng.random(len(arrivals)) * cell.most_rate < cell.rate(arrivals)]


def _power_law(num: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return lengths of Llumnix's medium set, up to what a request of two may have, by its quantiles."""
    known = np.log([8, 32, 173, 1288, 2000])
    lengths = np.exp(np.interp(rng.random(num), [0, 0.5, 0.8, 0.95, 1], known))
    return lengths.astype(np.int64)


@lru_cache
def _trace(path: Path) -> Trace:
    return read_trace(path)


def make_config(cell: Cell, fleet: str) -> SimulationConfig:
    """Return a fleet: `fixed 4`, or a scaling policy."""
    settings = LLUMNIX if cell.is_long_tailed else SETTINGS
    if fleet.startswith("fixed"):
        settings = change(settings, replicas=int(fleet.split()[1]))
    else:
        settings = change(
            settings,
            autoscale=ScaleBounds(cell.least, cell.fixed),
            autoscale_policy=fleet,
            scale_down_seconds=DOWN_SECONDS,
        )
    config = build_simulation(change(settings, router="slo")).config
    return replace(config, fleet_times=FleetTimes(start=60.0))


def run(name: str, fleet: str, seed: int, shared: Path) -> dict[str, Any]:
    """Run a cell with a fleet; return what came of it."""
    cell = CELLS[name]
    started = time.process_time()
    load = make_load(cell, seed, shared)
    config = make_config(cell, fleet)
    result = simulate(
        load,
        config,
        build_simulation(LLUMNIX if cell.is_long_tailed else SETTINGS).step_time,
        on_decision=lambda *_: None,
    )
    good = good_requests(result.records)
    ttfts = [each.delivery_times[0] - each.arrival for each in result.records if each.delivery_times]
    held = result.replica_seconds
    assert held is not None
    return {
        "cell": name,
        "fleet": fleet,
        "seed": seed,
        "requests": len(load),
        "attainment": float(good.mean()),
        "ttft_p99": float(np.quantile(ttfts, 0.99)),
        "replica_hours": held / HOUR,
        "changes": max(0, len(result.sizes) - 1),
        "most": max((each.num_replicas for each in result.sizes), default=config.num_replicas),
        "why": [f"{each.when:.0f} s: {each.num_replicas} ({each.why})" for each in result.sizes],
        "cpu_seconds": time.process_time() - started,
    }


def fleets_of(name: str) -> list[str]:
    """Return what a cell is run with."""
    fixed = [f"fixed {CELLS[name].fixed}"]
    if CELLS[name].is_long_tailed:
        return [*fixed, "objective", *BANDS]
    return ["objective"] if name.startswith("steady") else [*fixed, "objective"]


def show_numbers(cells: Sequence[str], seeds: Sequence[int], shared: Path) -> None:
    """Print what other numbers of the rule do."""
    print("| number | cell | attainment | replica-hours | changes |\n| --- | --- | --- | --- | --- |")
    for number, values in NUMBERS.items():
        with ExitStack() as stack:
            for (module, key), value in values.items():
                stack.enter_context(patch.object(module, key, value))
            for cell in cells:
                rows = [run(cell, "objective", seed, shared) for seed in seeds]
                print(f"| {number} | {cell} | {_numbers(rows)} |", flush=True)


SHARES = (
    ("l4", "code", 1, SLO(ttft=5.0, tbt=0.25), 400, (1.5, 1.8, 2.1)),
    ("a100-80-sxm", "conv", 2, SLO(ttft=1.0, tbt=0.1), 200, (4, 5, 6)),
    ("h100-sxm", "conv", 1, SLO(ttft=0.5, tbt=0.05), 120, (20, 25)),
    ("l4", "conv", 1, SLO(ttft=5.0, tbt=0.2), 300, (1.0, 1.3, 1.6)),
)
"""Device, Azure's trace, what its outputs are multiplied by, objectives, seconds, and rates."""


class Watched(objective_scaling.ObjectiveScaling):
    """Notes the share that it computes in each look."""

    def __init__(self, shares: list[float], down_seconds: float) -> None:
        super().__init__(down_seconds)
        self._shares = shares

    def look(self, fleet: FleetLoad, now: float) -> Wanted:
        wanted = super().look(fleet, now)
        self._shares.append(self.share or 0.0)
        return wanted


def show_shares(shared: Path) -> None:
    """Print which share of its time a replica is said to need for a load, and who is in time."""
    print("| device | lengths | TTFT, TBT (s) | requests/s | share | in time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for device, name, longer, slo, seconds, rates in SHARES:
        built = build_simulation(change(SETTINGS, device=device))
        trace = _trace(shared / "data" / "traces" / f"azure2023_{name}.csv.gz")
        for rate in rates:
            rng = np.random.default_rng(3)
            num = int(rate * seconds)
            rows = rng.integers(0, len(trace), num)
            load = OfferedLoad(
                name=name,
                num_prompt_tokens=np.minimum(trace.num_prompt_tokens[rows], 6000),
                num_output_tokens=np.clip(longer * trace.num_output_tokens[rows], 1, 2000),
                arrivals=gamma_arrivals(num, rate=rate, burstiness=1, rng=rng),
            ).with_classes((SLOClass(name="all", slo=slo),), seed=1)
            fleet = FleetConfig(router="slo", autoscale=ScaleBounds(1, 1))
            config = replace(built.config, fleet=fleet)
            shares: list[float] = []
            with patch.dict(scaling.SCALING_POLICIES, objective=partial(Watched, shares)):
                good = good_requests(simulate(load, config, built.step_time).records)
            lengths = name if longer == 1 else f"{name}, outputs x {longer}"
            share = fmean(shares[60:])
            print(
                f"| {device} | {lengths} | {slo.ttft:g}, {slo.tbt:g} | {rate:g} | {share:.2f} | "
                f"{100 * good.mean():.1f} % |",
                flush=True,
            )


def show(path: Path) -> None:
    """Print the table of a file of results."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found[row["cell"], row["fleet"]].append(row)
    print("| load | fleet | seeds | attainment | TTFT P99 (s) | replica-hours | changes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (cell, fleet), rows in found.items():
        ttft = fmean(row["ttft_p99"] for row in rows)
        attainment, hours, changes = _numbers(rows).split(" | ")
        print(f"| {cell} | {fleet} | {len(rows)} | {attainment} | {ttft:.2f} | {hours} | {changes} |")


def _numbers(rows: Sequence[dict[str, Any]]) -> str:
    attainment = 100 * fmean(row["attainment"] for row in rows)
    hours = fmean(row["replica_hours"] for row in rows)
    changes = ", ".join(str(row["changes"]) for row in rows)
    return f"{attainment:.2f} % | {hours:.2f} | {changes}"


def run_all(
    cells: Sequence[str], fleets: Sequence[str], seeds: Sequence[int], shared: Path, out: Path | None
) -> None:
    """Run what a file of results lacks, and add it."""
    known = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    done = {(row["cell"], row["fleet"], row["seed"]) for row in known}
    for cell in cells:
        for fleet in fleets or fleets_of(cell):
            for seed in seeds:
                if (cell, fleet, seed) in done:
                    continue
                line = json.dumps(run(cell, fleet, seed, shared))
                print(line, flush=True)
                if out is not None:
                    with out.open("a") as file:
                        file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--fleets", nargs="+", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--numbers", action="store_true")
    parser.add_argument("--shares", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table is not None:
        show(args.table)
        return
    if args.shared is None:
        parser.error("give --shared DIRECTORY")
    if args.shares:
        show_shares(Path(args.shared))
        return
    if args.numbers:
        show_numbers(args.cells, args.seeds, Path(args.shared))
        return
    run_all(args.cells, args.fleets, args.seeds, Path(args.shared), args.out)


if __name__ == "__main__":
    main()
