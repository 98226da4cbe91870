"""One replica for the scenarios: any load, any policy, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.slo.slo_study.cells import OBJECTIVES, settings_of
from benchmarks.slo.slo_study.loads import LoadKey, make_load
from benchmarks.slo.slo_study.search import find_capacity
from benchmarks.slo.slo_study.trial import Question, Runner, config_of, longest_request
from onbeat.core.slo import Fate, ShedMode, SLOMode
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.observer import SimulationObserver
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.offered import OfferedLoad

FIRST_GUESS = 8.0
"""Requests per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the scenarios play."""

    set_up: str = "mistral"
    slo: str = "1s-100ms"
    mode: SLOMode = "stream"
    seeds: int = 5

    @property
    def ttft(self) -> float:
        """Seconds; of the only class."""
        limit = OBJECTIVES[self.slo][0].slo.ttft
        assert limit is not None
        return limit

    @property
    def tbt(self) -> float:
        """Seconds; of the only class."""
        limit = OBJECTIVES[self.slo][0].slo.tbt
        assert limit is not None
        return limit

    def load(self, seed: int, num_requests: int) -> OfferedLoad:
        """Return Poisson arrivals of one request per second with lengths of conversations."""
        key = LoadKey(
            workload="poisson",
            seed=seed,
            num_requests=num_requests,
            max_model_len=longest_request(self.set_up),
        )
        return make_load(key).with_classes(OBJECTIVES[self.slo], seed=seed)

    def configure(self, policy: str, shed: ShedMode) -> tuple[SimulationConfig, StepTimeModel]:
        """Return what a run of a policy needs."""
        simulation = build_simulation(settings_of(self.set_up, policy))
        return replace(config_of(simulation, self.mode), shed=shed), simulation.step_time

    def run(
        self,
        load: OfferedLoad,
        policy: str,
        *,
        shed: ShedMode = ShedMode.RELEGATE,
        observer: SimulationObserver | None = None,
    ) -> SimulationResult:
        """Run a load."""
        config, step_time = self.configure(policy, shed)
        return simulate(load, config, step_time, observer=observer)

    def capacity(self, policy: str) -> float:
        """Return the highest rate at which 90 % of a load that lasts are good, requests per second."""
        runner = Runner(settings_of(self.set_up, policy), "poisson", longest_request(self.set_up))
        return find_capacity(runner, Question(self.slo, self.mode), "90 %", start=FIRST_GUESS)

    def good(self, records: Sequence[RequestRecord]) -> float:
        """Return the share of good requests; NaN of none."""
        return float(good_requests(records, mode=self.mode).mean()) if records else float("nan")


def gap_percentile(records: Sequence[RequestRecord], percent: float = 99) -> float:
    """Return a percentile of all gaps of some requests, seconds; NaN where there is none."""
    gaps = [np.diff(record.delivery_times) for record in records]
    pooled = np.concatenate(gaps) if gaps else np.zeros(0)
    return float(np.percentile(pooled, percent)) if pooled.size else float("nan")


def account(records: Sequence[RequestRecord], num_offered: int) -> tuple[bool, str]:
    """Return whether every offered request ended in one known way, and how many did in which."""
    ways = Counter(
        "relegated" if record.is_completed and record.fate is Fate.RELEGATED else str(record.finish_reason)
        for record in records
    )
    ids = {record.request_id for record in records}
    text = ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))
    return len(ids) == len(records) == num_offered and "None" not in ways, text
