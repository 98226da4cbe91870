"""How far the policy is from what no policy can carry, and what it would carry if it knew more.

What a server does not know of a request when it comes: how long its answer will be, what each step will take,
and who comes after it. A capacity is measured without any of it, with one of the three, and with all; and the
bound is computed (`bound`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import ClassVar

import numpy as np

from benchmarks.harness.intervals import geometric_mean
from benchmarks.harness.pages import markdown_table
from benchmarks.harness.store import Results
from benchmarks.slo.slo_study.ablation import CELLS as _ABLATION_CELLS
from benchmarks.slo.slo_study.bound import fluid_bound, unlimited_hits
from benchmarks.slo.slo_study.cells import OBJECTIVES, SUBJECT, Cell, settings_of
from benchmarks.slo.slo_study.criteria import CRITERIA, Curve, index_near, rate_at
from benchmarks.slo.slo_study.idle import hopeless_rows
from benchmarks.slo.slo_study.loads import lasting, warm_seconds
from benchmarks.slo.slo_study.search import search
from benchmarks.slo.slo_study.tasks import SHARES
from benchmarks.slo.slo_study.trial import Question, Runner, longest_request
from onbeat.scheduler.replica.policies import POLICIES, slo_composition
from onbeat.scheduler.replica.slo.composer import SLOComposer
from onbeat.scheduler.replica.slo.cost_model import CostModel
from onbeat.scheduler.replica.slo.rules import StepRules
from onbeat.scheduler.replica.slo.view import PromptJob
from onbeat.scheduler.triage import PrefillShare
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.offered import OfferedLoad

DECLARED_TOKENS = 4096
"""`max_tokens` of requests whose length nobody tells."""
NOISE = 0.3
"""Standard deviation of the logarithm of a step's time, where nobody tells it."""
LENGTHS, STEPS, ARRIVALS, BOUND = "lengths", "step times", "arrivals", "bound"
EVEN = "even"
"""No knowledge, but requests that come at equal distances: what bursts cost is left out, as in the bound."""
NOTHING = "nothing"
KNOWLEDGE: dict[str, frozenset[str]] = {
    NOTHING: frozenset(),
    LENGTHS: frozenset({LENGTHS}),
    STEPS: frozenset({STEPS}),
    ARRIVALS: frozenset({ARRIVALS}),
    "all three": frozenset({LENGTHS, STEPS, ARRIVALS}),
    "and no bursts": frozenset({LENGTHS, STEPS, EVEN}),
}
"""Row of the table -> what the policy knows."""
FORESIGHT = "slo/foresight"
FIRST_GUESS = 0.8
"""Of the bound."""


class Foresight(StepRules):
    """Counts the prompts that will come, too, when it sorts out those that cannot all be in time."""

    to_come: ClassVar[list[tuple[float, float, int, int]]] = []
    """(arrival, deadline, prompt tokens, cached tokens) of each request of the load, by arrival."""

    def split(
        self, jobs: Sequence[PromptJob], prefill: PrefillShare, now: float
    ) -> tuple[list[PromptJob], list[PromptJob]]:
        dropped = self._dropped(jobs, prefill, now + prefill.fixed_seconds, now)
        if not dropped:
            return super().split(jobs, prefill, now)
        kept = [job for job in jobs if id(job.state) not in dropped]
        return kept, [job for job in jobs if id(job.state) in dropped]

    def _dropped(
        self, jobs: Sequence[PromptJob], prefill: PrefillShare, start: float, now: float
    ) -> set[int]:
        """Return ids of the states to leave behind, so that they and those who come can all be in time.

        Served by deadline, each from its arrival on. Whenever one would be late, the one that costs most of
        those that were served since the machine was last idle is left behind.
        """
        last = max((job.deadline for job in jobs), default=-inf)
        releases = [start] * len(jobs) + (coming := self._coming(now, last, self.cost_model))[0]
        dues = [job.deadline for job in jobs] + coming[1]
        seconds = [job.seconds / prefill.share for job in jobs] + [each / prefill.share for each in coming[2]]
        alive = set(range(len(dues)))
        while (found := _first_late(releases, dues, seconds, alive)) is not None:
            alive.discard(max(found, key=lambda each: (seconds[each], each)))
        return {id(job.state) for index, job in enumerate(jobs) if index not in alive}

    def _coming(
        self, now: float, last: float, cost_model: CostModel
    ) -> tuple[list[float], list[float], list[float]]:
        """Return releases, deadlines and seconds of those who come before the last deadline."""
        first = bisect_right(self.to_come, (now, inf, 0, 0))
        found = []
        for arrival, due, num_tokens, num_cached in self.to_come[first:]:
            if arrival >= last:
                break
            if due <= last:  # those due later can go last
                found.append((arrival, due, cost_model.seconds(num_tokens - num_cached, num_cached)))
        return [each[0] for each in found], [each[1] for each in found], [each[2] for each in found]


def _first_late(
    releases: Sequence[float], dues: Sequence[float], seconds: Sequence[float], alive: set[int]
) -> list[int] | None:
    """Return who is served up to the first job that ends late, since the machine was idle; None if none does.

    By deadline among those that are there; a job that has begun is put off for one that is due before it.
    """
    order = sorted(alive, key=lambda each: (releases[each], dues[each]))
    left = {each: seconds[each] for each in order}
    ready: list[tuple[float, int]] = []
    served: list[int] = []
    now, place = -inf, 0
    while place < len(order) or ready:
        if not ready:
            now = max(now, releases[order[place]])
            served = []
        while place < len(order) and releases[order[place]] <= now:
            ready.append((dues[order[place]], order[place]))
            place += 1
        ready.sort(reverse=True)
        due, job = ready[-1]
        until = releases[order[place]] if place < len(order) else inf
        if job not in served:
            served.append(job)
        if now + left[job] <= until:
            now += left[job]
            ready.pop()
            if now > due:
                return [each for each in served if dues[each] <= due]
        else:
            left[job] -= until - now
            now = until
    return None


POLICIES[FORESIGHT] = slo_composition(partial(SLOComposer, make_rules=Foresight))  # in each process

CELLS = [
    *(cell for cell in _ABLATION_CELLS if cell.mode == "stream" and cell.set_up != "32-slots"),
    Cell("mistral", "azure-conv", "1s-50ms", "stream"),
    Cell("7b-l4", "chat", "2s-250ms", "stream"),
    Cell("70b-8xh100", "documents", "5s-50ms", "stream"),
    Cell("llama", "mooncake", "2s-250ms", "stream"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnowledgeRun:
    """Capacities in one cell with some knowledge, or the bound."""

    cell: Cell
    knowledge: str
    seed: int

    def run(self) -> dict[str, float]:
        """Return requests per second by share."""
        cell = self.cell
        knows = KNOWLEDGE.get(self.knowledge, frozenset())
        policy = FORESIGHT if ARRIVALS in knows else SUBJECT
        limit = longest_request(cell.set_up)
        runner = Runner(settings_of(cell.set_up, policy), cell.workload, limit)
        if self.knowledge == BOUND:
            return {share: round(self._bound(runner, share, limit), 3) for share in SHARES}
        prepare = partial(_prepare, knows=knows)
        question = Question(cell.slo, cell.mode)
        curve = Curve()

        def ask(index: int) -> None:
            scores = runner.run(rate_at(index), self.seed, [question], prepare=prepare, is_even=EVEN in knows)
            curve[index] = scores[question]

        start = index_near(FIRST_GUESS * self._bound(runner, SHARES[0], limit))
        for share in SHARES:
            search(curve, CRITERIA[share], ask, start=start)
        return {share: round(curve.capacity(CRITERIA[share]) or 0.0, 3) for share in SHARES}

    def _bound(self, runner: Runner, share: str, limit: int) -> float:
        rate, model = 1.0, runner.simulation.step_time
        for _ in range(2):  # the first rate says which load lasts
            load = lasting(self.cell.workload, rate=rate, seed=self.seed, max_model_len=limit)
            load = load.with_classes(OBJECTIVES[self.cell.slo], seed=self.seed)
            assert load.arrivals is not None
            counted = (load.arrivals >= warm_seconds(rate)) & ~hopeless_rows(load, model)
            rate = fluid_bound(load, model, counted, share=CRITERIA[share].share)
        return rate


def _prepare(load: OfferedLoad, config: SimulationConfig, *, knows: frozenset[str]) -> SimulationConfig:
    """Return the configuration of a run, and tell the policy what it knows."""
    assert load.arrivals is not None
    if LENGTHS not in knows:
        config = replace(config, declared_max_tokens=DECLARED_TOKENS)
    if STEPS not in knows:
        config = replace(config, step_noise=NOISE)
    if ARRIVALS in knows:
        slos = [load.slo(row) for row in range(len(load))]
        ttfts = [inf if slo is None or slo.ttft is None else slo.ttft for slo in slos]
        arrivals = load.arrivals.tolist()
        dues = [arrival + ttft for arrival, ttft in zip(arrivals, ttfts, strict=True)]
        columns = (load.num_prompt_tokens.tolist(), unlimited_hits(load).tolist())
        Foresight.to_come = list(zip(arrivals, dues, *columns, strict=True))
    return config


def knowledge_runs(cells: Sequence[Cell], num_seeds: int) -> Iterator[KnowledgeRun]:
    """Yield all runs, seed by seed."""
    for seed in range(num_seeds):
        for cell in cells:
            for knowledge in (*KNOWLEDGE, BOUND):
                yield KnowledgeRun(cell=cell, knowledge=knowledge, seed=seed)


def knowledge_table(cells: Sequence[Cell], num_seeds: int, results: Results) -> str:
    """Return a table for each share: capacities over what is carried without knowledge."""
    names = [name for name in (*KNOWLEDGE, BOUND) if name != NOTHING]
    parts = []
    for share in SHARES:
        rows: list[list[str]] = []
        ratios: dict[str, list[float]] = {name: [] for name in names}
        for cell in cells:
            own = _rates(results, cell, NOTHING, num_seeds, share)
            if not own:
                continue
            shown = []
            for name in names:
                rates = _rates(results, cell, name, num_seeds, share)
                pairs = [rate / own[seed] for seed, rate in rates.items() if own.get(seed)]
                ratios[name] += [geometric_mean(pairs)] if pairs else []
                shown.append(f"{ratios[name][-1]:.2f}" if pairs else "-")
            rows.append([str(cell), str(len(own)), f"{np.mean(list(own.values())):.2f}", *shown])
        means = [f"{geometric_mean(values):.2f}" if values else "-" for values in ratios.values()]
        rows.append(["all", "", "", *means])
        parts.append(
            f"## {share}\n\n{markdown_table(['cell', 'seeds', 'nothing, requests/s', *names], rows)}"
        )
    return "\n\n".join(parts)


def _rates(results: Results, cell: Cell, knowledge: str, num_seeds: int, share: str) -> dict[int, float]:
    runs = [KnowledgeRun(cell=cell, knowledge=knowledge, seed=seed) for seed in range(num_seeds)]
    return {run.seed: found[share] for run in runs if (found := results.get(run)) is not None}
