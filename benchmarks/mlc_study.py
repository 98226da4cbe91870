"""MLCEngine's study of tensor against data parallelism, repeated in simulation: Llama-3-8B on H100.

    python benchmarks/mlc_study.py [--json FILE] [--report FILE.html] [--jobs N]

The MLC community's post "Optimizing and Characterizing High-Throughput Low-Latency LLM Inference in
MLCEngine" (blog.mlc.ai, October 2024) keeps a number of users busy (closed loop) and plots the mean time per
output token against output tokens/s per GPU. Its points for Llama-3-8B (fp16, H100 SXM, ShareGPT prompts):

* TPOT 7 ms: one GPU (TP1) holds 8 users, two GPUs (TP2) hold 30, so TP1 has 45 % less throughput per GPU;
* TPOT 10 ms (100 tokens/s for each user): TP1 holds 30 users, TP2 holds 64; per GPU, TP1 is slightly better.

Two step-time models are run:

roofline   The uncalibrated roofline: the hardware's limit. No engine reaches it.
with host  The same, and beside it a + b x rows seconds a step, for all that grows with the rows of a real
           engine's step and that a second GPU does not share. a and b (not below 0) are fitted to the two
           points of TP1, the only measurements used. TP2 is a prediction.

Lengths: as of conversations (log-normal, mean 306 tokens in and 500 out, standard deviation of the logarithm
1.0 and 0.7), and fixed, 100 or 1,000 in and 500 out, as in the post. Every level runs 500 requests, or 16
for each user if that is more.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from onbeat.core.options import make
from onbeat.perfmodel.predictor import Predictor
from onbeat.planner.cases import BuiltCase, Labels
from onbeat.planner.charts import frontier_figures
from onbeat.planner.frontier import FrontierPoint, Level, LevelTask, point_keys, run_level
from onbeat.planner.parallel import run_tasks
from onbeat.report.page import Page, heading, notes
from onbeat.report.result import TradeoffPoint
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.workload.load_source import conversation_lengths
from onbeat.workload.offered import OfferedLoad

CONCURRENCIES = (1, 4, 8, 10, 16, 20, 30, 45, 64, 96, 128, 192, 256, 384)
"""The post goes to 64; the roofline alone reaches the same TPOT with many more."""
CHAT = "306 / 500 log-normal"
LENGTHS = (CHAT, "100 / 500", "1000 / 500")
"""Prompt / output tokens."""
DEGREES = (1, 2)

PUBLISHED = {1: {8: 7e-3, 30: 10e-3}, 2: {30: 7e-3, 64: 10e-3}}
"""Tensor parallel degree -> users -> mean TPOT, seconds; for ShareGPT prompts."""
TIGHT, LOOSE = 7e-3, 10e-3

Curve = dict[int, TradeoffPoint]
"""Concurrency -> its run, ascending."""


@dataclass(frozen=True)
class HostCost:
    """Seconds that a step takes beside the device's work: a constant, and so much a row."""

    constant: float = 0.0
    per_row: float = 0.0


@dataclass(frozen=True)
class StudyCase:
    """One replica of one degree of tensor parallelism."""

    tensor_parallel: int
    host: HostCost

    @property
    def labels(self) -> Labels:
        return (("tensor_parallel", str(self.tensor_parallel)),)

    def build(self) -> BuiltCase:
        simulation = build_simulation(
            make(
                ReplicaSettings,
                model="meta-llama/Meta-Llama-3-8B",
                device="h100-sxm",
                tensor_parallel=self.tensor_parallel,
                dtype="fp16",
                max_num_seqs=max(CONCURRENCIES),
                max_num_batched_tokens=2048,
            )
        )
        on_device, host = simulation.step_time.step_time, self.host
        step_time = Predictor(
            lambda shape: on_device(shape) + host.constant + host.per_row * shape.num_sequences
        )
        return BuiltCase(simulation.config, step_time, simulation.num_devices)


def study_load(lengths: str, num_requests: int, seed: int) -> OfferedLoad:
    rng = np.random.default_rng(seed)
    if lengths == CHAT:
        prompts = conversation_lengths(306, 1.0).draw(num_requests, rng)
        outputs = conversation_lengths(500, 0.7).draw(num_requests, rng)
    else:
        prompt, output = (int(each) for each in lengths.split(" / "))
        prompts, outputs = np.full(num_requests, prompt), np.full(num_requests, output)
    return OfferedLoad(
        name=lengths, arrivals=None, num_prompt_tokens=prompts, num_output_tokens=np.maximum(2, outputs)
    )


def level_task(case: StudyCase, lengths: str, concurrency: int) -> LevelTask:
    load = study_load(lengths, max(500, 16 * concurrency), seed=0)
    return LevelTask(case=case, load=load, level=Level(concurrency=concurrency))


# --- calibration ------------------------------------------------------------------------------------------


def fit_host_cost(jobs: int) -> HostCost:
    """Return the cost with which TP1 comes closest to its two published points."""
    points = PUBLISHED[1]

    def relative_errors(milliseconds: Sequence[float]) -> list[float]:
        host = HostCost(milliseconds[0] / 1e3, milliseconds[1] / 1e3)
        tasks = [level_task(StudyCase(1, host), CHAT, users) for users in points]
        found = run_tasks(run_level, tasks, jobs=jobs)
        tpots = [mean_tpot(run_of(point)) for point in found if point is not None]
        return [own / published - 1 for own, published in zip(tpots, points.values(), strict=True)]

    found = least_squares(
        relative_errors, x0=(0.1, 0.05), bounds=(0, np.inf), diff_step=0.1, xtol=1e-3, ftol=1e-4
    )
    return HostCost(found.x[0] / 1e3, found.x[1] / 1e3)


# --- curves -----------------------------------------------------------------------------------------------


def run_curves(host: HostCost, jobs: int) -> dict[str, dict[int, list[FrontierPoint]]]:
    """Return the points of every length and degree, by rising concurrency."""
    keys = [(lengths, tp, users) for lengths in LENGTHS for tp in DEGREES for users in CONCURRENCIES]
    tasks = [level_task(StudyCase(tp, host), lengths, users) for lengths, tp, users in keys]
    curves: dict[str, dict[int, list[FrontierPoint]]] = {}
    for (lengths, tp, _), point in zip(keys, run_tasks(run_level, tasks, jobs=jobs), strict=True):
        assert point is not None, "interrupted"
        curves.setdefault(lengths, {}).setdefault(tp, []).append(point)
    return curves


def run_of(point: FrontierPoint) -> TradeoffPoint:
    assert point.run is not None, point.error
    return point.run


def mean_tpot(run: TradeoffPoint) -> float:
    """Return the mean time per output token, seconds."""
    milliseconds = run.summary.latencies["tpot"].mean_ms
    assert milliseconds is not None, "answers have several tokens"
    return milliseconds / 1e3


def as_curve(points: Sequence[FrontierPoint]) -> Curve:
    return {point.level.concurrency or 0: run_of(point) for point in points}


def at_tpot(curve: Curve, limit: float) -> tuple[float, float] | None:
    """Return (users, output tokens/s per GPU) where the mean TPOT reaches a limit, between levels.

    None where the curve does not cross it.
    """
    tpots = np.maximum.accumulate([mean_tpot(run) for run in curve.values()])
    if not tpots[0] <= limit <= tpots[-1]:
        return None
    rates = [run.output_throughput_per_gpu for run in curve.values()]
    return float(np.interp(limit, tpots, list(curve))), float(np.interp(limit, tpots, rates))


def show_curves(curves: Mapping[int, Curve]) -> None:
    print("| users | TP1 TPOT ms | TP1 tok/s per GPU | TP2 TPOT ms | TP2 tok/s per GPU |")
    print("|---:|---:|---:|---:|---:|")
    for users in CONCURRENCIES:
        cells = [
            f"{mean_tpot(curves[tp][users]) * 1e3:.2f} | {curves[tp][users].output_throughput_per_gpu:.0f}"
            for tp in DEGREES
        ]
        print(f"| {users} | {' | '.join(cells)} |")
    print()


def show_crossover(curves: Mapping[int, Curve]) -> dict[float, float]:
    """Print both degrees at equal TPOT; return limit -> throughput per GPU of TP2 over that of TP1."""
    ratios = {}
    print(f"At equal TPOT (-: not between the TPOT of 1 user and that of {max(CONCURRENCIES)}):\n")
    print("| TPOT | TP1 users | TP1 tok/s per GPU | TP2 users | TP2 tok/s per GPU | TP2 / TP1 |")
    print("|---:|---:|---:|---:|---:|---:|")
    for limit in (6e-3, TIGHT, 8e-3, 9e-3, LOOSE, 11e-3, 12e-3, 14e-3):
        found = [at_tpot(curves[tp], limit) for tp in DEGREES]
        cells = ["- | -" if each is None else f"{each[0]:.0f} | {each[1]:.0f}" for each in found]
        ratio = "-"
        if found[0] and found[1]:
            ratios[limit] = found[1][1] / found[0][1]
            ratio = f"{ratios[limit]:.2f}"
        print(f"| {limit * 1e3:.0f} ms | {' | '.join(cells)} | {ratio} |")
    print()
    return ratios


def check(text: str, *, holds: bool) -> None:
    print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")


def compare_with_published(curves: Mapping[int, Curve]) -> None:
    for tp, points in PUBLISHED.items():
        kind = "fitted" if tp == 1 else "predicted"
        for users, published in points.items():
            own = mean_tpot(curves[tp][users])
            error = own / published - 1
            print(
                f"TP{tp}, {users} users: TPOT {own * 1e3:.2f} ms {kind}, {published * 1e3:.0f} published "
                f"({error:+.1%})"
            )


def check_findings(curves: Mapping[int, Curve], ratios: Mapping[float, float]) -> None:
    tight, loose = ratios.get(TIGHT), [ratio for limit, ratio in ratios.items() if limit >= LOOSE]
    check(f"TPOT 7 ms: TP2 has more throughput per GPU than TP1 (TP2 / TP1 {shown(tight)})",
          holds=tight is not None and tight > 1)  # fmt: skip
    listed = ", ".join(map(shown, loose)) or shown(None)
    check(f"from TPOT 10 ms on: TP2 / TP1 is at most 1.05 ({listed})",
          holds=bool(loose) and max(loose) <= 1.05)  # fmt: skip
    users = at_tpot(curves[1], LOOSE)
    text = f"more than {max(CONCURRENCIES)}" if users is None else f"{users[0]:.0f}"
    check(f"100 tokens/s for each of 20 to 45 users with TP1 ({text})",
          holds=users is not None and 20 <= users[0] <= 45)  # fmt: skip


def shown(ratio: float | None) -> str:
    return "not reached by both" if ratio is None else f"{ratio:.2f}"


# --- whole --------------------------------------------------------------------------------------------------


def write_page(path: Path, curves: Mapping[str, Mapping[str, Mapping[int, Sequence[FrontierPoint]]]]) -> None:
    page = Page()
    body = heading(
        "Tensor against data parallelism",
        "Llama-3-8B on H100: time per output token against output tokens/s per GPU, closed loop",
    )
    body += notes(
        [
            "Published (MLCEngine, ShareGPT prompts): TP1 8 users at 7 ms, 30 at 10 ms; "
            "TP2 30 at 7 ms, 64 at 10 ms."
        ]
    )
    for variant, by_length in curves.items():
        for lengths, by_degree in by_length.items():
            points = [point for points in by_degree.values() for point in points]
            figures = frontier_figures(points)
            for figure in figures:
                figure["title"] += f" ({variant}, {lengths} tokens)"
            body += page.grid(figures)
    page.write(path, "Tensor against data parallelism", body)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="save every run's summary")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write the plots")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    start = time.perf_counter()
    fitted = fit_host_cost(args.jobs)
    print(f"host cost: {fitted.constant * 1e3:.3f} ms a step + {fitted.per_row * 1e6:.1f} us a row")
    curves = {}
    for variant, host in (("roofline", HostCost()), ("with host", fitted)):
        curves[variant] = run_curves(host, args.jobs)
        for lengths, by_degree in curves[variant].items():
            own = {tp: as_curve(points) for tp, points in by_degree.items()}
            print(f"\n## {variant}, {lengths} tokens\n")
            show_curves(own)
            ratios = show_crossover(own)
            if lengths == CHAT:
                compare_with_published(own)
                print()
            check_findings(own, ratios)
    print(f"\n({time.perf_counter() - start:.0f} s)")
    if args.json is not None:
        rows = [
            {"variant": variant, "lengths": lengths, "tensor_parallel": tp} | point_keys(point)
            for variant, by_length in curves.items()
            for lengths, by_degree in by_length.items()
            for tp, points in by_degree.items()
            for point in points
        ]
        args.json.write_text(json.dumps(rows))
    if args.report is not None:
        write_page(args.report, curves)


if __name__ == "__main__":
    main()
