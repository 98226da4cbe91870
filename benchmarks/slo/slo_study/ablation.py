"""What each part of the policy is worth: attainment of variants that leave it out, at one rate a cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from benchmarks.harness.intervals import mean_interval
from benchmarks.harness.pages import markdown_table
from benchmarks.harness.store import Results
from benchmarks.slo.slo_study.cells import SUBJECT, Cell, settings_of
from benchmarks.slo.slo_study.trial import Question, Runner, longest_request
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import POLICIES, slo_composition
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.composer import SPENT_SHARE, SLOComposer, StepRules
from onbeat.scheduler.replica.slo.view import PromptJob, RunningView
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.scheduler.triage import LEAST_SHARE, PrefillShare

Split = tuple[list[PromptJob], list[PromptJob]]


class ByDeadline(StepRules):
    """No triage: whoever is due first is served first."""

    def split(self, jobs: Sequence[PromptJob], prefill: PrefillShare, now: float) -> Split:  # noqa: ARG002
        return list(jobs), []


class EndsInProportion(StepRules):
    """Prompts are planned to end where their share of the time is over, whatever their last steps cost."""

    def split(self, jobs: Sequence[PromptJob], prefill: PrefillShare, now: float) -> Split:
        return super().split(jobs, prefill, now - prefill.fixed_seconds)


class InProportion(StepRules):
    """A step that the limit cuts short is counted on to hold as much of its chunk as of its time."""

    def prefill_share(self, decodes: BatchShape, limit: float, jobs: Sequence[PromptJob]) -> PrefillShare:
        free = super().prefill_share(decodes, inf, jobs)
        if free.length <= limit:
            return free
        share = 1 - free.length * (1 - free.share) / limit
        return free._replace(length=limit, share=max(share, LEAST_SHARE))


class EndsByTBTAlone(StepRules):
    """A step that ends a prompt is as long as any other, whether the prompt is late by it or not."""

    ends_in_time = False


class NeverSitsOut(StepRules):
    """All streams decode in each step."""

    slack_tokens = 10**9


class ByTightestTBT(StepRules):
    """A step takes the tightest TBT objective, whether streams are behind their deadlines or not."""

    def limit(self, view: RunningView, *_args: Any, **_others: Any) -> float:
        return view.tightest * self.allowed


class EarnsNothing(StepRules):
    """Steps leave nothing of the TBT objective to streams."""

    earned = 0.0


class SpendsNothing(StepRules):
    """No step takes more than the tightest TBT objective, however far ahead its streams are."""

    spent = 0.0


class EfficientChunk(StepRules):
    """No step holds more than an efficient chunk."""

    def prefill_share(self, decodes: BatchShape, limit: float, jobs: Sequence[PromptJob]) -> PrefillShare:  # noqa: ARG002
        return self.cost_model.prefill_share(decodes, limit, inf)


def longest_wait(config: SchedulerConfig, model: StepTimeModel) -> SLOComposer:
    """Whoever came last is left behind (`--shed-order longest-wait`)."""
    return SLOComposer(replace(config, shed_order="longest-wait"), model)


class LastComeVictims(StepRules):
    """Whoever came last is preempted first, as under policies that know no deadlines."""

    def loss(self, state: RequestState, start: float) -> tuple[float, ...]:  # noqa: ARG002
        return (state.request.arrival,)


class KeepsSlackWhileTheQueueGrows(StepRules):
    """A step takes no more of the slack where work is short."""

    spent_while_it_grows = SPENT_SHARE


RULES: dict[str, type[StepRules]] = {
    "slo/no-triage": ByDeadline,
    "slo/no-fixed-time": EndsInProportion,
    "slo/in-proportion": InProportion,
    "slo/ends-by-tbt-alone": EndsByTBTAlone,
    "slo/never-sits-out": NeverSitsOut,
    "slo/by-tbt-alone": ByTightestTBT,
    "slo/earns-nothing": EarnsNothing,
    "slo/spends-nothing": SpendsNothing,
    "slo/efficient-chunk": EfficientChunk,
    "slo/last-come-victims": LastComeVictims,
    "slo/keeps-slack": KeepsSlackWhileTheQueueGrows,
}
VARIANTS = {
    **{name: slo_composition(partial(SLOComposer, make_rules=rules)) for name, rules in RULES.items()},
    "slo/longest-wait": slo_composition(longest_wait),
}
POLICIES.update(VARIANTS)  # while the study runs, in each process

CELLS = {
    Cell("mistral", "poisson", "1s-100ms", "stream"): 9.0,
    Cell("mistral", "poisson", "2s-250ms", "stream"): 8.8,
    Cell("mistral", "azure-conv", "1s-50ms", "gap"): 8.2,
    Cell("llama", "azure-code", "1s-100ms", "stream"): 5.6,
    Cell("llama", "azure-code", "2s-250ms", "stream"): 7.2,
    Cell("mistral", "poisson", "mix", "stream"): 7.0,
    Cell("7b-l4", "chat", "2s-250ms", "gap"): 9.0,
    Cell("32-slots", "sharegpt", "2s-250ms", "stream"): 2.35,
    Cell("moe-h100", "poisson", "mix", "stream"): 13.9,
    Cell("70b-8xh100", "documents", "10s-30ms", "stream"): 2.15,
    Cell("little-memory", "long-outputs", "1s-100ms", "stream"): 1.27,
    Cell("7b-l4", "sharegpt", "2s-250ms", "stream"): 0.6,
    Cell("undeclared", "mixed-answers", "20s-e2e", "stream"): 4.5,
    Cell("32b-h200", "sharegpt", "e2e-mix", "gap"): 1.9,
    Cell("70b-4xa100", "arxiv", "5s-50ms", "stream"): 1.35,
    Cell("mistral", "wave", "1s-100ms", "stream"): 7.0,
    Cell("mistral", "agents", "1s-100ms", "stream"): 12.0,
    Cell("moe-h100", "poisson", "tight-mix", "stream"): 17.0,
    Cell("70b-4xa100", "bimodal", "mix", "stream"): 3.0,
}
"""And the rates at which variants are compared, requests/s: near the policy's own capacity at 90 %, but the
second, which has 99 %: there it shows what decides who is left behind where nearly all are in time. The last
four are where victims, the memory of activations, and paces of answers decide."""


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
        worst = min(score.deciles)
        return {"good": score.good, "worst": worst, "tail": score.tail, "growth": score.growth}


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
        parts.append(f"## {cell}, {rate:g} requests/s\n\n{markdown_table(header, rows)}")
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
