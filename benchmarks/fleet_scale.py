"""What a simulated fleet costs by its size: a choice, all decisions, and the simulation as a whole.

    python benchmarks/fleet_scale.py --replicas 10 100 1000 --each 100 --most-seconds 600
    python benchmarks/fleet_scale.py --replicas 1000 --each 1000 --outputs 2 6

H100 with Llama-3.1-8B, 64 slots, policy `slo`; each replica gets the same load, 24 requests a second of 600
prompt tokens and 60 of output in the mean, Poisson, so that only what is shared grows. Prompts begin with one
of 64 prefixes of 512 tokens, chosen by a Zipf law of exponent 1.1. Times are CPU time of this process. A size
whose run would take longer than `--most-seconds`, by the one before, gets fewer requests, and the table says
how many.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from harness.pages import markdown_table

from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.metrics.attainment import good_requests
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.routers import ROUTERS, make_router
from onbeat.simulator.setup import ReplicaSettings, build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

RATE_OF_A_REPLICA = 24.0
NUM_PREFIXES, PREFIX_BLOCKS, BLOCK = 64, 32, 16
OBJECTIVES = (SLOClass(name="interactive", slo=SLO(ttft=0.5, tbt=0.05)),)
SETTINGS = make(
    ReplicaSettings,
    model="meta-llama/Llama-3.1-8B",
    device="h100-sxm",
    max_model_len=4096,
    max_num_seqs=64,
    policy="slo",
)
LAST = 10_000
"""Of the choices, those that are also shown by themselves: whether the cost grows as a run goes on."""
HEADER = ["router", "replicas", "requests", "choice P50, us", "P99, us", "P50 of the last 10,000, us"]


def make_load(num_replicas: int, num_requests: int, outputs: tuple[int, int]) -> OfferedLoad:
    rng = np.random.default_rng(7)
    weights = 1 / np.arange(1, NUM_PREFIXES + 1) ** 1.1
    prefixes = rng.choice(NUM_PREFIXES, size=num_requests, p=weights / weights.sum())
    own = rng.integers(16, 160, num_requests)
    first_own = NUM_PREFIXES * PREFIX_BLOCKS
    begins = [tuple(range(each * PREFIX_BLOCKS, (each + 1) * PREFIX_BLOCKS)) for each in range(NUM_PREFIXES)]
    blocks = tuple(
        (*begins[prefix], *range(first_own + 10 * index, first_own + 10 * index + tokens // BLOCK))
        for index, (prefix, tokens) in enumerate(zip(prefixes.tolist(), own.tolist(), strict=True))
    )
    load = OfferedLoad(
        name="scale",
        num_prompt_tokens=own + PREFIX_BLOCKS * BLOCK,
        num_output_tokens=rng.integers(*outputs, num_requests),
        arrivals=gamma_arrivals(num_requests, rate=RATE_OF_A_REPLICA * num_replicas, burstiness=1.0, rng=rng),
        block_ids=blocks,
        block_size=BLOCK,
    )
    return load.with_classes(OBJECTIVES, seed=0)


def measure(router: str, num_replicas: int, num_requests: int, outputs: tuple[int, int]) -> dict[str, Any]:
    """Run a fleet; return what its decisions took."""
    load = make_load(num_replicas, num_requests, outputs)
    built = build_simulation(SETTINGS)
    config = replace(built.config, router=router, num_replicas=num_replicas)
    choices = array("q")
    decisions = array("q")

    def timed(call: Callable[..., Any], into: array[int]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            start = time.thread_time_ns()
            found = call(*args, **named)
            into.append(time.thread_time_ns() - start)
            return found

        return run

    kind = type(make_router(router, 0))
    started = time.process_time()
    with (
        patch.object(kind, "route", timed(kind.route, choices)),
        patch.object(Fleet, "on_event", timed(Fleet.on_event, decisions)),
    ):
        result = simulate(load, config, built.step_time, on_decision=lambda *_: None)
    return {
        "choice_us": [float(np.quantile(choices, q)) / 1e3 for q in (0.5, 0.99)],
        "last_us": float(np.quantile(choices[-LAST:], 0.5)) / 1e3,
        "fleet_us": sum(decisions) / 1e3 / num_requests,
        "seconds": time.process_time() - started,
        "attainment": float(good_requests(result.records).mean()),
    }


def rows(args: argparse.Namespace) -> list[list[str]]:
    found = []
    for router in args.routers:
        cost = 0.0
        for num_replicas in args.replicas:
            num_requests = num_replicas * args.each
            if cost:
                num_requests = min(num_requests, int(args.most_seconds / cost))
            seen = measure(router, num_replicas, num_requests, tuple(args.outputs))
            cost = seen["seconds"] / num_requests
            median, tail = seen["choice_us"]
            row = [router, f"{num_replicas:,}", f"{num_requests:,}", f"{median:.0f}", f"{tail:.0f}"]
            row += [
                f"{seen['last_us']:.0f}",
                f"{seen['fleet_us']:.0f}",
                f"{1e6 * cost:.0f}",
                f"{100 * seen['attainment']:.1f} %",
            ]
            print(row, flush=True)
            found.append(row)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=(10, 100, 1000))
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=("slo",))
    parser.add_argument("--each", type=int, default=1000, help="requests of a replica")
    parser.add_argument(
        "--outputs", type=int, nargs=2, default=(20, 100), help="tokens, below the second number"
    )
    parser.add_argument("--most-seconds", type=float, default=600.0)
    args = parser.parse_args()
    header = [*HEADER, "fleet, us a request", "simulation, us a request", "objectives met"]
    print(markdown_table(header, rows(args)))


if __name__ == "__main__":
    main()
