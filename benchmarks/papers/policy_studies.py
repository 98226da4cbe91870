"""What the papers say of batching policies, repeated in simulation with the same scheduler objects.

    python -m benchmarks.papers.policy_studies --shared DIR [--only NAME ...] [--jobs N]

DIR holds public traces and profiles under `data/` (sources: each study). Every study prints a table and
whether the published order holds; step times are the uncalibrated roofline of the paper's model and device
unless the study says otherwise, so shapes and ratios are compared, never absolute times.

========  ===========================================================================================
capacity  Sarathi-Serve (Agrawal et al., OSDI 2024), figures 10 and 12: highest rate with P99 TBT within
          the objective and a median scheduling delay of at most 2 s; ShareGPT lengths, Poisson
ablation  Sarathi-Serve, table 4: whole prompts beside decodes, chunks that take turns, both
stall     Sarathi-Serve, section 3: a prompt of 8,192 tokens arrives while 32 requests decode
orca      Orca (Yu et al., OSDI 2022), section 6: against request-level batching with padding
paging    vLLM (Kwon et al., SOSP 2023): memory reserved for the longest answer against paged memory
bursts    Splitwise's trace of a coding service (Patel et al., ISCA 2024) against a Poisson process
vidur     Vidur (Agrawal et al., MLSys 2024): its answers for three schedulers on one set of operator times
========  ===========================================================================================
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.studies import A100, SEEDS, Options, check, drawn_load, run
from benchmarks.papers.vidur_study import study_vidur
from onbeat.core.options import change, make
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.distribution import percentile
from onbeat.metrics.summary import collect_samples
from onbeat.planner.capacity import CapacityTask, find_capacity
from onbeat.planner.grid import ReplicaCase
from onbeat.planner.objectives import SarathiObjective
from onbeat.planner.parallel import run_tasks
from onbeat.planner.search import SearchOptions
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.workload.arrivals import poisson_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.trace import read_trace

YI = "01-ai/Yi-34B-200K"
MISTRAL = "mistralai/Mistral-7B-v0.1"
STEP_TOLERANCE = 1.05


# --- capacity ---------------------------------------------------------------------------------------------

CAPACITY_POLICIES: dict[str, dict[str, Any]] = {
    "orca": {"policy": "orca", "max_num_seqs": 16, "max_num_batched_tokens": 8192},
    "vLLM 32": {"policy": "prefill-first", "max_num_seqs": 32, "max_num_batched_tokens": 8192},
    "vLLM 64": {"policy": "prefill-first", "max_num_seqs": 64, "max_num_batched_tokens": 8192},
    "vLLM 128": {"policy": "prefill-first", "max_num_seqs": 128, "max_num_batched_tokens": 8192},
    "sarathi 512": {"policy": "sarathi", "max_num_seqs": 128, "max_num_batched_tokens": 512},
    "sarathi 2048": {"policy": "sarathi", "max_num_seqs": 128, "max_num_batched_tokens": 2048},
}
OBJECTIVES = {(MISTRAL, 1): (0.1, 0.15, 0.2, 0.3, 0.5), (YI, 2): (0.2, 0.3, 0.4, 0.6, 1.0)}
"""(model, tensor parallel) -> TBT objectives, from the paper's strict to its relaxed one."""


def study_capacity(options: Options) -> None:
    trace = read_trace(options.data / "traces" / "sharegpt_8k_lengths_llama2tok.csv.gz")
    loads = [drawn_load(trace, num_requests=1024, seed=seed) for seed in SEEDS]
    for (model, tp), objectives in OBJECTIVES.items():
        base = make(ReplicaSettings, model=model, device=A100, tensor_parallel=tp, max_model_len=8192)
        tasks = [
            CapacityTask(
                case=ReplicaCase(settings=change(base, **settings)),
                load=load,
                objective=SarathiObjective(tbt=tbt),
                options=SearchOptions(),
            )
            for tbt in objectives
            for settings in CAPACITY_POLICIES.values()
            for load in loads
        ]
        found = iter(run_tasks(find_capacity, tasks, jobs=options.jobs))
        rates: dict[float, dict[str, list[float]]] = {}
        for tbt in objectives:
            for name in CAPACITY_POLICIES:
                repeats = [next(found) for _ in loads]
                rates.setdefault(tbt, {})[name] = [
                    repeat.bracket.low if repeat and repeat.bracket else 0.0 for repeat in repeats
                ]
        show_capacity(f"{model}, {tp} x {A100}", rates)


def show_capacity(title: str, rates: dict[float, dict[str, list[float]]]) -> None:
    print(f"\n{title}: requests/s (mean of {len(SEEDS)} seeds)\n")
    columns = [*CAPACITY_POLICIES, "sarathi / vLLM", "sarathi / orca"]
    print(f"| P99 TBT <= | {' | '.join(columns)} |")
    print("|---|" + "---|" * len(columns))
    ratios, orca_ratios = [], []
    for tbt, by_policy in rates.items():
        means = {name: float(np.mean(values)) for name, values in by_policy.items()}
        best = max(means["sarathi 512"], means["sarathi 2048"])
        ratios.append(best / max(means["vLLM 32"], means["vLLM 64"], means["vLLM 128"]))
        orca_ratios.append(best / means["orca"])
        cells = " | ".join(f"{value:.2f}" for value in means.values())
        print(f"| {tbt * 1e3:.0f} ms | {cells} | {ratios[-1]:.2f} | {orca_ratios[-1]:.2f} |")
    print()
    strict = [float(np.mean(values)) for name, values in next(iter(rates.values())).items() if "vLLM" in name]
    check(f"strict: sarathi >= 2x vLLM ({ratios[0]:.2f}) and orca ({orca_ratios[0]:.2f})",
          holds=2 <= ratios[0] <= 8 and orca_ratios[0] >= 2)  # fmt: skip
    check(f"vLLM's strict capacity does not move with its batch ({max(strict) / min(strict):.2f} <= 1.25)",
          holds=max(strict) <= 1.25 * min(strict))  # fmt: skip
    falls = all(later <= earlier * 1.1 for earlier, later in pairwise(ratios))
    check("the advantage falls as the objective relaxes (within 10 %)", holds=falls)


# --- ablation, stall --------------------------------------------------------------------------------------


PUBLISHED_ABLATION = {"hybrid-only": (0.53, 0.68), "chunk-only": (1.04, 0.17), "sarathi": (0.76, 0.14)}
"""Policy -> (P50 TTFT, P99 TBT), seconds."""


def study_ablation(options: Options) -> None:
    """Budgets of 1,024 tokens, as the paper's text says, and of 512, as its released scripts have it."""
    trace = read_trace(options.data / "traces" / "sharegpt_8k_lengths_llama2tok.csv.gz")
    loads = [drawn_load(trace, num_requests=128, seed=seed, rate=1.0) for seed in SEEDS]
    hybrid = ablation_means(loads, "hybrid-only", 8192)
    rows = [("hybrid-only", "hybrid-only", hybrid)]
    halves: dict[int, tuple[tuple[float, float], tuple[float, float]]] = {}
    for budget in (1024, 512):
        chunk, both = (ablation_means(loads, policy, budget) for policy in ("chunk-only", "sarathi"))
        halves[budget] = (chunk, both)
        rows += [(f"chunk-only {budget}", "chunk-only", chunk), (f"sarathi {budget}", "sarathi", both)]
    print("\n| policy, budget | P50 TTFT s | published | P99 TBT s | published |\n|---|---|---|---|---|")
    for name, policy, (ttft, tbt) in rows:
        published = PUBLISHED_ABLATION[policy]
        print(f"| {name} | {ttft:.2f} | {published[0]} | {tbt:.3f} | {published[1]} |")
    print()
    for budget, (chunk, both) in halves.items():
        check(f"{budget}: TTFT: hybrid-only < both < chunk-only", holds=hybrid[0] < both[0] < chunk[0])
        check(f"{budget}: P99 TBT of both <= 0.4x hybrid-only ({both[1] / hybrid[1]:.2f})",
              holds=both[1] <= 0.4 * hybrid[1])  # fmt: skip
        check(f"{budget}: P99 TBT of chunk-only within 0.9..1.6x of both ({chunk[1] / both[1]:.2f})",
              holds=0.9 <= chunk[1] / both[1] <= 1.6)  # fmt: skip


def ablation_means(loads: Sequence[OfferedLoad], policy: str, budget: int) -> tuple[float, float]:
    """Return (P50 TTFT, P99 TBT), seconds, means over the loads."""
    settings = make(
        ReplicaSettings,
        model=YI,
        device=A100,
        tensor_parallel=2,
        max_model_len=8192,
        max_num_seqs=128,
        policy=policy,
        max_num_batched_tokens=budget,
    )
    samples = [collect_samples(run(load, settings).records) for load in loads]
    ttft = np.mean([percentile(each["ttft"], 50) for each in samples])
    return float(ttft), float(np.mean([percentile(each["itl"], 99) for each in samples]))


def study_stall(_options: Options) -> None:
    """32 requests decode; a prompt of 8,192 tokens arrives after three seconds."""
    prompts = np.array([256] * 32 + [8192])
    outputs = np.array([400] * 32 + [16])
    arrivals = np.array([0.0] * 32 + [3.0])
    load = OfferedLoad(name="stall", arrivals=arrivals, num_prompt_tokens=prompts, num_output_tokens=outputs)
    base = make(
        ReplicaSettings, model=YI, device=A100, tensor_parallel=2, max_model_len=16384, max_num_seqs=64
    )
    worst = {}
    for name, policy, budget in (("vLLM", "prefill-first", 16384), ("sarathi", "sarathi", 512)):
        settings = change(base, policy=policy, max_num_batched_tokens=budget)
        result = run(load, settings)
        decodes = [record for record in result.records if record.num_prompt_tokens == 256]
        worst[name] = max(float(np.diff(record.delivery_times).max()) for record in decodes)
        model = build_simulation(settings).step_time
    prompt_alone, full = BatchShape(), BatchShape()
    prompt_alone.add(0, 8192, samples=True)
    for _ in range(32):
        full.add(256 + 400, 1, samples=True)
    full.add(8192 - 480, 480, samples=True)
    ratio = worst["vLLM"] / worst["sarathi"]
    print(f"\nworst gap of a decode: vLLM {worst['vLLM']:.3f} s, sarathi(512) {worst['sarathi']:.3f} s, ")
    print(f"ratio {ratio:.1f} (the paper's 28.3 is of a hybrid batch to decodes alone)\n")
    check(f"vLLM's gap is at least the prompt's time ({model.step_time(prompt_alone):.3f} s)",
          holds=worst["vLLM"] >= model.step_time(prompt_alone))  # fmt: skip
    check(f"sarathi's gap is at most a full step's time ({model.step_time(full):.3f} s) + 5 %",
          holds=worst["sarathi"] <= model.step_time(full) * STEP_TOLERANCE)  # fmt: skip


# --- orca, paging -----------------------------------------------------------------------------------------


def study_orca(_options: Options) -> None:
    """GPT-3 175B (OPT-175B has its sizes) on 16 A100-40G; rate at 5 times the idle normalised latency."""
    base = make(
        ReplicaSettings,
        model="facebook/opt-175b",
        device="a100-40-sxm",
        tensor_parallel=16,
        max_model_len=2048,
    )
    print("\n| lengths | policy, batch | requests/s (seeds) |\n|---|---|---|")
    mean: dict[tuple[str, str, int], float] = {}
    for lengths in ("uniform", "equal"):
        for policy, max_num_seqs in (("static", 8), ("static", 32), ("orca", 32), ("orca", 128)):
            settings = change(base, policy=policy, max_num_seqs=max_num_seqs)
            rates = [rate_at_latency(orca_load(lengths, seed), settings, factor=5.0) for seed in SEEDS]
            mean[lengths, policy, max_num_seqs] = float(np.mean(rates))
            shown = ", ".join(f"{rate:.2f}" for rate in rates)
            print(f"| {lengths} | {policy}, {max_num_seqs} | {np.mean(rates):.2f} ({shown}) |")
    print()
    uniform = mean["uniform", "orca", 128] / mean["uniform", "static", 8]
    equal = mean["equal", "orca", 32] / mean["equal", "static", 32]
    check(f"uniform lengths, batch 128 against FasterTransformer's best, 8: {uniform:.1f}x >= 5",
          holds=uniform >= 5)  # fmt: skip
    check(f"one length for all, one batch: {equal:.2f}x <= 2", holds=equal <= 2)


def orca_load(lengths: str, seed: int, num_requests: int = 1500) -> OfferedLoad:
    rng = np.random.default_rng(seed)
    is_uniform = lengths == "uniform"
    return OfferedLoad(
        name=lengths,
        arrivals=poisson_arrivals(num_requests, rate=1.0, rng=rng),
        num_prompt_tokens=rng.integers(32, 513, num_requests) if is_uniform else np.full(num_requests, 272),
        num_output_tokens=rng.integers(1, 129, num_requests) if is_uniform else np.full(num_requests, 64),
    )


def normalised_latency(result: SimulationResult) -> float:
    """Return the median of latency per output token, seconds."""
    return float(np.median([record.e2e / record.num_output_tokens for record in result.records]))


def idle_latency(load: OfferedLoad, settings: ReplicaSettings, num_requests: int) -> float:
    """Return the normalised latency of a load's first requests, each alone on the machine."""
    return normalised_latency(run(load.at_rate(0.01).take(np.arange(num_requests)), settings))


def rate_at_latency(
    load: OfferedLoad,
    settings: ReplicaSettings,
    *,
    factor: float,
    within: tuple[float, float] = (0.02, 200.0),
    tolerance: float = 1.025,
    num_idle_requests: int = 200,
) -> float:
    """Return the highest rate whose median normalised latency is within `factor` of the idle machine's.

    Parameters
    ----------
    within : rates per second, one that is low enough and one that is too high.
    tolerance : ratio of the rates between which the search ends.
    num_idle_requests : how many of the load's first requests show the idle machine's latency.
    """
    limit = factor * idle_latency(load, settings, num_idle_requests)
    low, high = within
    while high > tolerance * low:
        middle = (low * high) ** 0.5
        fits = normalised_latency(run(load.at_rate(middle), settings)) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def study_paging(options: Options) -> None:
    """OPT-13B on an A100-40G with ShareGPT lengths: answers of up to 2,048 tokens may be asked for."""
    trace = read_trace(options.data / "traces" / "sharegpt_8k_lengths_llama2tok.csv.gz")
    fits = trace.num_prompt_tokens + trace.num_output_tokens <= 2048
    trace = trace.take(np.flatnonzero(fits))
    base = make(
        ReplicaSettings,
        model="facebook/opt-13b",
        device="a100-40-sxm",
        max_model_len=2048,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        declared_max_tokens=2048,
    )
    rates = {
        policy: [
            rate_at_latency(
                drawn_load(trace, num_requests=1000, seed=seed), change(base, policy=policy), factor=5.0
            )
            for seed in SEEDS
        ]
        for policy in ("orca", "hybrid-only")
    }
    reserved, paged = (float(np.mean(rates[policy])) for policy in ("orca", "hybrid-only"))
    print(f"\nreserved for 2,048 tokens: {reserved:.2f} requests/s; paged: {paged:.2f} requests/s\n")
    check(f"paged memory serves at least 1.5x ({paged / reserved:.2f})", holds=paged >= 1.5 * reserved)


# --- bursts ------


def attainment(result: SimulationResult) -> float:
    return float(good_requests(result.records).mean())


def study_bursts(options: Options) -> None:
    trace = read_trace(options.data / "traces" / "azure2023_code.csv.gz")
    assert trace.times is not None
    order = np.argsort(trace.times, kind="stable")
    trace = trace.take(order)
    assert trace.times is not None
    times = trace.times - trace.times[0]
    classes = (SLOClass(name="standard", slo=SLO(ttft=2.0, tbt=0.1)),)
    recorded = OfferedLoad(
        name="recorded",
        arrivals=times,
        num_prompt_tokens=np.maximum(1, trace.num_prompt_tokens),
        num_output_tokens=np.maximum(1, trace.num_output_tokens),
        class_ids=np.zeros(len(times), np.int16),
        classes=classes,
    )
    model = "meta-llama/Llama-3.1-8B"
    settings = make(ReplicaSettings, model=model, device="h100-sxm", max_queue_seconds=0.0)
    shares = [attainment(run(recorded, settings))]
    print(f"\nattainment of TTFT 2 s and TBT 100 ms: recorded arrivals {shares[0]:.4f}")
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        arrivals = poisson_arrivals(len(times), rate=len(times) / float(times[-1]), rng=rng)
        shares.append(attainment(run(replace(recorded, arrivals=arrivals), settings)))
        print(f"Poisson arrivals of the same rate, seed {seed}: {shares[-1]:.4f}")
    print()
    check("bursts cost attainment", holds=shares[0] < min(shares[1:]))


STUDIES: dict[str, Callable[[Options], None]] = {
    "capacity": study_capacity,
    "ablation": study_ablation,
    "stall": study_stall,
    "orca": study_orca,
    "paging": study_paging,
    "bursts": study_bursts,
    "vidur": study_vidur,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--only", nargs="+", choices=tuple(STUDIES), default=tuple(STUDIES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    if args.shared is None:
        parser.error("the data's folder is needed: --shared DIR, or the variable ONBEAT_SHARED")
    for name in args.only:
        start = time.perf_counter()
        print(f"\n## {name}")
        STUDIES[name](Options(Path(args.shared) / "data", args.jobs))
        print(f"\n({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
