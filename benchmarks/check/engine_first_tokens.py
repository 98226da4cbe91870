"""Times to the first token of a newer vLLM, simulated against published ones.

    python -m benchmarks.check.engine_first_tokens          # every load, with the terms of the package
    python -m benchmarks.check.engine_first_tokens --fit    # what the server adds to each first token

The loads are those of `engine_versions.py` (`engine_loads.csv`): requests that come at equal intervals,
of some 45 users who each send the same prompt again and again, so that all but its last block is in the
prefix cache. Each load is simulated as such. What is left of the measured TTFT is the server's own: the
time that brings the mean relative error of every second load to 0. The other loads are held back. A load
that nearly fills its server is left out of the fit: its requests wait for a place.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.check.engine_versions import Load, read_loads
from onbeat.scheduler.scheduler_config import SchedulerLimits
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad

USERS = {"codegen": 44, "general": 45, "general-lite": 45, "roleplay": 50}
"""Of a load: system prompts times users of each, as its configuration has them."""
BLOCK_SIZE = 16
SERVER = SchedulerLimits(
    policy="sarathi", max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=4096, block_size=BLOCK_SIZE
)
"""As the servers were started; the policy is vLLM's: decodes first, then chunks."""
SECONDS = 40
ENGINE = "vllm"
MOST_SEATS = 0.8
"""Share of the server's places that a load may fill and still count in the fit."""


class Simulated(NamedTuple):
    """Means of a load once its prompts are cached, seconds."""

    ttft: float
    tpot: float


def simulated(load: Load, *, request_overhead: float | None = None) -> Simulated:
    """Run a load through one replica; `request_overhead` as `Deployment` takes it."""
    users = USERS[load.name]
    num = int(load.rate * SECONDS) + 3 * users
    blocks = -(-load.input_tokens // BLOCK_SIZE)
    offered = OfferedLoad(
        name=load.name,
        num_prompt_tokens=np.full(num, load.input_tokens),
        num_output_tokens=np.full(num, load.output_tokens),
        arrivals=np.arange(num) / load.rate,
        block_ids=[[blocks * (row % users) + block for block in range(blocks)] for row in range(num)],
        block_size=BLOCK_SIZE,
    )
    settings = Deployment(
        model=load.model,
        device=load.device,
        tensor_parallel=load.tensor,
        engine=ENGINE,
        limits=SERVER,
        request_overhead=request_overhead,
    )
    simulation = resolve(settings)
    records = simulate(offered, simulation.config, simulation.step_time).records[2 * users :]
    ttft = float(np.mean([record.ttft for record in records]))
    latency = float(np.mean([record.end - record.arrival for record in records]))
    return Simulated(ttft, (latency - ttft) / (load.output_tokens - 1))


def fit_request_seconds(loads: Sequence[Load]) -> float:
    """Return what the server adds to each first token, seconds."""
    some = [load for load in loads if load.decoding < MOST_SEATS * SERVER.max_num_seqs]
    lacks = [1 - simulated(load, request_overhead=0.0).ttft / load.ttft for load in some]
    return sum(lacks) / sum(1 / load.ttft for load in some)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    loads = read_loads()
    if parser.parse_args().fit:
        fitted, other = (fit_request_seconds(loads[first::2]) for first in (0, 1))
        print(f"request_seconds: {fitted:.3g} (from the loads that are held back: {other:.3g})")
        return
    heads = ("TTFT, ms", "simulated", "error %", "TPOT, ms", "error %")
    print(f"| model | device | TP | load | requests/s | {' | '.join(heads)} |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|---:|")
    errors = []
    for load in loads:
        found = simulated(load)
        errors.append((found.ttft / load.ttft - 1, found.tpot / load.tpot - 1))
        print(
            f"| {load.model} | {load.device} | {load.tensor} | {load.name} | {load.rate:g} | "
            f"{1e3 * load.ttft:.1f} | {1e3 * found.ttft:.1f} | {100 * errors[-1][0]:+.1f} | "
            f"{1e3 * load.tpot:.2f} | {100 * errors[-1][1]:+.1f} |"
        )
    of = np.array(errors)
    for name, some in (("fitted to", of[::2]), ("held back", of[1::2])):
        size, bias = 100 * np.abs(some).mean(axis=0), 100 * some.mean(axis=0)
        print(
            f"| **{name}**, mean size (bias) | | | {len(some)} loads | | | | "
            f"{size[0]:.1f} ({bias[0]:+.1f}) | | "
            f"{size[1]:.1f} ({bias[1]:+.1f}) |"
        )


if __name__ == "__main__":
    main()
