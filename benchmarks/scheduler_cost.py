"""What planning costs: `schedule` + `update` for a full batch, by the length of the waiting queue.

    python benchmarks/scheduler_cost.py [--json FILE]

Every row of the batch decodes; the queue behind it grows by a factor of 1,000. The cost of a step may grow
with the batch, not with the queue.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import ModelRunnerOutput
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler

NUM_STEPS = 400


@dataclass(frozen=True)
class Cost:
    policy: str
    num_running: int
    num_waiting: int
    schedule_us: float
    update_us: float
    total_us_p99: float


def measure(policy: str, num_running: int, num_waiting: int) -> Cost:
    config = SchedulerConfig(
        num_blocks=64 * num_running,
        max_num_seqs=num_running,
        max_model_len=1024,
        max_num_batched_tokens=max(2048, num_running),
        policy=policy,
    )
    scheduler = Scheduler(config)
    for index in range(num_running + num_waiting):
        sampling = SamplingParams(max_tokens=1000 - 256)
        prompt = tuple(range(index, index + 256))
        scheduler.add(
            Request(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling, arrival=index)
        )
    schedule_times, update_times = [], []
    while len(schedule_times) < NUM_STEPS:
        start = time.perf_counter()
        scheduled = scheduler.schedule(0.0)
        middle = time.perf_counter()
        assert scheduled is not None
        result = ModelRunnerOutput([[7] for row in scheduled.rows if row.samples])
        before_update = time.perf_counter()
        scheduler.update(scheduled, result, 0.0)
        end = time.perf_counter()
        if scheduled.shape.num_decodes == num_running:
            schedule_times.append(middle - start)
            update_times.append(end - before_update)
    totals = sorted(a + b for a, b in zip(schedule_times, update_times, strict=True))
    return Cost(
        policy,
        num_running,
        num_waiting,
        statistics.median(schedule_times) * 1e6,
        statistics.median(update_times) * 1e6,
        totals[int(len(totals) * 0.99)] * 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    costs = [measure(policy, 256, 0) for policy in POLICIES]
    costs += [measure("sarathi", 256, n) for n in (100, 10_000)]
    costs += [measure("sarathi", n, 0) for n in (32, 64, 128, 512)]
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{'policy':14} {'running':>7} {'waiting':>7} {'schedule us':>11} {'update us':>9} {'p99 us':>11}")
    for cost in costs:
        print(
            f"{cost.policy:14} {cost.num_running:7} {cost.num_waiting:7} {cost.schedule_us:11.0f} "
            f"{cost.update_us:9.0f} {cost.total_us_p99:11.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
