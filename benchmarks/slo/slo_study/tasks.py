"""The pieces of work of the study, in the order in which they are worth having."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, zip_longest
from pathlib import Path

from benchmarks.harness.criteria import CRITERIA, Curve, index_near, rate_at
from benchmarks.harness.store import Results
from benchmarks.slo.slo_study.cells import (
    CELLS,
    FAMILIES,
    MIXES,
    OLD_CELLS,
    SIMPLE,
    STATIC,
    SUBJECT,
    Cell,
    fits,
    is_blind,
    members,
    settings_of,
)
from benchmarks.slo.slo_study.loads import lasting
from benchmarks.slo.slo_study.scored import RateRun, Scored, Subject, curves, scored_runs
from benchmarks.slo.slo_study.search import CLOSE_STRIDE, FIRST_STRIDE, search
from benchmarks.slo.slo_study.trial import Question, Runner, longest_request, timed
from onbeat.planner.capacity import service_rate
from onbeat.planner.parallel import TaskContext

FIRST_GUESS = 0.8
"""Of the rate at which full batches serve a load, where nothing is known."""
SHARES = ("90 %", "99 %", "90 %, any queue")
"""What rivals are compared at; worst deciles and tails only with static budgets and the simple rule."""
EDF = "edf+triage"
ONLY_SHARES = ("static+triage", EDF, "niyama", "fastserve")
_LIKELY = (1024, 2048, 512, 4096, 256, 8192)
"""Budgets in the order in which they are most often the best: the others need but one run to be ruled out."""
NUM_FINALISTS = 2
"""Of a family, for the seeds after the first."""


class OutOfTimeError(Exception):
    """The slice of the study is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One policy, or family, on cells of one group and one seed."""

    cells: tuple[Cell, ...]
    """More than one only for policies that look at no objective."""
    policy: str
    seed: int
    tag: str
    results: Path
    deadline: float
    """Seconds since 1970."""

    def __str__(self) -> str:
        cell = self.cells[0]
        return f"seed {self.seed}, {self.policy}: {cell if len(self.cells) == 1 else ' '.join(cell.group)}"

    @property
    def criteria(self) -> tuple[str, ...]:
        return SHARES if self.policy in ONLY_SHARES else tuple(CRITERIA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a slice of the study is asked to do."""

    cells: Sequence[Cell]
    policies: Sequence[str]
    num_seeds: int
    tag: str
    results: Path
    deadline: float


def make_tasks(plan: Plan) -> list[Task]:
    """Return the work in order: the first seed of all, then more of those that matter most, then the rest."""
    first = [policy for policy in plan.policies if policy in (STATIC, SUBJECT, SIMPLE)]
    rest = [policy for policy in plan.policies if policy not in first]
    phases = [(0, policy) for policy in (*first, *rest)]
    phases += [(seed, policy) for seed in range(1, plan.num_seeds) for policy in first]
    phases += [(seed, policy) for seed in range(1, plan.num_seeds) for policy in rest]
    # Mixed, so that what there is when time is up speaks for all kinds of cells.
    cells = mixed(plan.cells)
    groups = [
        tuple(group)
        for _, group in groupby(sorted(cells, key=lambda each: each.group), key=lambda each: each.group)
    ]
    random.Random(2).shuffle(groups)
    return [
        Task(
            cells=together,
            policy=policy,
            seed=seed,
            tag=plan.tag,
            results=plan.results,
            deadline=plan.deadline,
        )
        for seed, policy in phases
        for together in (groups if is_blind(members(policy)[0]) else [(cell,) for cell in cells])
        # With one objective for all, the order by deadlines is that of the arrivals.
        if policy != EDF or together[0].slo in MIXES
    ]


def mixed(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells of the old grid and new ones in turns, each in a random order that is always the same."""
    found = sorted(cells)
    random.Random(1).shuffle(found)
    kinds = [[cell for cell in found if (cell in OLD_CELLS) == is_old] for is_old in (True, False)]
    return [cell for pair in zip_longest(*kinds) for cell in pair if cell is not None]


@lru_cache
def _results(path: Path, tag: str) -> Results:
    """Return the same results for all tasks of a process, which reads what is new alone."""
    return Results(path, tag)


def run_task(task: Task, context: TaskContext) -> int:
    """Search all that a task asks for, report the lines, and return how many. A worker of `Pool`."""
    if time.time() > task.deadline or context.is_stopped():
        return 0
    work = _Work(task, context)
    try:
        for policy in work.in_order():
            work.search(policy)
    except OutOfTimeError:
        pass
    return work.num_runs


class _Work:
    def __init__(self, task: Task, context: TaskContext) -> None:
        self._task = task
        self._context = context
        results = _results(task.results, task.tag)
        results.refresh()
        self._curves = curves(scored_runs(results))
        self.num_runs = 0

    def in_order(self) -> list[str]:
        """Return the policies of a family, the likeliest to be the best first."""
        set_up = self._task.cells[0].set_up
        names = [name for name in members(self._task.policy) if fits(set_up, name)]
        if len(names) == 1:
            return names
        budgets = {name: int(name.rpartition("-")[2]) for name in names}
        ranks = {budget: rank for rank, budget in enumerate(_LIKELY)}
        if self._task.policy != STATIC:
            # With triage the best budget is near the best without.
            known = self._ranked(FAMILIES[STATIC])
            ranks |= {int(name.rpartition("-")[2]): rank - len(ranks) for rank, name in enumerate(known)}
        ordered = sorted(names, key=lambda name: ranks[budgets[name]])
        if self._task.seed:
            best = self._ranked(names)
            return [name for name in ordered if name in best] or ordered
        return ordered

    def _ranked(self, names: Sequence[str]) -> list[str]:
        """Return the best of a family with the first seed, for any cell of the task and any criterion."""
        found: dict[str, int] = {}
        for cell in self._task.cells:
            for criterion in self._task.criteria:
                rates = {name: self._capacity((cell, name, 0), criterion) for name in names}
                best = sorted((name for name in names if rates[name]), key=lambda name: -(rates[name] or 0))
                for rank, name in enumerate(best[:NUM_FINALISTS]):
                    found[name] = min(rank, found.get(name, rank))
        return sorted(found, key=lambda name: found[name])

    def search(self, policy: str) -> None:
        """Run a policy's searches.

        Raises
        ------
        OutOfTimeError : the slice is over; all runs so far are reported.
        """
        for criterion in self._task.criteria:
            for cell in self._task.cells:
                subject = cell, policy, self._task.seed
                best = self._best(cell, criterion, but=policy)
                start = self._start(subject, criterion) if best is None else index_near(best)
                is_known = any(self._capacity((cell, policy, seed), criterion) for seed in range(subject[2]))
                search(
                    self._curve(subject),
                    CRITERIA[criterion],
                    lambda index: self._run(policy, index),
                    start=start,
                    stride=CLOSE_STRIDE if is_known else FIRST_STRIDE,
                    least=None if best is None else start,
                )

    def _best(self, cell: Cell, criterion: str, *, but: str) -> float | None:
        """Return the best capacity of the others of the family: a rate that is worth looking at."""
        rates = [
            self._capacity((cell, name, self._task.seed), criterion)
            for name in members(self._task.policy)
            if name != but
        ]
        return max((rate for rate in rates if rate), default=None)

    def _start(self, subject: Subject, criterion: str) -> int:
        """Return where to look first: where others of the like were."""
        cell, policy, _ = subject
        alike: list[tuple[int, float]] = []
        for (other, name, seed), curve in self._curves.items():
            if other.group != cell.group:
                continue
            rate = curve.capacity(CRITERIA[criterion])
            if rate is None:
                continue
            # How much like this it is: the seed weighs least, then the policy, the mode, the objectives.
            distance = (seed != self._task.seed) + 8 * (other.slo != cell.slo) + 4 * (other.mode != cell.mode)
            distance += 2 * (name != policy) + 16 * (is_blind(name) and name != policy)
            alike.append((distance, rate))
        if not alike and (curve := self._curve(subject)):
            return min(curve)
        if not alike:
            built = _runner(*cell.group, policy).simulation
            load = lasting(cell.workload, rate=1.0, seed=0, max_model_len=longest_request(cell.set_up))
            return index_near(FIRST_GUESS * service_rate(built.config, built.step_time, load))
        least = min(distance for distance, _ in alike)
        return index_near(max(rate for distance, rate in alike if distance == least))

    def _capacity(self, subject: Subject, criterion: str) -> float | None:
        return self._curve(subject).capacity(CRITERIA[criterion])

    def _curve(self, subject: Subject) -> Curve:
        return self._curves.setdefault(subject, Curve())

    def _run(self, policy: str, index: int) -> None:
        task = self._task
        if time.time() > task.deadline or self._context.is_stopped():
            raise OutOfTimeError
        cell = task.cells[0]
        runner = _runner(cell.set_up, cell.workload, policy)
        # A run that looks at no objective is scored for cells that nobody asked for, too.
        alike = [each for each in CELLS if each.group == cell.group] if is_blind(policy) else task.cells
        questions = {each: Question(each.slo, each.mode) for each in alike}
        scores, seconds = timed(lambda: runner.run(rate_at(index), task.seed, list(questions.values())))
        runs = [
            Scored(
                RateRun(cell=each, policy=policy, seed=task.seed, index=index),
                scores[question],
                seconds / len(questions),
            )
            for each, question in questions.items()
        ]
        for each in runs:
            self._curve(each.run.subject)[index] = each.score
        self._context.report(runs)
        self.num_runs += len(runs)


@lru_cache(maxsize=4)
def _runner(set_up: str, workload: str, policy: str) -> Runner:
    return Runner(settings_of(set_up, policy), workload, longest_request(set_up))
