"""How fast the simulator is: a recorded trace on one replica, and a million requests on a thousand.

    python -m benchmarks.check.simulator_speed --shared DIR [--only trace|trace-slo|large] [--json FILE]

DIR holds data/traces/azure2023_conv.csv.gz (the Azure LLM inference trace of 2023, conversations; Patel et
al., Splitwise, ISCA 2024). Every replica is Llama-3.1-8B on one H100 as the roofline sees it, 256 sequences,
policy sarathi with a budget of 512 tokens; the trace is run again under slo, whose budget is time, without
objectives. The large run draws its lengths from the trace; arrivals are
Poisson at 70 % of the rate that one replica reaches with all of its 256 places taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.device_spec import find_device
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.memory import kv_capacity
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.replica.token_budget import default_token_budget
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.arrivals import replay_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.trace import read_trace

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
TOKEN_BUDGET = 512
LOAD_SHARE = 0.7


@dataclass(frozen=True)
class Speed:
    name: str
    num_requests: int
    num_replicas: int
    num_steps: int
    wall_seconds: float
    cpu_seconds: float
    requests_per_second: float
    requests_per_cpu_second: float
    peak_gib: float


def make_replica() -> tuple[SchedulerConfig, StepTimeModel]:
    """Return the limits of one replica and its roofline."""
    model, device = find_model_spec("meta-llama/Llama-3.1-8B"), find_device("h100-sxm")
    target = FitTarget(model=model, device=device)
    memory = kv_capacity(target, block_size=BLOCK_SIZE, max_num_batched_tokens=TOKEN_BUDGET)
    scheduler = SchedulerConfig(
        policy="sarathi",
        num_blocks=memory.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=16384,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=TOKEN_BUDGET,
    )
    return scheduler, make_step_time_model("roofline", target)


def under_slo(scheduler: SchedulerConfig) -> SchedulerConfig:
    """Return the same replica under policy slo."""
    budget = default_token_budget("slo", max_model_len=scheduler.max_model_len, max_num_seqs=MAX_NUM_SEQS)
    return replace(scheduler, policy="slo", max_num_batched_tokens=budget)


def read_load(shared: Path) -> OfferedLoad:
    """Return the trace at its own rate."""
    trace = read_trace(shared / "data/traces/azure2023_conv.csv.gz")
    assert trace.times is not None
    order = np.argsort(trace.times, kind="stable")
    return OfferedLoad(
        name="azure",
        arrivals=replay_arrivals(trace.times),
        num_prompt_tokens=trace.num_prompt_tokens[order],
        num_output_tokens=trace.num_output_tokens[order],
    )


def resample(load: OfferedLoad, num_requests: int, *, rate: float, seed: int = 0) -> OfferedLoad:
    """Return requests with lengths drawn from a load, and Poisson arrivals."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(load), num_requests)
    return OfferedLoad(
        name="azure-resampled",
        arrivals=np.cumsum(rng.exponential(1 / rate, num_requests)),
        num_prompt_tokens=load.num_prompt_tokens[rows],
        num_output_tokens=load.num_output_tokens[rows],
    )


def find_capacity(load: OfferedLoad, scheduler: SchedulerConfig, step_time: StepTimeModel) -> float:
    """Return the requests per second of one replica whose places are all taken."""
    full = resample(load, 4000, rate=1.0).with_arrivals(None)
    config = SimulationConfig(scheduler=scheduler, max_concurrency=MAX_NUM_SEQS)
    ends = np.sort([record.end for record in simulate(full, config, step_time).records])
    first, last = len(ends) // 4, len(ends) * 3 // 4  # neither filling up nor running empty
    return float((last - first) / (ends[last] - ends[first]))


def measure(name: str, load: OfferedLoad, config: SimulationConfig, step_time: StepTimeModel) -> Speed:
    """Time one run."""
    before = time.process_time()
    result: SimulationResult = simulate(
        load, config, step_time, on_progress=show_progress if sys.stderr.isatty() else None
    )
    cpu_seconds = time.process_time() - before
    assert result.is_complete
    assert len(result.records) == len(load)
    return Speed(
        name=name,
        num_requests=len(load),
        num_replicas=config.num_replicas,
        num_steps=result.total.num_steps,
        wall_seconds=result.wall_seconds,
        cpu_seconds=cpu_seconds,
        requests_per_second=len(load) / result.wall_seconds,
        requests_per_cpu_second=len(load) / cpu_seconds,
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


def show_progress(num_finished: int, num_requests: int, virtual_time: float) -> None:
    print(f"\r{num_finished}/{num_requests} requests, {virtual_time:.0f} s", end="", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--num-requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--only", choices=("trace", "trace-slo", "large"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.shared is None:
        parser.error("give --shared or set ONBEAT_SHARED: the folder with data/traces")
    scheduler, step_time = make_replica()
    load = read_load(Path(args.shared))
    speeds = []
    if args.only in (None, "trace"):
        speeds.append(measure("trace", load, SimulationConfig(scheduler=scheduler), step_time))
    if args.only in (None, "trace-slo"):
        speeds.append(measure("trace-slo", load, SimulationConfig(scheduler=under_slo(scheduler)), step_time))
    if args.only in (None, "large"):
        capacity = find_capacity(load, scheduler, step_time)
        print(f"capacity of one replica: {capacity:.2f} requests/s")
        large = resample(load, args.num_requests, rate=LOAD_SHARE * capacity * args.replicas)
        fleet = FleetConfig(replicas=args.replicas, router="round-robin")
        config = SimulationConfig(scheduler=scheduler, fleet=fleet)
        speeds.append(measure("large", large, config, step_time))
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(
        f"{'run':9} {'requests':>9} {'replicas':>8} {'wall s':>8} {'CPU s':>8} "
        f"{'requests/s':>10} {'per CPU s':>10} {'peak GiB':>8}"
    )
    for speed in speeds:
        print(
            f"{speed.name:9} {speed.num_requests:9} {speed.num_replicas:8} "
            f"{speed.wall_seconds:8.1f} {speed.cpu_seconds:8.1f} {speed.requests_per_second:10.0f} "
            f"{speed.requests_per_cpu_second:10.0f} {speed.peak_gib:8.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in speeds], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
