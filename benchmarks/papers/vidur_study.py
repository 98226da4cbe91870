"""Vidur's study of policies: its orders, held against our simulator's."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.papers.studies import A100, SEEDS, Options, check, drawn_load
from onbeat.core.options import change, make
from onbeat.core.step import StepStats
from onbeat.metrics.distribution import percentile
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import collect_samples
from onbeat.simulator.observer import StepsWanted
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.trace import Trace, read_trace


class StepTimes:
    """An observer that keeps every step's time."""

    wanted_steps: StepsWanted = "all"

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_request(self, record: RequestRecord, /) -> None: ...

    def on_finish(self, record: RequestRecord, /) -> None: ...

    def on_step(self, _replica: int, stats: StepStats, /) -> None:
        self.seconds.append(stats.end - stats.start)


def study_vidur(options: Options) -> None:
    """Llama-3-8B on one A100; lengths of the Azure conversation trace up to 4,096 tokens, 600 requests."""
    data = options.data
    trace = read_trace(data / "traces" / "azure2023_conv.csv.gz")
    trace = trace.take(np.flatnonzero(trace.num_prompt_tokens + trace.num_output_tokens <= 4096))
    with (data / "cases" / "vidur_a100_llama3_8b_schedulers.csv").open() as file:
        published = {(row["scheduler"], int(row["qps"])): row for row in csv.DictReader(file)}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.yaml"
        operators = data / "profiles" / "vidur"
        profile.write_text(
            f"mlp: {operators / 'mlp_a100_Meta-Llama-3-8B.csv.gz'}\n"
            f"attention: {operators / 'attention_a100_llama3_8b_rebuilt.csv'}\n"
        )
        base = make(
            ReplicaSettings,
            model="meta-llama/Meta-Llama-3-8B",
            device=A100,
            max_num_seqs=128,
            max_model_len=4096,
            step_time="operator-table",
            profile=profile,
        )
        rows = {
            (name, qps): vidur_row(trace, change(base, policy=policy, max_num_batched_tokens=budget), qps)
            for qps in range(1, 7)
            for name, policy, budget in (
                ("sarathi", "sarathi", 512),
                ("vllm", "prefill-first", 4096),
                ("orca", "orca", 4096),
            )
        }
    print("\n| QPS | scheduler | TTFT P50 s | Vidur | TTFT P99 s | Vidur | step P99 s | Vidur |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, qps), (p50, p99, step) in rows.items():
        theirs = published[name, qps]
        print(f"| {qps} | {name} | {p50:.3f} | {theirs['ttft_p50_s']} | {p99:.3f} | {theirs['ttft_p99_s']} "
              f"| {step:.3f} | {theirs['iteration_p99_s']} |")  # fmt: skip
    print()
    high = range(2, 7)
    tails, medians = (
        {name: [rows[name, qps][column] for qps in high] for name in ("sarathi", "vllm", "orca")}
        for column in (2, 0)
    )
    others = zip(tails["vllm"], tails["orca"], strict=True)
    is_shorter = [own <= 0.6 * min(pair) for own, pair in zip(tails["sarathi"], others, strict=True)]
    check(
        "from 2 QPS up, sarathi's step tail is at most 0.6x that of vLLM and of orca", holds=all(is_shorter)
    )
    in_order = zip(medians["vllm"], medians["orca"], medians["sarathi"], strict=True)
    check("TTFT goes the other way: vLLM <= orca <= sarathi at the median",
          holds=all(a <= b <= c for a, b, c in in_order))  # fmt: skip


def vidur_row(trace: Trace, settings: ReplicaSettings, qps: int) -> tuple[float, float, float]:
    simulation = build_simulation(settings)
    values = []
    for seed in SEEDS:
        load = drawn_load(trace, num_requests=600, seed=seed, rate=qps)
        steps = StepTimes()
        result = simulate(load, simulation.config, simulation.step_time, observer=steps)
        ttft = collect_samples(result.records)["ttft"]
        values.append((percentile(ttft, 50), percentile(ttft, 99), percentile(steps.seconds, 99)))
    p50, p99, step = np.mean(values, axis=0).tolist()
    return p50, p99, step
