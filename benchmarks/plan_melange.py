#!/usr/bin/env python3
"""Compare the planner's estimates with the published study of Mélange: mixes of four GPUs, and their cost.

Mélange (Griggs et al., arXiv 2404.14527) measured vLLM 0.2.7 with Llama-2-7B on L4, A10G, A100 and H100, and
counts a mean TPOT alone: so does this comparison, with the planner's steady rates and its integer program,
and without a simulation. Its chat lengths (Arena) are not public as a file; lengths here are log-normal with
the means given. Mélange takes every request to be as long as its bucket goes: --corners.

    benchmarks/plan_melange.py --corners --host-overhead-ms 10
    benchmarks/plan_melange.py --corners --shared DIR

--shared has the host take time for each row of a step, as it did in vLLM of that season: DIR holds
`data/profiles` with the performance table of Mutinifni/splitwise-sim, measured with vLLM (Patel et al.,
ISCA 2024). Of its decode steps of Llama-2-70B on eight H100, whose GPUs have least to do for a row, the
roofline is taken away; what is left grows by so much with each row.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from step_tables import splitwise_tables

from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.perfmodel import engines
from onbeat.perfmodel.device_spec import find_device
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.planner.buckets import OUTPUT_EDGES, PROMPT_EDGES, Bucket, buckets_of
from onbeat.planner.mix import MixProblem, solve_mix
from onbeat.planner.units import RatedUnit, Unit, rate_unit
from onbeat.simulator.settings import ReplicaSettings
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

PRICES = {"l4": 0.70, "a10g": 1.01, "a100-80-sxm": 3.67, "h100-sxm": 7.516}
"""Of the paper, dollars an hour."""
ALONE_AT_32 = {"l4": 65, "a10g": 39, "a100-80-sxm": 9, "h100-sxm": 8}
"""Published counts of one type alone at 32 requests/s, TPOT 120 ms."""
MIXES = {
    1.0: ({"l4": 1, "a10g": 1}, 1.71),
    2.0: ({"l4": 2, "a10g": 1}, 2.41),
    4.0: ({"l4": 1, "a100-80-sxm": 1}, 4.37),
    32.0: (None, 25.81),
}
"""Published mixes and their cost by rate."""
ROW_TABLE = "splitwise llama2-70b h100-80gb TP 8"
"""Whose steps tell the host's time for a row."""


def chat_load(*, input_len: int, output_len: int, tpot: float, num_requests: int = 4000) -> OfferedLoad:
    """Return requests with log-normal lengths (sigma 1) around their means."""
    random = np.random.default_rng(0)

    def lengths(mean: int) -> np.ndarray:
        drawn = random.lognormal(np.log(mean) - 0.5, 1.0, num_requests)
        return np.clip(np.round(drawn), 1, 2000).astype(np.int64)

    load = OfferedLoad(
        name="chat", num_prompt_tokens=lengths(input_len), num_output_tokens=lengths(output_len)
    )
    return load.with_classes([SLOClass(name="all", slo=SLO(tbt=tpot))], seed=0)


def at_corners(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """Return buckets whose requests are all as long as the longest that they may hold."""

    def upper(edges: tuple[int, ...], tokens: int) -> int:
        return edges[int(np.searchsorted(edges, tokens))]

    return tuple(
        replace(
            bucket,
            num_prompt_tokens=upper(PROMPT_EDGES, bucket.num_prompt_tokens),
            num_output_tokens=upper(OUTPUT_EDGES, bucket.num_output_tokens),
        )
        for bucket in buckets
    )


def rated_units(buckets: tuple[Bucket, ...], engine: str, host_overhead: float) -> list[RatedUnit]:
    found = []
    for device, price in PRICES.items():
        settings = make(
            ReplicaSettings,
            model="meta-llama/Llama-2-7b-hf",
            device=device,
            max_model_len=4096,
            dtype="fp16",
            engine=engine,
            host_overhead=host_overhead,
        )
        found.append(rate_unit(Unit(settings=settings, usd_per_hour=price, watts=1.0), buckets))
    return found


def row_seconds(profiles: Path) -> float:
    """Return what the host takes for a row of a step, by Splitwise's table."""
    table = next(each for each in splitwise_tables(profiles) if each.name == ROW_TABLE)
    steps = [step for step in table.steps if step.new_tokens == 1]
    seconds = make_step_time_model(
        "roofline",
        model=find_model_spec(table.model),
        device=find_device(table.device),
        parallelism=Parallelism(table.tensor),
    )
    rows = np.array([step.batch for step in steps])
    computed = [
        seconds.step_time(BatchShape.of_decodes(step.batch, step.batch * step.context)) for step in steps
    ]
    left = np.array([step.seconds for step in steps]) - computed
    return float(np.polyfit(rows, left, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input-len", type=int, default=220, help="mean prompt tokens")
    parser.add_argument("--output-len", type=int, default=210, help="mean output tokens")
    parser.add_argument("--tpot-ms", type=float, default=120.0)
    parser.add_argument("--engine", default="none", help="terms of a whole engine for the step times: vllm")
    parser.add_argument(
        "--host-overhead-ms", type=float, default=0.0, help="of every step, as old engines have"
    )
    parser.add_argument("--shared", type=Path, help="host time of a row by a published table, see above")
    parser.add_argument(
        "--corners", action="store_true", help="take requests to be as long as their bucket goes"
    )
    args = parser.parse_args()
    load = chat_load(input_len=args.input_len, output_len=args.output_len, tpot=args.tpot_ms / 1e3)
    buckets = at_corners(buckets_of(load)) if args.corners else buckets_of(load)
    old = nullcontext()
    if args.shared is not None:
        args.engine = "vllm@0.6"
        host = row_seconds(args.shared / "data" / "profiles")
        print(f"{host * 1e6:.0f} us of host time a row\n")
        terms = {"vllm": (replace(engines.find_engine("vllm@0.6"), row_seconds=host),)}
        old = patch.object(engines, "_table", lambda: terms)
    with old:
        units = rated_units(buckets, args.engine, args.host_overhead_ms / 1e3)
    print("| GPU | requests/s | alone at 32/s | published | cost |\n| --- | --- | --- | --- | --- |")
    for each in units:
        count = int(np.ceil(32 / each.rate(buckets) - 1e-9))
        device = each.unit.device
        print(
            f"| {device} | {each.rate(buckets):.3g} | {count} | {ALONE_AT_32[device]} | "
            f"{count * PRICES[device]:.2f} |"
        )
    print("\n| rate | mix | $/h | published | $/h | best alone | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rate, (published, cost) in MIXES.items():
        demand = rate * np.array([bucket.share for bucket in buckets])
        with np.errstate(divide="ignore"):
            loads = np.stack([demand / each.rates for each in units], axis=1)
        started = time.perf_counter()
        mix = solve_mix(MixProblem(costs=tuple(PRICES.values()), loads=loads))
        seconds = time.perf_counter() - started
        assert mix is not None
        alone = min(np.ceil(rate / each.rate(buckets) - 1e-9) * each.unit.usd_per_hour for each in units)
        text = " + ".join(f"{n} {device}" for device, n in zip(PRICES, mix.counts, strict=True) if n)
        theirs = "-" if published is None else " + ".join(f"{n} {device}" for device, n in published.items())
        print(f"| {rate:g} | {text} | {mix.cost:.2f} | {theirs} | {cost:.2f} | {alone:.2f} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
