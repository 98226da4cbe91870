"""Prompts on replicas of their own against mixed replicas under policy `slo`: who serves more, and when.

    python -m benchmarks.fleet.when_to_disaggregate --out FILE.jsonl [--shapes ...]  # runs what it lacks
    python -m benchmarks.fleet.when_to_disaggregate --table FILE.jsonl  # the map
    python -m benchmarks.fleet.when_to_disaggregate --plot FILE.jsonl  # the map, as a picture

Four replicas of four H100 each with Llama-3.1-70B (320 KiB of KV a token), simulated, steps by the roofline.
Poisson arrivals for 20 s, so that a rate has to be kept up; prompts and outputs are log-normal around a shape
(sigma 0.6), cut at 8,192 and 2,048 tokens. TTFT 0.5 s (2 s for prompts of 4,096) and a TBT objective. The
goodput of a fleet is the highest rate at which 90 % of the requests keep both: of mixed replicas to 10 %, of
split ones as a multiple of that. Fleets: four mixed replicas under `slo` and the router `slo`, that move
streams where that mends something; and every split of four, under `slo` in both pools, by each pool rule over
both links.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from benchmarks.harness.pages import REPOSITORY
from benchmarks.harness.plots import COLOURS, figure, write_image
from onbeat.core.fleet import PoolSizes
from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.metrics.attainment import good_requests
from onbeat.scheduler.cluster.pools import POOL_RULES
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

IMAGE = REPOSITORY / "docs" / "images" / "when-to-disaggregate.png"
SHAPES = {(256, 512): 70.0, (1024, 256): 30.0, (4096, 64): 7.0}
"""Median prompt and output tokens -> requests per second at which the search for mixed replicas starts."""
LINKS = (25.0, 200.0)
"""Gigabit/s of a replica: Ethernet, and InfiniBand HDR."""
TTFT, LONG_TTFT = 0.5, 2.0
LEVEL = 0.9
MULTIPLES = (0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
"""Of the goodput of mixed replicas, at which split ones are tried."""
TOLERANCE = 1.1
SECONDS = 20.0
SEED = 3


@dataclass(frozen=True)
class Fleet:
    """Four replicas, and how they share the work."""

    num_prefill: int = 0
    rule: str = "adaptive"

    @property
    def name(self) -> str:
        return f"{self.num_prefill}+{4 - self.num_prefill} {self.rule}" if self.num_prefill else "mixed"


MIXED = Fleet()
SPLITS = tuple(Fleet(num, rule) for rule in POOL_RULES for num in (2, 1, 3))


def make_load(shape: tuple[int, int], tbt: float, rate: float) -> OfferedLoad:
    """Return requests at a rate; those of a lower one are the first of those of a higher one."""
    num_requests = max(100, round(rate * SECONDS))
    rng = np.random.default_rng(SEED)
    drawn = rng.standard_normal((num_requests, 2))
    lengths = [
        np.clip(median * np.exp(0.6 * drawn[:, index]), 8, most).astype(np.int64)
        for index, (median, most) in enumerate(zip(shape, (8192, 2048), strict=True))
    ]
    return OfferedLoad(
        name=f"{shape[0]}/{shape[1]}",
        num_prompt_tokens=lengths[0],
        num_output_tokens=lengths[1],
        arrivals=np.cumsum(np.random.default_rng(SEED + 1).exponential(1.0, num_requests)) / rate,
        classes=(SLOClass(name="all", slo=SLO(ttft=LONG_TTFT if shape[0] > 2048 else TTFT, tbt=tbt)),),
        class_ids=np.zeros(num_requests, dtype=np.int64),
    )


def attainment(fleet: Fleet, gbps: float, load: OfferedLoad) -> float:
    """Return the share of requests that keep their objectives."""
    num_prefill = fleet.num_prefill
    settings = make(
        ReplicaSettings,
        model="meta-llama/Llama-3.1-70B",
        tensor_parallel=4,
        device="h100-sxm",
        max_model_len=16_384,
        policy="slo",
        router="slo",
        replicas=4,
        disaggregate=PoolSizes(prefill=num_prefill, decode=4 - num_prefill) if num_prefill else None,
        pool_rule=fleet.rule,
        kv_bandwidth=gbps * 1e9 / 8,
    )
    simulation = build_simulation(settings)
    result = simulate(load, simulation.config, simulation.step_time)
    return float(good_requests(result.records).mean())


def goodput(attained: Callable[[float], float], start: float) -> float:
    """Return the highest rate at which enough requests are good, to the tolerance; 0 below start / 32."""
    low, high, rate = 0.0, 0.0, start
    while not (low and high):
        if attained(rate) >= LEVEL:
            low, rate = rate, rate * 1.25
        else:
            high, rate = rate, rate / 1.25
        if rate < start / 32:
            return 0.0
    while high > TOLERANCE * low:
        middle = (low * high) ** 0.5
        if attained(middle) >= LEVEL:
            low = middle
        else:
            high = middle
    return low


def multiple(attained: Callable[[float], float], rate: float) -> float:
    """Return the highest of `MULTIPLES` of a rate at which enough requests are good; 0 for none."""
    low, high = -1, len(MULTIPLES)
    while high - low > 1:
        middle = (low + high) // 2
        if attained(MULTIPLES[middle] * rate) >= LEVEL:
            low = middle
        else:
            high = middle
    return MULTIPLES[low] if low >= 0 else 0.0


def measure(out: Path, shapes: list[str], tbts: list[float]) -> None:
    """Search what the file lacks; the mixed fleet first, of whose goodput the others have a multiple."""
    rows = read(out) if out.exists() else []
    done = {(row["shape"], row["tbt"], row["gbps"], row["fleet"]): row["goodput"] for row in rows}
    for shape, start in SHAPES.items():
        name = f"{shape[0]}/{shape[1]}"
        if shapes and name not in shapes:
            continue
        for tbt in (each / 1e3 for each in tbts):
            cases = [(MIXED, 200.0), *((split, gbps) for gbps in reversed(LINKS) for split in SPLITS)]
            for fleet, gbps in cases:
                if (name, tbt, gbps, fleet.name) in done:
                    continue

                def attained(rate: float, fleet: Fleet = fleet, gbps: float = gbps) -> float:
                    return attainment(fleet, gbps, make_load(shape, tbt, rate))  # noqa: B023

                if fleet is MIXED:
                    found = goodput(attained, start)
                else:
                    mixed = done[name, tbt, 200.0, MIXED.name]
                    found = mixed * multiple(attained, mixed)
                done[name, tbt, gbps, fleet.name] = found
                row = {"shape": name, "tbt": tbt, "gbps": gbps, "fleet": fleet.name, "goodput": found}
                with out.open("a") as file:
                    print(json.dumps(row), file=file)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def print_map(rows: list[dict[str, Any]]) -> None:
    """Print, for each load, what mixed replicas serve, and the best split as a multiple of it."""
    mixed = {(row["shape"], row["tbt"]): row["goodput"] for row in rows if row["fleet"] == MIXED.name}
    best: dict[tuple[str, float, float], list[tuple[float, str]]] = defaultdict(list)
    for row in rows:
        if row["fleet"] != MIXED.name:
            best[row["shape"], row["tbt"], row["gbps"]].append((row["goodput"], row["fleet"]))
    head = " | ".join(f"{gbps:g} Gbit/s" for gbps in LINKS)
    print(f"| prompt/output | TBT, ms | mixed, requests/s | {head} |")
    print("|---|---:|---:|" + "---|" * len(LINKS))
    for (shape, tbt), rate in mixed.items():
        cells = []
        for gbps in LINKS:
            found = best.get((shape, tbt, gbps))
            if not found or not rate:
                cells.append("-")
                continue
            most, fleet = max(found)
            cells.append(f"{most / rate:.2f}x ({fleet})")
        print(f"| {shape} | {tbt * 1e3:g} | {rate:.1f} | {' | '.join(cells)} |")


def draw_map(rows: list[dict[str, Any]]) -> go.Figure:
    """Return the goodput of every split as a multiple of that of mixed replicas; grey is not run."""
    found = {(row["shape"], row["tbt"], row["gbps"], row["fleet"]): row["goodput"] for row in rows}
    loads = sorted({(row["shape"], row["tbt"], row["gbps"]) for row in rows if row["fleet"] != MIXED.name})
    loads.sort(key=lambda load: load[2])  # those over the faster link are at the top
    fleets = [Fleet(num, rule) for rule in POOL_RULES for num in (1, 2, 3)]
    shares = [
        [
            _share(found.get((*load, fleet.name)), found[load[0], load[1], max(LINKS), MIXED.name])
            for fleet in fleets
        ]
        for load in loads
    ]
    made = figure("", "", "")
    made.add_heatmap(
        z=shares,
        x=list(range(len(fleets))),
        y=list(range(len(loads))),
        text=[
            ["" if each is None else f"{each:.2g}" if each else "< 0.4" for each in line] for line in shares
        ],
        texttemplate="%{text}",
        colorscale=[[0, COLOURS[1]], [0.5, "#ffffff"], [1, COLOURS[0]]],
        zmin=0.4,
        zmid=1.0,
        zmax=1.6,
        xgap=2,
        ygap=2,
        showscale=False,
    )
    for index, rule in enumerate(POOL_RULES):
        made.add_annotation(x=3 * index + 1, y=1.06, yref="paper", text=f"<b>{rule}</b>", showarrow=False)
    for edge in (2.5, 5.5):
        made.add_vline(edge, line_color="#555", line_width=2)
    names = [f"{shape} tokens, TBT {tbt * 1e3:g} ms, {gbps:g} Gbit/s" for shape, tbt, gbps in loads]
    made.update_layout(
        title="Goodput of four replicas in two pools, over that of four mixed ones; grey: not run",
        xaxis={
            "tickvals": list(range(len(fleets))),
            "ticktext": [fleet.name.split()[0] for fleet in fleets],
            "title": "replicas for prompts + replicas that generate",
            "showgrid": False,
            "zeroline": False,
        },
        yaxis={
            "tickvals": list(range(len(loads))),
            "ticktext": names,
            "title": "",
            "showgrid": False,
            "zeroline": False,
        },
        plot_bgcolor="#dddddd",
        margin={"t": 90, "l": 260},
    )
    return made


def _share(goodput: float | None, of_mixed: float) -> float | None:
    return None if goodput is None else goodput / of_mixed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines; what is there is not searched again")
    parser.add_argument("--table", type=Path, help="print the map of such a file")
    parser.add_argument("--plot", type=Path, help="draw the map of such a file")
    parser.add_argument("--tbt-ms", type=float, nargs="*", default=[25.0, 50.0], help="objectives to keep")
    parser.add_argument("--shapes", nargs="*", default=[], help="such as 1024/256 (default: all)")
    args = parser.parse_args()
    if args.out is not None:
        measure(args.out, args.shapes, args.tbt_ms)
    if args.table is not None:
        print_map(read(args.table))
    if args.plot is not None:
        print(f"written: {write_image(draw_map(read(args.plot)), IMAGE)}")


if __name__ == "__main__":
    main()
