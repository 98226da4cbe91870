"""The pieces of work of the study: one policy on some cells that share their runs, seed after seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from onbeat.planner.fluid_bound import BoundQuestion, fluid_bound, sustained_bound
from onbeat.planner.parallel import TaskContext
from slo_study.cells import BOUND, MAX_NUM_SEQS, Cell, is_blind
from slo_study.grid_search import Found, Grid, index_near, search_grid
from slo_study.loads import LoadKey
from slo_study.store import Line, Store, fingerprint, tag_of
from slo_study.trials import OutOfTime, Question, Trials, max_model_len

SHARES = (0.9, 0.99)
GRID = Grid(low=index_near(0.02), high=index_near(200.0))
ROUGH_GRID = Grid(low=GRID.low, high=GRID.high, precision=3)
START_INDEX = index_near(4.0)
BINDING_SEEDS = 1
"""With so many seeds the hand-tuned policies run longer windows, once with the objectives and once with
loosened ones: whether a cell binds is read off these, since a short window saturates nothing within loose
objectives."""

Anchors = Mapping[tuple[int, float], float]
"""(seed, share) -> capacity of another policy there, from which a search starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One policy on cells of one set-up and workload."""

    cells: tuple[Cell, ...]
    """More than one only for policies that look at no objective."""
    policy: str
    seeds: tuple[int, ...]
    num_requests: int
    long_factor: int
    """Windows in a long run (`BINDING_SEEDS`)."""
    fingerprint: str
    tag: str
    results: Path
    """Where earlier answers are, from which searches start."""
    deadline: float
    """Seconds since 1970."""

    def __str__(self) -> str:
        cell = self.cells[0]
        which = f"{cell.slo} {cell.mode}" if len(self.cells) == 1 else f"{len(self.cells)} cells"
        return f"{cell.set_up} {cell.workload} {which}: {self.policy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a slice of the study is asked to do."""

    cells: Sequence[Cell]
    policies: Sequence[str]
    num_seeds: int
    num_requests: Callable[[Cell], int]
    """Requests of a seed of a cell; the same for cells of one set-up and workload."""
    long_factor: int
    tag: str
    results: Path
    deadline: float


def make_tasks(plan: Plan, done: Iterable[Line]) -> list[Task]:
    """Return the work that is left, the quick policies first: their answers start the others' searches."""
    lines = list(done)
    have = {(line.key, line.fingerprint) for line in lines}
    policies = sorted(plan.policies, key=lambda name: not is_blind(name))
    tasks: list[Task] = []
    for policy in policies:
        for (set_up, _), group in groupby(sorted(plan.cells), key=lambda c: (c.set_up, c.workload)):
            cells = tuple(group)
            num_requests = plan.num_requests(cells[0])
            mark = fingerprint(set_up, policy, num_requests, plan.long_factor, plan.tag)
            for together in [cells] if is_blind(policy) else [(cell,) for cell in cells]:
                seeds = tuple(
                    seed
                    for seed in range(plan.num_seeds)
                    if any(((cell, policy, seed), mark) not in have for cell in together)
                )
                if seeds:
                    tasks.append(
                        Task(
                            cells=together,
                            policy=policy,
                            seeds=seeds,
                            num_requests=num_requests,
                            long_factor=plan.long_factor,
                            fingerprint=mark,
                            tag=tag_of(policy, plan.tag),
                            results=plan.results,
                            deadline=plan.deadline,
                        )
                    )
    return tasks


class _Anchors:
    """Capacities that are known, for searches to start from."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._own: dict[tuple[Cell, str], dict[tuple[int, float], float]] = {}
        self._best: dict[Cell, dict[tuple[int, float], float]] = {}
        """Of the hand-tuned policies."""
        for line in lines:
            for share, rate in line.capacity.items():
                key = line.seed, float(share)
                self._own.setdefault((line.cell, line.policy), {})[key] = rate
                if is_blind(line.policy):
                    best = self._best.setdefault(line.cell, {})
                    best[key] = max(best.get(key, 0.0), rate)

    def of(self, cell: Cell, policy: str, seeds: Sequence[int]) -> Anchors:
        """Return the policy's own earlier capacities where all seeds have them, else the best of others."""
        own = self._own.get((cell, policy), {})
        has_all = all(own.get((seed, share), 0.0) > 0 for seed in seeds for share in SHARES)
        return own if has_all else self._best.get(cell, {})


def run_task(task: Task, context: TaskContext) -> int:
    """Search each seed of a task and report its lines; return how many. A worker of `run_tasks`."""
    known = _Anchors(Store(task.results).read())
    guess = Guess({cell: known.of(cell, task.policy, task.seeds) for cell in task.cells})
    count = 0
    for seed in task.seeds:
        if context.is_stopped() or time.time() > task.deadline:
            break
        try:
            lines = [_bound(task, seed)] if task.policy == BOUND else _run_seed(task, seed, guess)
        except OutOfTime:
            break
        count += len(lines)
        context.report(lines)
    return count


class Guess:
    """Where a search should start: by an anchor and what earlier seeds found beside theirs."""

    def __init__(self, anchors: Mapping[Cell, Anchors]) -> None:
        self._anchors = anchors
        self._found: dict[object, list[float]] = {}

    def start(self, cell: Cell, topic: str, seed: int, share: float) -> int:
        """Return a rate's index.

        Parameters
        ----------
        topic : what is searched in the cell; answers of earlier seeds on it count.
        """
        earlier = self._found.get((cell, topic, share))
        return round(self._anchor(cell, seed, share) + (mean(earlier) if earlier else 0.0))

    def learn(self, cell: Cell, topic: str, seed: int, share: float, found: Found) -> None:
        """Take in an answer."""
        if found.index is not None and found.is_bounded:
            offset = found.index - self._anchor(cell, seed, share)
            self._found.setdefault((cell, topic, share), []).append(offset)

    def _anchor(self, cell: Cell, seed: int, share: float) -> float:
        rate = self._anchors.get(cell, {}).get((seed, share), 0.0)
        return index_near(rate) if rate > 0 else START_INDEX


def _run_seed(task: Task, seed: int, guess: Guess) -> list[Line]:
    started = time.perf_counter()
    own = _Answers(task, seed, guess)
    long = loose = None
    if is_blind(task.policy) and seed < BINDING_SEEDS:
        long = _Answers(task, seed, guess, is_long=True)
        loose = _Answers(task, seed, guess, is_long=True, is_loose=True)
    seconds = (time.perf_counter() - started) / len(task.cells)
    return [_line(task, cell, seed, (own, long, loose), seconds) for cell in task.cells]


def _names(task: Task, cell: Cell, seed: int) -> dict[str, Any]:
    """Return the fields of a line that say what was searched."""
    return {
        "set_up": cell.set_up,
        "workload": cell.workload,
        "slo": cell.slo,
        "mode": cell.mode,
        "policy": task.policy,
        "seed": seed,
        "fingerprint": task.fingerprint,
        "tag": task.tag,
    }


def _bound(task: Task, seed: int) -> Line:
    """Return the line of the bound that no policy passes, on the very requests of a seed."""
    started = time.perf_counter()
    cell = task.cells[0]
    question = Question(slo=cell.slo, mode=cell.mode)
    trials = Trials(cell.set_up, task.policy, _load_key(task, seed), [question], task.deadline)
    load, hopeless = trials.load(question), trials.hopeless(question)

    def rates(bound: Callable[..., float]) -> dict[str, float]:
        wanted = {
            f"{share:g}": BoundQuestion(
                share=share, mode=cell.mode, max_num_seqs=MAX_NUM_SEQS, hopeless=hopeless
            )
            for share in SHARES
        }
        return {share: bound(load, trials.step_time, each) for share, each in wanted.items()}

    return Line(
        **_names(task, cell, seed),
        num_requests=len(load),
        num_hopeless=int(hopeless.sum()),
        num_skipped=trials.num_skipped,
        capacity=rates(fluid_bound),
        long=rates(sustained_bound),
        seconds=round(time.perf_counter() - started, 2),
    )


def _load_key(task: Task, seed: int, num_windows: int = 1) -> LoadKey:
    cell = task.cells[0]
    return LoadKey(
        workload=cell.workload,
        seed=seed,
        num_requests=task.num_requests * num_windows,
        max_model_len=max_model_len(cell.set_up),
    )


class _Answers:
    """Capacities of one policy and seed in the cells of a task."""

    def __init__(
        self, task: Task, seed: int, guess: Guess, *, is_long: bool = False, is_loose: bool = False
    ) -> None:
        self.questions = {
            cell: Question(slo=cell.slo, mode=cell.mode, is_loose=is_loose) for cell in task.cells
        }
        key = _load_key(task, seed, task.long_factor if is_long else 1)
        self._topic = f"long {is_long}, loose {is_loose}"
        self._grid = ROUGH_GRID if is_long else GRID
        self.trials = Trials(task.cells[0].set_up, task.policy, key, self.questions.values(), task.deadline)
        self._found = {
            (cell, share): self._search(cell, share, seed, guess)
            for cell in self.questions
            for share in SHARES
        }

    def capacity(self, cell: Cell) -> dict[str, float]:
        """Return share -> requests per second."""
        return {f"{share:g}": self._found[cell, share].rate for share in SHARES}

    def unbounded(self, cell: Cell) -> list[str]:
        """Return the shares that all rates keep."""
        return [f"{share:g}" for share in SHARES if not self._found[cell, share].is_bounded]

    def _search(self, cell: Cell, share: float, seed: int, guess: Guess) -> Found:
        question = self.questions[cell]
        found = search_grid(
            lambda index: self.trials.keeps(index, question, share),
            start=guess.start(cell, self._topic, seed, share),
            grid=self._grid,
            known=self.trials.known(question, share),
        )
        guess.learn(cell, self._topic, seed, share, found)
        return found


def _line(
    task: Task,
    cell: Cell,
    seed: int,
    answers: tuple[_Answers, _Answers | None, _Answers | None],
    seconds: float,
) -> Line:
    own, long, loose = answers
    question = own.questions[cell]
    return Line(
        **_names(task, cell, seed),
        num_requests=len(own.trials.load(question)),
        num_hopeless=int(own.trials.hopeless(question).sum()),
        num_skipped=own.trials.num_skipped,
        capacity=own.capacity(cell),
        long=long.capacity(cell) if long else {},
        loose=loose.capacity(cell) if loose else {},
        unbounded=own.unbounded(cell),
        num_runs=own.trials.num_runs,
        seconds=round(seconds, 2),
    )
