"""One run: a policy on a load at a rate, scored by all objectives that it can be scored by."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.criteria import Score
from benchmarks.slo.slo_study.cells import OBJECTIVES, SET_UPS
from benchmarks.slo.slo_study.idle import hopeless_rows
from benchmarks.slo.slo_study.loads import lasting, warm_seconds
from onbeat.core.options import change
from onbeat.core.slo import ShedMode, SLOMode
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.deliveries import Collector
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.fleet_loop import FleetLoop, OnlyReplica
from onbeat.simulator.replica import make_replica
from onbeat.simulator.resolve import Resolved, resolve
from onbeat.simulator.simulation_config import ReplicaKind, SimulationConfig
from onbeat.simulator.virtual_clients import Clients
from onbeat.simulator.virtual_replica import Around
from onbeat.workload.offered import OfferedLoad

NUM_DECILES = 10
_LOST_BELOW = 0.8
"""A run is over when less than this share can still be good: no capacity lies there."""
_LOST_SO_FAR = 0.65, 0.25
"""Or when, of this second share of the requests, less than the first were good."""
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Question:
    """What a run is scored by."""

    slo: str
    mode: SLOMode


class MissedError(Exception):
    """A run misses every score; carries the share that was good so far, and how much of what came is
    unfinished, where that is why."""

    def __init__(self, good: float, unfinished: float) -> None:
        super().__init__(f"{good:.3f} were good so far, {unfinished:.3f} are unfinished")
        self.good, self.unfinished = good, unfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Which requests of a load count, and how they are scored."""

    load: OfferedLoad
    """With objectives."""
    mode: SLOMode
    counted: NDArray[np.bool_]
    start: float
    """End of the warm-up, seconds."""

    @staticmethod
    def of(load: OfferedLoad, mode: SLOMode, hopeless: NDArray[np.bool_], start: float) -> Measured:
        assert load.arrivals is not None
        return Measured(load=load, mode=mode, counted=(load.arrivals >= start) & ~hopeless, start=start)


class _Watch:
    """Keeps the records of a run, and ends it when all scores are missed."""

    def __init__(self, scored: Sequence[Measured], num_slots: int, *, ends_early: bool) -> None:
        first = scored[0]
        self._ends_early = ends_early
        assert first.load.arrivals is not None
        self.records: list[RequestRecord] = []
        self._arrivals: list[float] = first.load.arrivals.tolist()
        self._most_unfinished = (1 - _LOST_BELOW) * len(first.load) + 2 * num_slots
        self._counted: list[bool] = np.any([each.counted for each in scored], axis=0).tolist()
        self._num_counted = sum(self._counted)
        self._most_bad = (1 - _LOST_BELOW) * self._num_counted
        self._judge = _judge_one(first) if len(scored) == 1 else _judge_many(scored)
        self._batch: list[RequestRecord] = []
        self._num_judged = self._num_bad = 0

    def keep(self, row: int, record: RequestRecord) -> None:
        """Take a record.

        Raises
        ------
        MissedError : the run need not go on.
        """
        self.records.append(record)
        if self._counted[row] and self._ends_early:
            self._batch.append(record)
        if len(self._batch) < _BATCH:
            return
        self._num_judged += len(self._batch)
        self._num_bad += len(self._batch) - self._judge(self._batch)
        self._batch = []
        num_arrived = bisect_right(self._arrivals, record.end)
        unfinished = num_arrived - len(self.records)
        good = 1 - self._num_bad / self._num_judged
        share, after = _LOST_SO_FAR
        is_low = good < share and self._num_judged > after * self._num_counted
        if unfinished > self._most_unfinished:
            raise MissedError(good, unfinished / num_arrived)
        if self._num_bad > self._most_bad or is_low:
            raise MissedError(good, 0.0)


def _judge_one(scored: Measured) -> Callable[[list[RequestRecord]], int]:
    return lambda records: int(good_requests(records, mode=scored.mode).sum())


def _judge_many(scored: Sequence[Measured]) -> Callable[[list[RequestRecord]], int]:
    """Return how many are in time by the loosest TTFT of all: the others are good by nobody's objectives."""
    limits = [each.slo.ttft or inf for one in scored for each in one.load.classes]
    loosest = max(limits)
    return lambda records: sum(each.ttft is not None and each.ttft <= loosest for each in records)


def play(
    scored: Sequence[Measured], config: SimulationConfig, device: StepTimeModel, *, ends_early: bool = True
) -> list[RequestRecord]:
    """Run the load of the first score on one replica; its records come as requests end.

    Composed by hand, since an observer of `simulate` would hear of each step too.

    Parameters
    ----------
    ends_early : whether to end it once it misses.

    Raises
    ------
    MissedError : it misses all scores.
    """
    watch = _Watch(scored, config.scheduler.max_num_seqs, ends_early=ends_early)
    load, kind = scored[0].load, ReplicaKind(scheduler=config.scheduler, step_time=device)
    loop = FleetLoop(Clients(load, config), Collector(watch.keep, len(load)))
    loop.run(OnlyReplica(loop, make_replica(0, config, kind, Around(is_alone=True))))
    return watch.records


def score(scored: Measured, records: Sequence[RequestRecord]) -> Score:
    """Score a run that came to its end."""
    rows = [int(record.request_id) for record in records]
    for row, record in zip(rows, records, strict=True):
        record.slo = scored.load.slo(row)
    is_good = good_requests(records, mode=scored.mode)
    is_counted = scored.counted[rows]
    counted = [record for record, counts in zip(records, is_counted.tolist(), strict=True) if counts]
    good = is_good[is_counted]
    ttft = np.array([inf if record.ttft is None else record.ttft for record in counted])
    limits = np.array([(record.slo.ttft if record.slo else None) or inf for record in counted])
    tails = (ttft / limits)[np.isfinite(limits)]
    lengths = np.array([record.num_prompt_tokens for record in counted])
    deciles = np.array_split(np.argsort(lengths, kind="stable"), NUM_DECILES)
    classes = np.array([record.request_class for record in counted])
    gaps = np.concatenate([np.diff(record.delivery_times) for record in counted])
    percentiles = np.percentile(ttft, [50, 99, 100], method="higher")
    return Score(
        num=len(counted),
        num_hopeless=int((~scored.counted & (_arrivals(scored.load) >= scored.start)).sum()),
        good=_short(good.mean()),
        classes={str(name): _short(good[classes == name].mean()) for name in np.unique(classes)}
        if len(scored.load.classes) > 1
        else {},
        deciles=[_short(good[rows].mean()) for rows in deciles],
        longest=[_short(ttft[rows].max(), 2) for rows in deciles],
        ttft=[_short(value, 3) for value in percentiles],
        tail=_short(np.percentile(tails, 99, method="higher"), 3) if tails.size else 0.0,
        gap=_short(np.percentile(gaps, 99)) if gaps.size else 0.0,
        preempted=_short(np.mean([record.num_preemptions > 0 for record in counted])),
        growth=_short(growth(records, ~is_good, scored.start, float(_arrivals(scored.load)[-1]))),
    )


def growth(records: Sequence[RequestRecord], is_bad: NDArray[np.bool_], start: float, end: float) -> float:
    """Return what share of what arrives is left over, as the larger of requests and of prompt tokens.

    What is unfinished and will not be good, in the mean of the last quarter of the time, less that of the
    second, over what arrives in between: half of the time. Those that will be good cannot pile up: they are
    served in time. (How many run at once changes with the rate of a trace.)
    """
    arrivals = np.array([record.arrival for record in records])
    ends = np.array([record.end for record in records])
    tokens = np.array([record.num_prompt_tokens for record in records], dtype=np.float64)
    quarter = (end - start) / 4
    second, last = start + quarter, end - quarter
    shares = []
    for weights in (np.ones(len(records)), tokens):
        bad = weights * is_bad
        after, before = (_mean_unfinished(arrivals, ends, bad, at, quarter) for at in (last, second))
        inside = (arrivals >= second + quarter / 2) & (arrivals < last + quarter / 2)
        shares.append(float((after - before) / max(1.0, weights[inside].sum())))
    return max(shares)


def _mean_unfinished(
    arrivals: NDArray[np.float64],
    ends: NDArray[np.float64],
    weights: NDArray[np.float64],
    start: float,
    seconds: float,
) -> float:
    overlap = np.minimum(ends, start + seconds) - np.maximum(arrivals, start)
    return float((np.maximum(0.0, overlap) * weights).sum() / seconds)


def _arrivals(load: OfferedLoad) -> NDArray[np.float64]:
    assert load.arrivals is not None
    return load.arrivals


def _short(value: SupportsFloat, digits: int = 4) -> float:
    return round(float(value), digits)


class Runner:
    """Runs a replica on a workload at any rate and seed.

    Parameters
    ----------
    settings : the replica.
    limit : the longest request that is offered, tokens; the same for all policies of a set-up.
    """

    def __init__(self, settings: Deployment, workload: str, limit: int) -> None:
        self.simulation = resolve(settings)
        self._workload = workload
        self._limit = limit

    def run(
        self,
        rate: float,
        seed: int,
        questions: Sequence[Question],
        *,
        ends_early: bool = True,
    ) -> Mapping[Question, Score]:
        """Run a load that lasts and score it by each question; more than one only where none is looked at."""
        bare = lasting(self._workload, rate=rate, seed=seed, max_model_len=self._limit)
        step_time = self.simulation.step_time
        start = warm_seconds(rate)
        scored = {}
        for question in questions:
            load = bare.with_classes(OBJECTIVES[question.slo], seed=seed)
            scored[question] = Measured.of(load, question.mode, hopeless_rows(load, step_time), start)
        config = config_of(self.simulation, questions[0].mode)
        try:
            records = play(list(scored.values()), config, step_time, ends_early=ends_early)
        except MissedError as missed:
            good, left = _short(missed.good), _short(missed.unfinished)
            return {
                question: Score(
                    num=int(each.counted.sum()), num_hopeless=0, good=good, growth=left, is_lost=True
                )
                for question, each in scored.items()
            }
        return {question: score(each, records) for question, each in scored.items()}


def config_of(simulation: Resolved, mode: SLOMode) -> SimulationConfig:
    """Return a configuration in which what cannot be kept becomes best effort."""
    scheduler = replace(simulation.config.scheduler, slo_mode=mode)
    return replace(simulation.config, scheduler=scheduler, shed=ShedMode.RELEGATE)


@lru_cache
def longest_request(set_up: str) -> int:
    """Return the longest request that a set-up takes under any policy, in tokens."""
    settings = change(SET_UPS[set_up], policy="sarathi", max_num_batched_tokens=None)
    return resolve(settings).config.scheduler.max_model_len


def timed(run: Callable[[], Mapping[Question, Score]]) -> tuple[Mapping[Question, Score], float]:
    """Return the scores of a run and the seconds of the processor that it took."""
    started = time.process_time()
    return run(), round(time.process_time() - started, 2)
