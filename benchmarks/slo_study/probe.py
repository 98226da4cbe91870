"""A quick look: attainment of some policies at some rates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from onbeat.metrics.record import RequestRecord
from onbeat.planner.fluid_bound import BoundQuestion, fluid_bound, sustained_bound
from slo_study.cells import MAX_NUM_SEQS, Cell
from slo_study.loads import LoadKey
from slo_study.trials import Question, Trials, max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What to look at."""

    cell: Cell
    policies: Sequence[str]
    rates: Sequence[float]
    """Requests per second."""
    seeds: Sequence[int]
    num_requests: int


def run_probe(probe: Probe) -> None:
    """Print a table: per policy, rate and seed the attainment, and what TTFT and gaps were."""
    cell = probe.cell
    print(f"\n{cell}, {probe.num_requests} requests")
    print(f"{'policy':14} {'rate':>7} {'seed':>4} {'good %':>7} {'TTFT %':>7} {'TTFT p50':>9} {'p99 s':>7} "
          f"{'gap p99 ms':>10} {'preempt':>7} {'wall s':>6}")  # fmt: skip
    question = Question(slo=cell.slo, mode=cell.mode)
    longest = max_model_len(cell.set_up)
    for policy in probe.policies:
        for seed in probe.seeds:
            key = LoadKey(
                workload=cell.workload, seed=seed, num_requests=probe.num_requests, max_model_len=longest
            )
            trials = Trials(cell.set_up, policy, key, [question], inf)
            for rate in probe.rates:
                _show(trials, question, policy, seed, rate)


def measure_curves(probe: Probe) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float]]:
    """Return policy -> (rate, attainment), and the bounds of 90 %; all as means over the seeds."""
    cell = probe.cell
    question = Question(slo=cell.slo, mode=cell.mode)
    longest = max_model_len(cell.set_up)
    shares: dict[str, dict[float, list[float]]] = {}
    bounds: dict[str, list[float]] = {}
    for seed in probe.seeds:
        key = LoadKey(
            workload=cell.workload, seed=seed, num_requests=probe.num_requests, max_model_len=longest
        )
        for policy in probe.policies:
            trials = Trials(cell.set_up, policy, key, [question], inf)
            for rate in probe.rates:
                share = trials.score(trials.records(rate), question)
                shares.setdefault(policy, {}).setdefault(rate, []).append(share)
            print(f"seed {seed}: {policy}", flush=True)
        asked = BoundQuestion(
            share=0.9, mode=cell.mode, max_num_seqs=MAX_NUM_SEQS, hopeless=trials.hopeless(question)
        )
        for name, bound in (
            ("no policy: 90 % for ever", sustained_bound),
            ("no policy: 90 % of these", fluid_bound),
        ):
            rate = bound(trials.load(question), trials.step_time, asked)
            bounds.setdefault(name, []).append(rate)
    curves = {
        policy: [(rate, float(np.mean(values))) for rate, values in rates.items()]
        for policy, rates in shares.items()
    }
    return curves, {name: float(np.mean(rates)) for name, rates in bounds.items()}


def _show(trials: Trials, question: Question, policy: str, seed: int, rate: float) -> None:
    started = time.perf_counter()
    records = trials.records(rate)
    seconds = time.perf_counter() - started
    share = trials.score(records, question)
    hopeless = trials.hopeless(question)
    counted = [record for record in records if not hopeless[int(record.request_id)]]
    ttfts = np.array([inf if record.ttft is None else record.ttft for record in counted])
    in_time = sum(map(_meets_ttft, counted)) / max(1, len(counted))
    gaps = np.concatenate([np.diff(record.delivery_times) for record in counted] or [np.zeros(1)])
    print(
        f"{policy:14} {rate:7.3f} {seed:4} {share * 100:7.2f} {in_time * 100:7.2f} "
        f"{np.percentile(ttfts, 50):9.3f} {np.percentile(ttfts, 99):7.2f} "
        f"{np.percentile(gaps, 99) * 1e3 if gaps.size else 0:10.1f} "
        f"{sum(record.num_preemptions for record in records):7} {seconds:6.2f}",
        flush=True,
    )


def _meets_ttft(record: RequestRecord) -> bool:
    limit = record.slo.ttft if record.slo else None
    return limit is None or (record.ttft is not None and record.ttft <= limit + 1e-9)
