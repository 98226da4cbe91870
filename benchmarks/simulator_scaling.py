"""What a simulated request costs by the number of replicas and of requests, as a table and a chart.

    python benchmarks/simulator_scaling.py [--json FILE] [--html FILE]

Every replica gets the same load (lengths log-normal around 300 and 60 tokens, Poisson arrivals), so that
only what is shared grows: the router, the event heap and the requests of the run.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from onbeat.core.step import BatchShape
from onbeat.report.charts import COLOURS
from onbeat.report.page import Page
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.config import SchedulerConfig
from onbeat.simulator.config import SimulationConfig
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad

RATE_OF_A_REPLICA = 8.0
REQUESTS_OF_A_REPLICA = 40
REPLICAS = (1, 4, 16, 64, 256, 1024)
REQUESTS = (1_000, 4_000, 16_000, 64_000)
REPEATS = 3


@dataclass(frozen=True)
class Cost:
    series: str
    num_replicas: int
    num_requests: int
    request_us: float
    """CPU time; the least of the repeats."""


class Decoder:
    """A step-time model with the proportions of a small model on a large device."""

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:  # noqa: ARG002
        return 6e-3 + 3e-5 * shape.num_new_tokens + 5e-8 * shape.decode_context_tokens

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        raise NotImplementedError("no policy here asks for it")

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Nothing is learnt."""


def make_load(num_requests: int, num_replicas: int) -> OfferedLoad:
    rng = np.random.default_rng(0)
    gaps = rng.exponential(1 / (RATE_OF_A_REPLICA * num_replicas), num_requests)
    return OfferedLoad(
        name="scaling",
        arrivals=np.cumsum(gaps),
        num_prompt_tokens=np.clip(rng.lognormal(5.7, 0.5, num_requests), 1, 3000).astype(np.int64),
        num_output_tokens=np.clip(rng.lognormal(4.1, 0.5, num_requests), 1, 900).astype(np.int64),
    )


def measure(series: str, router: str, num_replicas: int, num_requests: int) -> Cost:
    load = make_load(num_requests, num_replicas)
    scheduler = SchedulerConfig(
        policy="sarathi", num_blocks=8192, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512
    )
    config = SimulationConfig(scheduler=scheduler, num_replicas=num_replicas, router=router)
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        result = simulate(load, config, Decoder())
        times.append(time.process_time() - start)
        assert len(result.records) == num_requests
    cost = Cost(series, num_replicas, num_requests, min(times) / num_requests * 1e6)
    print(f"{series:20} {num_replicas:8} {num_requests:9} {cost.request_us:10.1f}", flush=True)
    return cost


def plot(costs: list[Cost], path: Path) -> None:
    """Write a chart with a logarithmic x axis, on which O(log n) is a straight line."""
    data = []
    for position, series in enumerate(dict.fromkeys(cost.series for cost in costs)):
        own = [cost for cost in costs if cost.series == series]
        is_by_length = series == "trace length"
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{series} (requests)" if is_by_length else f"{series} (replicas)",
                "x": [cost.num_requests if is_by_length else cost.num_replicas for cost in own],
                "y": [cost.request_us for cost in own],
                "line": {"color": COLOURS[position], "width": 2},
            }
        )
    layout = {
        "xaxis": {"type": "log", "dtick": 1, "title": {"text": "replicas, or requests of the run"}},
        "yaxis": {"title": {"text": "microseconds"}, "rangemode": "tozero"},
        "showlegend": True,
        "height": 420,
    }
    page = Page()
    title = "CPU time of one simulated request"
    page.write(path, title, page.card({"title": title, "data": data, "layout": layout}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--html", type=Path)
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{'series':20} {'replicas':>8} {'requests':>9} {'us/request':>10}")
    costs = [measure("trace length", "round-robin", 1, num_requests) for num_requests in REQUESTS]
    for router in ROUTERS:
        costs += [measure(router, router, count, count * REQUESTS_OF_A_REPLICA) for count in REPLICAS]
    if args.json:
        args.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n", encoding="utf-8")
    if args.html:
        plot(costs, args.html)


if __name__ == "__main__":
    main()
