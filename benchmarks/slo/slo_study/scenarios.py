"""Below capacity, above it, in a burst, and at growing overload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from benchmarks.harness.intervals import Interval, mean_interval, ratio_interval
from benchmarks.harness.pages import markdown_table
from benchmarks.slo.slo_study.replica import Stage, account, gap_percentile
from onbeat.core.slo import ShedMode
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.workload.arrivals import RateStep, step_arrivals

SUBJECT = "slo"
LARGE_BATCHES = "sarathi-2048"
FIXED = "sarathi-512"
_WINDOW = 20.0
"""Seconds over which recovery from a burst is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A table and what it says."""

    title: str
    text: str
    claims: tuple[tuple[str, bool], ...]
    """(claim with its numbers, whether it holds)"""

    def markdown(self) -> str:
        verdicts = "\n".join(
            f"* {'holds' if holds else '**does not hold**'}: {what}" for what, holds in self.claims
        )
        return f"## {self.title}\n\n{self.text}\n\n{verdicts}"


def _show(interval: Interval, digits: int = 2) -> str:
    if not isfinite(interval.high):
        return f"{interval.mean:.{digits}f}"
    return f"{interval.mean:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def below_capacity(stage: Stage, capacity: float, *, num_requests: int = 1500) -> Finding:
    """Half the load that could be carried: slack that TTFT does not need is left to the streams."""
    rows, gaps, rates = [], {}, {}
    for policy in (SUBJECT, LARGE_BATCHES):
        gaps[policy], rates[policy], goods = [], [], []
        for seed in range(stage.seeds):
            result = stage.run(stage.load(seed, num_requests).at_rate(capacity / 2), policy)
            gaps[policy].append(gap_percentile(result.records))
            rates[policy].append(sum(record.num_output_tokens for record in result.records) / result.duration)
            goods.append(stage.good(result.records))
        rows.append([policy, _show(mean_interval([gap * 1e3 for gap in gaps[policy]]), 1),
                     _show(mean_interval(rates[policy]), 0), _show(mean_interval(goods), 4)])  # fmt: skip
    gap = ratio_interval(gaps[SUBJECT], gaps[LARGE_BATCHES])
    rate = ratio_interval(rates[SUBJECT], rates[LARGE_BATCHES])
    return Finding(
        title=f"Half of capacity ({capacity / 2:.2f} requests/s)",
        text=markdown_table(["policy", "P99 TBT, ms", "output tokens/s", "good"], rows),
        claims=(
            (f"P99 TBT is {_show(gap)} of {LARGE_BATCHES}'s (at most 0.9)", gap.mean <= 0.9),
            (f"throughput is {_show(rate, 4)} of it (within 2 %)", abs(rate.mean - 1) <= 0.02),
        ),
    )


def above_capacity(stage: Stage, capacity: float, *, seconds: float = 600.0) -> Finding:
    """Ten minutes at 1.3 times capacity: some requests cannot be kept, but most can."""
    rate = 1.3 * capacity
    count = round(rate * seconds)
    runs = {
        FIXED: (FIXED, ShedMode.OFF),
        f"{SUBJECT}, relegating": (SUBJECT, ShedMode.RELEGATE),
        f"{SUBJECT}, rejecting": (SUBJECT, ShedMode.REJECT),
    }
    goods: dict[str, list[float]] = {name: [] for name in runs}
    rows, all_accounted = [], True
    for name, (policy, shed) in runs.items():
        for seed in range(stage.seeds):
            result = stage.run(stage.load(seed, count).at_rate(rate), policy, shed=shed)
            goods[name].append(stage.good(result.records))
            is_whole, ways = account(result.records, count)
            all_accounted &= is_whole
        rows.append([name, _show(mean_interval(goods[name]), 3), ways])
    ratio = min(
        float(np.mean(goods[name])) / max(1e-9, float(np.mean(goods[FIXED])))
        for name in runs
        if name != FIXED
    )
    return Finding(
        title=f"1.3 times capacity for {seconds / 60:g} minutes ({rate:.2f} requests/s)",
        text=markdown_table(["policy", "good", f"what became of {count} requests (last seed)"], rows),
        claims=(
            (f"the share that is good is {ratio:.2f}x {FIXED}'s (at least 2)", ratio >= 2),
            ("every request is accounted for", all_accounted),
        ),
    )


def burst(stage: Stage, capacity: float, *, seconds: float = 60.0) -> Finding:
    """The rate steps to three times itself and back."""
    base = 0.6 * capacity
    before, after = 60.0, 5 * seconds
    steps = (RateStep(base, before), RateStep(3 * base, seconds), RateStep(base, after))
    count = round(sum(step.rate * step.seconds for step in steps))
    runs = {
        policy: [_run_burst(stage, policy, seed, steps, count) for seed in range(stage.seeds)]
        for policy in (SUBJECT, FIXED)
    }
    rows = [
        [policy, *(_show(mean_interval(column), 3) for column in zip(*values, strict=True))]
        for policy, values in runs.items()
    ]
    means = {policy: np.mean(values, axis=0) for policy, values in runs.items()}
    ratio = float(means[SUBJECT][0] / max(1e-9, means[FIXED][0]))
    kept = float(means[SUBJECT][1])
    recovery = max(values[3] for values in runs[SUBJECT])
    return Finding(
        title=f"A burst: {base:.2f} requests/s, three times that for {seconds:g} s",
        text=markdown_table(
            ["policy", "TTFT met in the burst", "of these TBT kept", "their P99 TBT, s", "recovery, s"], rows
        ),
        claims=(
            (f"TTFT attainment in the burst is {ratio:.2f}x {FIXED}'s (at least 1.2)", ratio >= 1.2),
            (f"of those with a prompt in time {kept * 100:.2f} % keep TBT (99 %)", kept >= 0.99),
            (f"it recovers within {recovery:.0f} s (at most {2 * seconds:g})", recovery <= 2 * seconds),
        ),
    )


def _run_burst(
    stage: Stage, policy: str, seed: int, steps: Sequence[RateStep], count: int
) -> tuple[float, float, float, float]:
    """Return TTFT attainment in the burst, of these the share that keep TBT, their P99 gap, recovery."""
    start = steps[0].seconds
    end, last = start + steps[1].seconds, sum(step.seconds for step in steps)
    rng = np.random.default_rng([seed, 7])
    arrivals = step_arrivals(count, steps=steps, burstiness=1.0, rng=rng)
    records = stage.run(stage.load(seed, count).with_arrivals(arrivals), policy).records
    inside = [record for record in records if start <= record.arrival < end]
    in_time = [record for record in inside if record.ttft is not None and record.ttft <= stage.ttft + 1e-9]
    share = len(in_time) / len(inside)
    return share, stage.good(in_time), gap_percentile(in_time), _recovery(stage, records, end, last)


def _recovery(stage: Stage, records: Sequence[RequestRecord], end: float, last: float) -> float:
    """Return the seconds from the burst's end after which 90 % of the arrivals of every 20 s are good."""
    good = good_requests(records, mode=stage.mode)
    arrivals = np.array([record.arrival for record in records])
    bad_until = end
    for start in np.arange(end, last - _WINDOW, _WINDOW):
        inside = (arrivals >= start) & (arrivals < start + _WINDOW)
        if inside.any() and good[inside].mean() < 0.9:
            bad_until = float(start) + _WINDOW
    return bad_until - end


def overload(
    stage: Stage,
    capacity: float,
    *,
    num_requests: int = 1500,
    factors: Sequence[float] = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0),
) -> Finding:
    """From capacity to three times it, refusing what cannot be kept."""
    rows, goodputs, admitted_goods, all_accounted = [], [], [], True
    for factor in factors:
        kept, goodput, refused = [], [], []
        for seed in range(stage.seeds):
            load = stage.load(seed, num_requests).at_rate(factor * capacity)
            records = stage.run(load, SUBJECT, shed=ShedMode.REJECT).records
            admitted = [record for record in records if not record.is_rejected]
            kept.append(stage.good(admitted))
            goodput.append(stage.good(records) * factor * capacity)
            refused.append(1 - len(admitted) / len(records))
            is_whole, ways = account(records, num_requests)
            all_accounted &= is_whole
        rows.append([f"{factor:g}x", _show(mean_interval(kept), 4), _show(mean_interval(goodput)),
                     f"{np.mean(refused) * 100:.1f} %", ways])  # fmt: skip
        goodputs.append(float(np.mean(goodput)))
        admitted_goods.append(float(np.mean(kept)))
    peak = int(np.argmax(goodputs))
    after_peak = min(goodputs[peak:]) / goodputs[peak]
    return Finding(
        title=f"1.0 to {max(factors):g} times capacity ({capacity:.2f} requests/s), refusing",
        text=markdown_table(
            ["load", "good of the admitted", "goodput, requests/s", "refused at arrival", "last seed"], rows
        ),
        claims=(
            (f"of the admitted at least {min(admitted_goods) * 100:.1f} % are good (95 %)",
             min(admitted_goods) >= 0.95),
            (f"goodput stays at {after_peak * 100:.1f} % of its peak or more (90 %)", after_peak >= 0.9),
            ("every request is accounted for", all_accounted),
        ),
    )  # fmt: skip
