"""Runs of the study as lines of results: one for each cell that a run is scored for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from benchmarks.harness.criteria import Curve, Score
from benchmarks.harness.store import ANY_VERSION, Results
from benchmarks.slo.slo_study.cells import Cell, is_blind

Subject = tuple[Cell, str, int]
"""(cell, policy, seed): what has a capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRun:
    """One policy in one cell at one rate."""

    cell: Cell
    policy: str
    seed: int
    index: int
    """Of the rate (`rate_at`)."""

    @property
    def subject(self) -> Subject:
        return self.cell, self.policy, self.seed


class Scored(NamedTuple):
    """A run as one cell's objectives score it."""

    run: RateRun
    score: Score
    seconds: float
    """Of one core, shared among the cells that the run was scored for."""

    def write(self, results: Results, tag: str) -> None:
        """Write a line."""
        default = asdict(Score(num=0, num_hopeless=0, good=0.0))
        found: dict[str, Any] = {
            name: value
            for name, value in asdict(self.score).items()
            if value != default[name] or name in ("num", "num_hopeless", "good")
        }
        results.append(self.run, found, self.seconds, tag=ANY_VERSION if is_blind(self.run.policy) else tag)


def scored_runs(results: Results) -> list[Scored]:
    """Return all runs of the study."""
    found = []
    for line in results.lines():
        names = line.names | {"cell": Cell(**line.names["cell"])}
        found.append(Scored(RateRun(**names), Score(**line.found), line.seconds))
    return found


def curves(runs: Iterable[Scored]) -> dict[Subject, Curve]:
    """Return what is known of each (cell, policy, seed)."""
    found: dict[Subject, Curve] = {}
    for run, score, _ in runs:
        found.setdefault(run.subject, Curve())[run.index] = score
    return found
