"""How many requests keep their objectives behind each router, in simulated fleets of four replicas.

    python -m benchmarks.fleet.routing --shared DIRECTORY --out FILE.jsonl           # what it lacks
    python -m benchmarks.fleet.routing --shared DIRECTORY --seeds 0 1 --cells chat   # while a rule is chosen
    python -m benchmarks.fleet.routing --shared DIRECTORY --seeds 0 1 --numbers      # what numbers are worth
    python -m benchmarks.fleet.routing --table FILE.jsonl                            # the tables

DIRECTORY (or the variable ONBEAT_SHARED) has `data/traces`. Rules are chosen on `TUNING_SEEDS` alone;
`TEST_SEEDS` are for the result. A seed makes the lengths, the order of prefixes and the arrivals of a load.

Four H100 with Llama-3.1-8B each, 64 slots, policy slo, TTFT 0.5 s and TBT 50 ms (where there are L4, whose
weights alone take them 53 ms to read, 2 s and 100 ms; Mooncake's long prompts 5 s and 50 ms). What a replica
reports is heard of 2 ms after each step. Lengths of chats are those of Azure's conversations of 2023; a
prompt of a prefix load is a prefix, chosen by a Zipf law, and 20 to 400 tokens of its own, with 20 to 300 of
output.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import benchmarks.policies.register  # noqa: F401 (two of the routers)
from onbeat.core.options import change, make
from onbeat.core.slo import SLO
from onbeat.metrics.attainment import good_requests
from onbeat.perfmodel.device_spec import DeviceSpec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.scheduler.cluster import slo_router
from onbeat.scheduler.cluster.events import FleetAction, FleetEvent, Send
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import ReplicaKind, SimulationConfig
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.trace import Trace, read_trace

TUNING_SEEDS = (0, 1)
TEST_SEEDS = (101, 102, 103, 104, 105)
ROUTERS = ("round-robin", "random", "least-outstanding", "least-work", "prefix-affinity", "slo")
NUMBERS = {
    "as it is": {},
    "price 0": {"_PRICE": 0.0},
    "price 0.1": {"_PRICE": 0.1},
    "price 0.2": {"_PRICE": 0.2},
    "price 0.5": {"_PRICE": 0.5},
    "price 1": {"_PRICE": 1.0},
}
"""Variants of the router `slo`: constants of `slo_router` with other values."""
INTERACTIVE = SLOClass(name="interactive", slo=SLO(ttft=0.5, tbt=0.05))
MIXED = (
    replace(INTERACTIVE, share=0.7),
    SLOClass(name="batch", slo=SLO(ttft=10.0, tbt=0.5), share=0.3),
)
SLOWER = 1.8
LONGEST_IN_TRACE = 65536
Floats = NDArray[np.float64]
SETTINGS = make(
    ReplicaSettings,
    model="meta-llama/Llama-3.1-8B",
    device="h100-sxm",
    max_model_len=8192,
    max_num_seqs=64,
    policy="slo",
    replicas=4,
)


@dataclass(frozen=True)
class Prefixes:
    """Prompts that begin alike."""

    num: int
    num_tokens: int
    zipf: float


@dataclass(frozen=True)
class Cell:
    """A load and a fleet."""

    rate: float
    num_requests: int = 1000
    burstiness: float = 1.0
    classes: tuple[SLOClass, ...] = (INTERACTIVE,)
    prefixes: Prefixes | None = None
    trace: str | None = None
    """A trace with prefixes, from its beginning, at another rate."""
    devices: tuple[tuple[str, float], ...] = ()
    """(device, how much slower) of each replica; empty: H100."""
    limits: tuple[tuple[str, int], ...] = ()
    """Of each replica, where they differ from those of `SETTINGS`."""
    longer: int = 1
    """What the outputs of a chat are multiplied by, up to 2,000 tokens."""


_SLOW = (("h100-sxm", 1.0),) * 3 + (("h100-sxm", SLOWER),)
_TIGHT = SLOClass(name="tight", slo=SLO(ttft=0.5, tbt=0.02))
_EDGE_CELLS = {
    "short memory": Cell(80, limits=(("num_blocks", 5000), ("max_num_seqs", 256))),
    "short memory, long": Cell(20, limits=(("num_blocks", 5000), ("max_num_seqs", 256)), longer=4),
    "short memory, 64 x 4k": Cell(
        90, prefixes=Prefixes(64, 4096, 1.1), limits=(("num_blocks", 10000), ("max_num_seqs", 256))
    ),
    "256 x 4k, short memory": Cell(
        45, prefixes=Prefixes(256, 4096, 0.8), limits=(("num_blocks", 6000), ("max_num_seqs", 256))
    ),
    "tight TBT": Cell(80, classes=(_TIGHT,), limits=(("max_num_seqs", 256),), longer=2),
    "tight and loose TBT": Cell(
        80,
        classes=(replace(_TIGHT, share=0.5), replace(INTERACTIVE, share=0.5)),
        limits=(("max_num_seqs", 256),),
        longer=2,
    ),
    "many slots": Cell(100, limits=(("max_num_seqs", 256),)),
    "no objective": Cell(
        75, classes=(SLOClass(name="none", slo=SLO(tbt=0.1)),), prefixes=Prefixes(64, 4096, 1.1)
    ),
}
"""Loads short of memory, at the edge of their TBT, or with many slots: in which some number could matter."""
CELLS = {
    "chat": Cell(80),
    "bursts": Cell(65, burstiness=0.25),
    "classes": Cell(85, classes=MIXED),
    "one slow": Cell(68, devices=_SLOW),
    "64 x 4k, 75": Cell(75, prefixes=Prefixes(64, 4096, 1.1)),
    "64 x 4k, 90": Cell(90, prefixes=Prefixes(64, 4096, 1.1)),
    "64 x 4k, 105": Cell(105, prefixes=Prefixes(64, 4096, 1.1)),
    "128 x 2k, 130": Cell(130, prefixes=Prefixes(128, 2048, 1.3)),
    "48 x 4k, 75": Cell(75, prefixes=Prefixes(48, 4096, 0.8)),
    "64 x 4k, one slow": Cell(62, prefixes=Prefixes(64, 4096, 1.1), devices=_SLOW),
    "mooncake": Cell(
        14,
        num_requests=600,
        trace="mooncake_fast25_conversation_trace.csv.gz",
        classes=(SLOClass(name="long", slo=SLO(ttft=5.0, tbt=0.05)),),
    ),
    "2 H100 + 2 L4": Cell(
        45,
        classes=(SLOClass(name="standard", slo=SLO(ttft=2.0, tbt=0.1)),),
        devices=(("h100-sxm", 1.0),) * 2 + (("l4", 1.0),) * 2,
    ),
}
ALL_CELLS = CELLS | _EDGE_CELLS


def make_load(cell: Cell, seed: int, shared: Path) -> OfferedLoad:
    """Return the requests of a cell."""
    rng = np.random.default_rng([seed, 7])
    num = cell.num_requests
    arrivals = gamma_arrivals(num, rate=cell.rate, burstiness=cell.burstiness, rng=rng)
    if cell.trace is not None:
        load = _trace_load(_trace(shared / "data" / "traces" / cell.trace), arrivals, rng)
    elif cell.prefixes is not None:
        load = _prefix_load(cell.prefixes, num, rng, arrivals)
    else:
        trace = _trace(shared / "data" / "traces" / "azure2023_conv.csv.gz")
        rows = rng.integers(0, len(trace), num)
        load = OfferedLoad(
            name="chat",
            num_prompt_tokens=np.minimum(trace.num_prompt_tokens[rows], 6000),
            num_output_tokens=np.clip(cell.longer * trace.num_output_tokens[rows], 1, 2000),
            arrivals=arrivals,
        )
    return load.with_classes(cell.classes, seed=seed)


@lru_cache
def _trace(path: Path) -> Trace:
    return read_trace(path)


def _trace_load(trace: Trace, arrivals: Floats, rng: np.random.Generator) -> OfferedLoad:
    """Return requests that follow one another in a trace, from anywhere on."""
    num = len(arrivals)
    rows = np.arange(2 * num) + int(rng.integers(0, len(trace) - 2 * num))
    fitting = (trace.num_prompt_tokens + trace.num_output_tokens)[rows] <= LONGEST_IN_TRACE
    chosen = trace.take(rows[fitting][:num])
    return OfferedLoad(
        name="trace",
        num_prompt_tokens=chosen.num_prompt_tokens,
        num_output_tokens=np.maximum(1, chosen.num_output_tokens),
        arrivals=arrivals[: len(chosen)],
        block_ids=chosen.block_ids,
        block_size=chosen.block_size,
    )


def _prefix_load(known: Prefixes, num: int, rng: np.random.Generator, arrivals: Floats) -> OfferedLoad:
    weights = 1 / np.arange(1, known.num + 1) ** known.zipf
    chosen = rng.choice(known.num, size=num, p=weights / weights.sum())
    own, outputs = rng.integers(20, 400, num), rng.integers(20, 300, num)
    num_blocks = known.num_tokens // 16
    first_own = known.num * num_blocks
    blocks = tuple(
        (
            *range(prefix * num_blocks, (prefix + 1) * num_blocks),
            *range(first_own + index * 32, first_own + index * 32 + tokens // 16),
        )
        for index, (prefix, tokens) in enumerate(zip(chosen.tolist(), own.tolist(), strict=True))
    )
    return OfferedLoad(
        name="prefixes",
        num_prompt_tokens=own + known.num_tokens,
        num_output_tokens=outputs,
        arrivals=arrivals,
        block_ids=blocks,
        block_size=16,
    )


def make_config(cell: Cell, router: str, seed: int) -> SimulationConfig:
    """Return the fleet of a cell."""
    settings = change(SETTINGS, **dict(cell.limits))
    if cell.trace is not None:
        settings = change(settings, max_model_len=LONGEST_IN_TRACE)
    built = build_simulation(settings)
    kinds = []
    for device_id, slower in cell.devices:
        own = build_simulation(change(settings, device=device_id))
        time_model = make_step_time_model(
            "roofline", model=own.model, device=_slowed(own.device, slower), precision=own.precision
        )
        kinds.append(ReplicaKind(scheduler=own.config.scheduler, step_time=time_model, device=device_id))
    fleet = replace(built.config.fleet, router=router)
    return replace(built.config, fleet=fleet, seed=seed, kinds=tuple(kinds))


def _slowed(device: DeviceSpec, slower: float) -> DeviceSpec:
    flops = {name: rate / slower for name, rate in device.peak_flops.items()}
    return replace(device, memory_bandwidth=device.memory_bandwidth / slower, peak_flops=flops)


def run(name: str, router: str, seed: int, shared: Path) -> dict[str, Any]:
    """Run a cell behind a router; return what came of it."""
    cell = ALL_CELLS[name]
    config = make_config(cell, router, seed)
    predicted: dict[str, tuple[float, float]] = {}

    def watch(event: FleetEvent, now: float, actions: Sequence[FleetAction]) -> None:  # noqa: ARG001
        for action in actions:
            if isinstance(action, Send) and action.predicted_ttft is not None:
                predicted.setdefault(action.request_id, (now, action.predicted_ttft))

    started = time.process_time()
    step_time = build_simulation(SETTINGS).step_time
    result = simulate(make_load(cell, seed, shared), config, step_time, on_decision=watch)
    good = good_requests(result.records)
    errors = []
    for record in result.records:
        if record.request_id in predicted and record.delivery_times:
            now, ttft = predicted[record.request_id]
            errors.append(ttft / (record.delivery_times[0] - now) - 1)
    hits = result.num_prefix_hits / result.num_prefix_queries if result.num_prefix_queries else 0.0
    return {
        "cell": name,
        "router": router,
        "seed": seed,
        "attainment": 100 * float(good.mean()),
        "hits": 100 * hits,
        "errors": [float(np.quantile(np.abs(errors), q)) for q in (0.5, 0.9)] if errors else None,
        "bias": float(np.median(errors)) if errors else None,
        "cpu_seconds": time.process_time() - started,
    }


def show_numbers(cells: Sequence[str], seeds: Sequence[int], shared: Path) -> None:
    """Print by how many points requests keep their objectives less or more with other numbers."""
    print("| number |", " | ".join(cells), "|\n| --- |", " | ".join("---" for _ in cells), "|")
    base: dict[tuple[str, int], float] = {}
    for name, values in NUMBERS.items():
        shown = []
        with ExitStack() as stack:
            for key, value in values.items():
                stack.enter_context(patch.object(slo_router, key, value))
            for cell in cells:
                found = {seed: run(cell, "slo", seed, shared)["attainment"] for seed in seeds}
                if not values:
                    base |= {(cell, seed): share for seed, share in found.items()}
                    shown.append(f"{fmean(found.values()):.1f} %")
                else:
                    points = fmean(share - base[cell, seed] for seed, share in found.items())
                    shown.append(f"{points:+.1f}")
        print(f"| {name} |", " | ".join(shown), "|", flush=True)


def show(path: Path) -> None:
    """Print the tables of a file of results."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found[row["cell"]][row["router"]].append(row)
    routers = [each for each in ROUTERS if any(each in of for of in found.values())]
    print("| load, requests/s |", " | ".join(routers), "| slo - best other |")
    print("| --- |", " | ".join("---" for _ in routers), "| --- |")
    for cell, of in found.items():
        shown = [_mean([row["attainment"] for row in of[router]]) for router in routers]
        print(f"| {cell} ({ALL_CELLS[cell].rate:g}) |", " | ".join(shown), f"| {_difference(of)} |")
    print("\n| load | error P50 | P90 | hits slo | hits prefix-affinity |\n| --- | --- | --- | --- | --- |")
    for cell, of in found.items():
        errors = [row["errors"] for row in of["slo"] if row["errors"]]
        median, tail = (fmean(each[i] for each in errors) if errors else float("nan") for i in (0, 1))
        hits = [_mean([row["hits"] for row in of[router]]) for router in ("slo", "prefix-affinity")]
        print(f"| {cell} | {median:.0%} | {tail:.0%} | {hits[0]} | {hits[1]} |")


def _difference(of: dict[str, list[dict[str, Any]]]) -> str:
    """Return by how much the best other router differs, seed by seed."""
    means = {router: fmean(row["attainment"] for row in rows) for router, rows in of.items() if rows}
    if "slo" not in means or len(means) < 2:
        return ""
    best = max((router for router in means if router != "slo"), key=means.__getitem__)
    own = {row["seed"]: row["attainment"] for row in of["slo"]}
    return _mean([own[row["seed"]] - row["attainment"] for row in of[best] if row["seed"] in own], sign="+")


def _mean(values: list[float], *, sign: str = "") -> str:
    """Return a mean and half the width of its 95 % interval."""
    if not values:
        return "-"
    if len(values) < 2:
        return f"{values[0]:{sign}.1f}"
    quantile = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.0)
    return f"{fmean(values):{sign}.1f} ± {quantile * stdev(values) / len(values) ** 0.5:.1f}"


def main() -> None:
    """Run cells, or print the tables of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--out", type=Path, default=Path("fleet-routing.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=TEST_SEEDS)
    parser.add_argument("--cells", nargs="+", choices=ALL_CELLS, default=tuple(CELLS))
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=ROUTERS)
    parser.add_argument("--numbers", action="store_true", help="compare other numbers of the router slo")
    parser.add_argument("--table", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.table is not None:
        show(args.table)
        return
    if args.shared is None:
        parser.error("give --shared DIRECTORY, or set ONBEAT_SHARED")
    if args.numbers:
        show_numbers(args.cells, args.seeds, args.shared)
        return
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {(row["cell"], row["router"], row["seed"]) for row in map(json.loads, lines)}
    for seed in args.seeds:
        for cell in args.cells:
            for router in args.routers:
                if (cell, router, seed) in done:
                    continue
                row = run(cell, router, seed, args.shared)
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    {name: round(v, 1) if isinstance(v, float) else v for name, v in row.items()}, flush=True
                )


if __name__ == "__main__":
    main()
