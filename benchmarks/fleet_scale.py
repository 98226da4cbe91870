"""What a simulated fleet costs by its size: a choice, all decisions, and the simulation as a whole.

    python benchmarks/fleet_scale.py --replicas 10 100 1000 --each 100 --most-seconds 600
    python benchmarks/fleet_scale.py --replicas 1000 --each 1000 --outputs 2 7 --parts 10 --most-seconds 3600
    python benchmarks/fleet_scale.py --replicas 10 100 1000 --each 6 --outputs 2 7 --again

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from resource import getpagesize
from typing import Any, overload
from unittest.mock import patch

import numpy as np
from harness.pages import markdown_table
from numpy.typing import NDArray

from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.routers import ROUTERS, make_router
from onbeat.scheduler.cluster.routing import Choice, RoutingRequest
from onbeat.scheduler.cluster.slo_router import SLORouter
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
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
AT_ONCE = 1000
"""Requests that are scored together."""
LEAST_AGAIN = 3000
"""Requests of a run whose choices are made twice; the second half of them is shown."""
AGAIN = ["replicas", "requests", "choice P50, us", "made again at once, us"]
PARTS = ["requests ended", "simulation, us a request", "choice P50, us", "memory, MB"]
HEADER = ["router", "replicas", "requests", "choice P50, us", "P99, us", "P50 of the last 10,000, us"]


class PromptBlocks(Sequence[Sequence[int]]):
    """The blocks of each prompt, made when they are asked for: a shared prefix, then ids of its own.

    Parameters
    ----------
    prefixes : which prefix each prompt begins with.
    own : tokens of each prompt behind it.
    """

    def __init__(self, prefixes: NDArray[np.int64], own: NDArray[np.int64]) -> None:
        self._prefixes, self._own = prefixes, own

    def __len__(self) -> int:
        return len(self._own)

    @overload
    def __getitem__(self, row: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Sequence[int]]: ...
    def __getitem__(self, row: int | slice) -> Sequence[int] | Sequence[Sequence[int]]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        first, own = int(self._prefixes[row]) * PREFIX_BLOCKS, NUM_PREFIXES * PREFIX_BLOCKS + 10 * row
        return (*range(first, first + PREFIX_BLOCKS), *range(own, own + int(self._own[row]) // BLOCK))


def make_load(num_replicas: int, num_requests: int, outputs: tuple[int, int]) -> OfferedLoad:
    rng = np.random.default_rng(7)
    weights = 1 / np.arange(1, NUM_PREFIXES + 1) ** 1.1
    prefixes = rng.choice(NUM_PREFIXES, size=num_requests, p=weights / weights.sum())
    own = rng.integers(16, 160, num_requests)
    load = OfferedLoad(
        name="scale",
        num_prompt_tokens=own + PREFIX_BLOCKS * BLOCK,
        num_output_tokens=rng.integers(*outputs, num_requests),
        arrivals=gamma_arrivals(num_requests, rate=RATE_OF_A_REPLICA * num_replicas, burstiness=1.0, rng=rng),
        block_ids=PromptBlocks(prefixes, own),
        block_size=BLOCK,
    )
    return load.with_classes(OBJECTIVES, seed=0)


@dataclass(slots=True)
class Watch:
    """Scores requests as they end, keeps none of them, and notes what the run has cost by then."""

    num_ended: int = 0
    num_good: int = 0
    marks: list[tuple[int, float, float, int]] = field(default_factory=list)
    """(requests ended, CPU seconds, memory in MB, choices) at each tenth of the run."""
    _recent: list[RequestRecord] = field(default_factory=list)

    def hear(self, record: RequestRecord) -> None:
        """Take a request that has ended."""
        self.num_ended += 1
        self._recent.append(record)
        if len(self._recent) == AT_ONCE:
            self.score()

    def score(self) -> None:
        """Count those that were good of the last ones, and forget them."""
        if self._recent:
            self.num_good += int(good_requests(self._recent).sum())
            self._recent.clear()

    def mark(self, choices: array[int]) -> None:
        """Note what has been used so far."""
        used = (time.process_time(), memory(), len(choices))
        self.marks.append((self.num_ended, *used))


def memory() -> float:
    """Return the resident memory of this process, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * getpagesize() / 1e6


def measure(
    router: str, num_replicas: int, num_requests: int, outputs: tuple[int, int], parts: int
) -> dict[str, Any]:
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
    watch = Watch()
    every = max(1, num_requests // parts)

    def on_record(record: RequestRecord) -> None:
        watch.hear(record)
        if watch.num_ended % every == 0:
            watch.mark(choices)

    started = time.process_time()
    watch.mark(choices)
    with (
        patch.object(kind, "route", timed(kind.route, choices)),
        patch.object(Fleet, "on_event", timed(Fleet.on_event, decisions)),
    ):
        simulate(load, config, built.step_time, on_decision=lambda *_: None, on_record=on_record)
    watch.score()
    return {
        "choice_us": [float(np.quantile(choices, q)) / 1e3 for q in (0.5, 0.99)],
        "last_us": float(np.quantile(choices[-LAST:], 0.5)) / 1e3,
        "fleet_us": sum(decisions) / 1e3 / num_requests,
        "seconds": time.process_time() - started,
        "attainment": watch.num_good / num_requests,
        "parts": [
            [
                f"{now[0]:,}",
                f"{1e6 * (now[1] - before[1]) / (now[0] - before[0]):.0f}",
                f"{np.quantile(choices[before[3] : now[3]], 0.5) / 1e3:.0f}",
                f"{now[2]:.0f}",
            ]
            for before, now in pairwise(watch.marks)
        ],
    }


def measure_again(num_replicas: int, num_requests: int, outputs: tuple[int, int]) -> list[str]:
    """Have router `slo` make each choice twice in succession; return what the first and the second take.

    The second finds all that it reads in the processor's caches.
    """
    load = make_load(num_replicas, num_requests, outputs)
    built = build_simulation(SETTINGS)
    config = replace(built.config, router="slo", num_replicas=num_replicas)
    times: tuple[list[int], list[int]] = ([], [])
    route = SLORouter.route

    def ask_twice(
        self: SLORouter, request: RoutingRequest, now: float, excluded: Collection[int]
    ) -> Choice | None:
        for each in times:
            start = time.thread_time_ns()
            self._best(self._look_up(request), now, excluded)
            each.append(time.thread_time_ns() - start)
        return route(self, request, now, excluded)

    with patch.object(SLORouter, "route", ask_twice):
        simulate(load, config, built.step_time, on_decision=lambda *_: None, on_record=lambda _: None)
    medians = [float(np.median(each[num_requests // 2 :])) / 1e3 for each in times]
    return [f"{num_replicas:,}", f"{num_requests:,}", *(f"{each:.0f}" for each in medians)]


def rows(args: argparse.Namespace) -> list[list[str]]:
    found = []
    for router in args.routers:
        cost = 0.0
        for num_replicas in args.replicas:
            num_requests = num_replicas * args.each
            if cost:
                num_requests = min(num_requests, int(args.most_seconds / cost))
            seen = measure(router, num_replicas, num_requests, tuple(args.outputs), args.parts)
            if args.parts > 1:
                print(markdown_table(PARTS, seen["parts"]), flush=True)
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
    parser.add_argument("--parts", type=int, default=1, help="of a run, whose costs are shown one by one")
    parser.add_argument("--again", action="store_true", help="make each choice of router slo twice, instead")
    args = parser.parse_args()
    if args.again:
        sizes = [(number, max(LEAST_AGAIN, number * args.each)) for number in args.replicas]
        print(markdown_table(AGAIN, [measure_again(*size, tuple(args.outputs)) for size in sizes]))
        return
    header = [*HEADER, "fleet, us a request", "simulation, us a request", "objectives met"]
    print(markdown_table(header, rows(args)))


if __name__ == "__main__":
    main()
