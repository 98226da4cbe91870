"""Runs of one policy on the requests of one seed, scored for each question that the run can answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onbeat.core.slo import ShedMode, SLOMode
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad
from slo_study.cells import OBJECTIVES, SET_UPS, is_blind, loosened, settings_of
from slo_study.grid_search import Known, known_from, rate_at
from slo_study.idle import hopeless_rows
from slo_study.loads import LoadKey, make_load
from slo_study.watch import LossWatch, Lost


class OutOfTime(Exception):
    """The slice of the study is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a run is asked."""

    slo: str
    mode: SLOMode
    is_loose: bool = False
    """Whether its objectives are `LOOSE_FACTOR` times as long."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The share of good requests among those that are not hopeless, or a bound of it."""

    at_most: float
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """A load with the objectives of a question."""

    load: OfferedLoad
    hopeless: NDArray[np.bool_]


class Trials:
    """Keeps what each rate answered.

    Parameters
    ----------
    questions : that are asked; more than one only of policies that look at no objective.
    deadline : when to stop, seconds since 1970.
    """

    def __init__(
        self, set_up: str, policy: str, key: LoadKey, questions: Iterable[Question], deadline: float
    ) -> None:
        self.questions = tuple(questions)
        assert len(self.questions) == 1 or is_blind(policy), "its runs depend on the objectives"
        simulation = build_simulation(settings_of(set_up, policy))
        scheduler = replace(simulation.config.scheduler, slo_mode=self.questions[0].mode)
        self._config = replace(simulation.config, scheduler=scheduler, shed=ShedMode.RELEGATE)
        self.step_time = simulation.step_time
        self._is_blind = is_blind(policy)
        self._deadline = deadline
        bare = make_load(key)
        self.num_skipped = bare.num_skipped
        self._scored = {question: self._score_with(bare, question, key.seed) for question in self.questions}
        self._answers: dict[int, dict[Question, Answer]] = {}
        self.num_runs = 0

    def keeps(self, index: int, question: Question, share: float) -> bool:
        """Return whether at least this share is good at a rate.

        Raises
        ------
        OutOfTime : the run would end too late.
        """
        answer = self._answers.get(index, {}).get(question)
        if answer is None or (not answer.is_exact and answer.at_most >= share):
            self._answers[index] = self.run(index, None if self._is_blind else share)
            answer = self._answers[index][question]
        return answer.at_most >= share

    def known(self, question: Question, share: float) -> Known:
        """Return what the runs so far say of a share."""
        answers = ((index, each[question]) for index, each in self._answers.items())
        return known_from(
            {
                index: answer.at_most >= share
                for index, answer in answers
                if answer.is_exact or answer.at_most < share
            }
        )

    def run(self, index: int, share: float | None) -> Mapping[Question, Answer]:
        """Run the load at a rate.

        Parameters
        ----------
        share : give the run up once this is lost; None runs to the end.
        """
        question = self.questions[0]
        scored = self._scored[question]
        watch = None if share is None else LossWatch(share, question.mode, scored.hopeless)
        self.num_runs += 1
        try:
            result = simulate(
                scored.load.at_rate(rate_at(index)),
                self._config,
                self.step_time,
                observer=watch,
                on_progress=self._stop_in_time,
            )
        except Lost as lost:
            return {question: Answer(lost.at_most, is_exact=False)}
        return {each: Answer(self._share(result.records, each)) for each in self.questions}

    def records(self, rate: float) -> list[RequestRecord]:
        """Run the load of the first question to its end at a rate (requests per second)."""
        load = self._scored[self.questions[0]].load.at_rate(rate)
        return simulate(load, self._config, self.step_time).records

    def score(self, records: list[RequestRecord], question: Question) -> float:
        """Return the share of good requests among those that are not hopeless."""
        return self._share(records, question)

    def load(self, question: Question) -> OfferedLoad:
        return self._scored[question].load

    def hopeless(self, question: Question) -> NDArray[np.bool_]:
        return self._scored[question].hopeless

    def _score_with(self, bare: OfferedLoad, question: Question, seed: int) -> _Scored:
        classes = OBJECTIVES[question.slo]
        if question.is_loose:
            classes = loosened(classes)
        load = bare.with_classes(classes, seed=seed)
        return _Scored(load=load, hopeless=hopeless_rows(load, self.step_time))

    def _share(self, records: list[RequestRecord], question: Question) -> float:
        scored = self._scored[question]
        rows = [int(record.request_id) for record in records]
        for row, record in zip(rows, records, strict=True):
            record.slo = scored.load.slo(row)
        is_good = np.zeros(len(scored.load), dtype=np.bool_)
        is_good[rows] = good_requests(records, mode=question.mode)
        counted = ~scored.hopeless
        return float(is_good[counted].mean()) if counted.any() else 1.0

    def _stop_in_time(self, _finished: int, _offered: int, _virtual: float, /) -> None:
        if time.time() > self._deadline:
            raise OutOfTime


def max_model_len(set_up: str) -> int:
    """Return the longest request that a set-up takes under any policy, in tokens."""
    limits = build_simulation(replace(SET_UPS[set_up], policy="sarathi")).config.scheduler
    return limits.max_model_len
