"""What each part of the policy is worth: attainment of variants that leave it out, at one rate a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onbeat.planner.paired import mean_interval
from onbeat.scheduler.replica.policies import POLICIES, Policy, make_slo_policy
from onbeat.scheduler.replica.slo.tuning import SLOTuning
from slo_study.cells import SUBJECT, Cell, settings_of
from slo_study.report import table
from slo_study.results import Results
from slo_study.trial import Question, Runner, longest_request

VARIANTS: dict[str, Callable[[], Policy]] = {
    "slo/mean": partial(make_slo_policy, SLOTuning(quantile=None, gap_quantile=None)),
    "slo/no-skips": partial(make_slo_policy, SLOTuning(skips=False)),
    "slo/no-look-ahead": partial(make_slo_policy, SLOTuning(looks_ahead=False)),
    "slo/no-pace": partial(make_slo_policy, SLOTuning(paces=False)),
    "slo/no-triage": partial(make_slo_policy, SLOTuning(triages=False)),
    "slo/no-long-steps": partial(make_slo_policy, SLOTuning(reach=0.0)),
}
"""Name -> composition; they stand among the policies while the study runs, in each process."""
POLICIES.update(VARIANTS)

CELLS = {
    Cell("mistral", "poisson", "1s-100ms", "stream"): 8.0,
    Cell("mistral", "azure-conv", "1s-50ms", "gap"): 7.0,
    Cell("llama", "azure-code", "1s-100ms", "stream"): 7.0,
    Cell("mistral", "poisson", "mix", "stream"): 7.5,
    Cell("7b-l4", "chat", "2s-250ms", "gap"): 8.5,
    Cell("32-slots", "sharegpt", "2s-250ms", "stream"): 2.1,
}
"""And the rates at which variants are compared, requests/s: near the policy's own capacity at 90 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRun:
    """One variant in one cell."""

    cell: Cell
    policy: str
    rate: float
    """Requests per second."""
    seed: int

    def run(self) -> dict[str, float]:
        """Return what each criterion looks at."""
        cell = self.cell
        runner = Runner(settings_of(cell.set_up, self.policy), cell.workload, longest_request(cell.set_up))
        question = Question(cell.slo, cell.mode)
        score = runner.run(self.rate, self.seed, [question], ends_early=False)[question]
        return {
            "good": score.good,
            "worst": min(score.deciles),
            "tail": score.tail,
            "growth": score.growth,
        }


def ablation_runs(cells: Mapping[Cell, float], num_seeds: int) -> Iterator[AblationRun]:
    """Yield all runs, seed by seed."""
    for seed in range(num_seeds):
        for cell, rate in cells.items():
            for policy in (SUBJECT, *VARIANTS):
                yield AblationRun(cell=cell, policy=policy, rate=rate, seed=seed)


def ablation_table(cells: Mapping[Cell, float], num_seeds: int, results: Results) -> str:
    """Return a table a cell, variants below the policy itself."""
    parts = []
    for cell, rate in cells.items():
        found = {
            policy: [
                dict(each)
                for seed in range(num_seeds)
                if (each := results.get(AblationRun(cell=cell, policy=policy, rate=rate, seed=seed)))
            ]
            for policy in (SUBJECT, *VARIANTS)
        }
        if not any(found.values()):
            continue
        rows = [_row(policy, runs, found[SUBJECT]) for policy, runs in found.items() if runs]
        header = ["policy", "good, %", "points", "worst decile, %", "P99 TTFT / objective", "left over, %"]
        parts.append(f"## {cell}, {rate:g} requests/s\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def _row(policy: str, runs: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[str]:
    points = [(each["good"] - base["good"]) * 100 for each, base in zip(runs, own, strict=False)]
    means = {name: float(np.mean([each[name] for each in runs])) for name in runs[0]}
    return [
        policy,
        f"{means['good'] * 100:.1f}",
        "" if policy == SUBJECT or not points else _signed(points),
        f"{means['worst'] * 100:.1f}",
        f"{means['tail']:.1f}",
        f"{means['growth'] * 100:.1f}",
    ]


def _signed(points: Sequence[float]) -> str:
    interval = mean_interval(points)
    if len(points) == 1:
        return f"{interval.mean:+.1f}"
    return f"{interval.mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"
