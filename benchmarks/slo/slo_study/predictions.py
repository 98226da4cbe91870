"""How right the TTFT is that is predicted at arrival: of admitted requests, and of refused ones in a fork.

A fork is a copy of the whole simulation at the instant of a refusal, in which that request is taken after
all; it runs until the request's first token.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from benchmarks.harness.pages import markdown_table
from benchmarks.slo.slo_study.replica import Stage
from benchmarks.slo.slo_study.scenarios import SUBJECT, Finding
from onbeat.core.errors import SLOUnattainable
from onbeat.core.slo import ShedMode
from onbeat.core.step import StepStats
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.deliveries import Collector
from onbeat.simulator.fleet_loop import FleetLoop, OnlyReplica
from onbeat.simulator.observer import StepsWanted
from onbeat.simulator.replica import SerialReplica
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.virtual_clients import Clients, OfferedRequest
from onbeat.workload.offered import OfferedLoad

TOLERANCE = 0.25


class _Served(Exception):
    """The fork's request has its first token."""


class _Watch:
    """Ends a fork with the first token of its request."""

    wanted_steps: StepsWanted = "runs"

    def __init__(self) -> None:
        self.record: RequestRecord | None = None

    def on_request(self, record: RequestRecord, /) -> None: ...

    def on_finish(self, record: RequestRecord, /) -> None: ...

    def on_step(self, replica: int, stats: StepStats, /) -> None:  # noqa: ARG002
        if self.record is not None and self.record.delivery_times:
            raise _Served


class _Kept:
    """Takes records that ended; a class, so that a fork has its own."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def keep(self, _row: int, record: RequestRecord) -> None:
        self.records.append(record)

    def ignore(self, _count: int, _when: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Forked:
    """One refusal."""

    predicted: float
    actual: float
    """Seconds to the first token in the fork."""


class _ForkingReplica(SerialReplica):
    """Forks the simulation at chosen refusals."""

    loop: FleetLoop
    watch: _Watch

    def choose(self, rows: Collection[int], shared: list[object]) -> None:
        """Say which rows of the load to fork at, and what forks may share since nobody changes it."""
        self._rows = frozenset(rows)
        self._shared = shared
        self.forked: list[Forked] = []

    def add(self, offered: OfferedRequest, now: float) -> None:
        try:
            super().add(offered, now)
        except SLOUnattainable as refusal:
            if offered.index in self._rows:
                actual = self._fork(offered, now)
                self.forked.append(Forked(refusal.predicted_ttft, actual))
            raise

    def _fork(self, offered: OfferedRequest, now: float) -> float:
        memo = {id(each): each for each in self._shared}
        memo[id(self._rows)] = frozenset()  # a fork forks no more
        taken, twin = copy.deepcopy((offered, self), memo)
        taken.request = replace(taken.request, shed=ShedMode.OFF)
        twin.watch.record = taken.record
        twin.add(taken, now)
        twin.loop.members[0].call(now)
        try:
            twin.loop.go_on()
        except _Served:
            ttft = taken.record.ttft
            assert ttft is not None
            return ttft
        return inf


def _run(
    load: OfferedLoad, config: SimulationConfig, step_time: StepTimeModel, rows: Collection[int]
) -> tuple[list[RequestRecord], list[Forked]]:
    watch, kept = _Watch(), _Kept()
    replica = _ForkingReplica("0", config, step_time, observer=watch, is_alone=True)
    loop = FleetLoop(Clients(load, config), Collector(kept.keep, on_progress=kept.ignore))
    replica.loop, replica.watch = loop, watch
    replica.choose(rows, [load, config, step_time])
    loop.run(OnlyReplica(loop, replica))
    return kept.records, replica.forked


def accuracy(
    stage: Stage, capacity: float, *, num_requests: int = 1500, num_refusals: int = 200, factor: float = 1.5
) -> Finding:
    """Compare predictions with what came."""
    config, step_time = stage.configure(SUBJECT, ShedMode.REJECT)
    errors: list[float] = []
    biases: list[float] = []
    forked: list[Forked] = []
    for seed in range(stage.seeds):
        load = stage.load(seed, num_requests).at_rate(factor * capacity)
        records, _ = _run(load, config, step_time, ())
        for record in records:
            if record.ttft is not None and record.predicted_ttft is not None:
                errors.append(abs(record.predicted_ttft - record.ttft) / record.ttft)
                biases.append(record.predicted_ttft / record.ttft)
        refused = [int(record.request_id) for record in records if record.is_rejected]
        wanted = min(len(refused), -(-num_refusals // stage.seeds))
        rows = np.random.default_rng([seed, 11]).choice(refused, wanted, replace=False) if wanted else []
        forked += _run(load, config, step_time, [int(row) for row in rows])[1]
    fork_errors = [abs(each.predicted - each.actual) / each.actual for each in forked]
    fork_biases = [each.predicted / each.actual for each in forked]
    rows_shown = [
        ["admitted", str(len(errors)), *_quartiles(errors), *_quartiles(biases)],
        ["refused, in a fork", str(len(forked)), *_quartiles(fork_errors), *_quartiles(fork_biases)],
    ]
    within = float(np.mean([error <= TOLERANCE for error in fork_errors])) if fork_errors else float("nan")
    median = float(np.median(errors)) if errors else inf
    fork_median = float(np.median(fork_errors)) if fork_errors else inf
    return Finding(
        title=f"Predicted TTFT at {factor:g} times capacity",
        text=markdown_table(
            ["requests", "number", "error P25", "P50", "P75", "predicted / actual P25", "P50", "P75"],
            rows_shown,
        ),
        claims=(
            (f"the median error of admitted requests is {median * 100:.1f} % (25 %)", median <= TOLERANCE),
            (
                f"the median error of refused ones is {fork_median * 100:.1f} % (25 %); "
                f"{within * 100:.0f} % of them are within it",
                fork_median <= TOLERANCE,
            ),
        ),
    )


def _quartiles(values: list[float]) -> list[str]:
    if not values:
        return ["-"] * 3
    return [f"{value:.3f}" for value in np.percentile(values, [25, 50, 75])]
