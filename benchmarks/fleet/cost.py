"""What a fleet's decisions cost: a choice, a report and a delivery, from 1 to 1,000 replicas.

    python -m benchmarks.fleet.cost

CPU time of this process, no engine. Each replica runs 32 streams and has 8 prompts with deadlines, of which
it reports; prompts are 4,096 tokens of one of 64 prefixes in blocks of 16 and 200 of their own. Between two
arrivals 4 replicas report, and the request that came 64 arrivals earlier ends.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.core.slo import SLO
from onbeat.scheduler.cluster.events import (
    Arrived,
    Delivered,
    FleetEvent,
    Joined,
    Reported,
    RoutingRequest,
    ScaleAsked,
    Send,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.routers import ROUTERS, make_router

LIMITS = ReplicaLimits(max_model_len=8192, max_num_seqs=256, num_blocks=27_000, block_size=16)
COSTS = PrefillCosts(token=2.6e-5, pair=1.3e-10, step=7e-3, decode=1e-5)
OBJECTIVES = SLO(ttft=0.5, tbt=0.05)


def load(now: float, num_taken: int) -> ReplicaLoad:
    """Return a report."""
    return ReplicaLoad(
        time=now,
        num_taken=num_taken,
        busy=0.02,
        num_running=40,
        num_free_blocks=15_000,
        num_decodes=32,
        num_context_tokens=40_000,
        tightest_tbt=0.05,
        decode_seconds=9e-3,
        full_seconds=35e-3,
        prefill_share=0.7,
        backlog=tuple((0.05 * index, 0.02, 1) for index in range(8)),
        costs=COSTS,
    )


def measure(router: str, num_replicas: int, num_requests: int) -> dict[str, float]:
    """Return the median CPU microseconds of each kind of event."""
    fleet = Fleet(make_router(router))
    fleet.on_event(ScaleAsked(num_replicas), 0.0)
    taken = [0] * num_replicas
    spent: dict[str, list[float]] = {"choice": [], "report": [], "end": []}
    under_way: deque[tuple[str, str]] = deque()

    def timed(kind: str, event: FleetEvent, now: float) -> list[object]:
        start = time.thread_time_ns()
        actions = fleet.on_event(event, now)
        spent[kind].append((time.thread_time_ns() - start) / 1e3)
        return list(actions)

    for index in range(num_replicas):
        fleet.on_event(Joined(f"r{index}", LIMITS), 0.0)
        fleet.on_event(Reported(f"r{index}", load(0.0, 0)), 0.0)
    for number in range(num_requests):
        now = 0.01 * number
        prefix = number * 7 % 64
        blocks = tuple(prefix * 256 + each for each in range(256)) + tuple(
            100_000 + number * 16 + each for each in range(12)
        )
        request = RoutingRequest(
            f"q{number}", blocks, num_prompt_tokens=4296, max_tokens=200, arrival=now, slo=OBJECTIVES
        )
        [sent] = timed("choice", Arrived(request), now)
        assert isinstance(sent, Send)
        taken[int(sent.replica[1:])] += 1
        under_way.append((sent.replica, sent.request_id))
        if len(under_way) > 64:
            replica, request_id = under_way.popleft()
            timed("end", Delivered(replica, request_id, 200, 0, is_finished=True), now)
        for each in range(4):
            index = (number * 4 + each) % num_replicas
            timed("report", Reported(f"r{index}", load(now, taken[index])), now)
    return {kind: median(values) for kind, values in spent.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=(1, 4, 16, 64, 1000))
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=("least-outstanding", "slo"))
    parser.add_argument("--requests", type=int, default=3000)
    args = parser.parse_args()
    show: Callable[[str], None] = print
    show("| router | replicas | choice (us) | report (us) | end (us) |\n| --- | --- | --- | --- | --- |")
    for router in args.routers:
        for num_replicas in args.replicas:
            found = measure(router, num_replicas, args.requests)
            show(
                f"| {router} | {num_replicas:,} | "
                + " | ".join(f"{each:.0f}" for each in found.values())
                + " |"
            )


if __name__ == "__main__":
    main()
