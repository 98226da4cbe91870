"""Whether a simulation would have told the latencies of a recorded run beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.distribution import percentile
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import collect_samples
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.recording.reader import Recording
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.replay.decisions import scheduler_config
from onbeat.simulator.replay.history import RecordedRequest, RecordedStep, RunHistory, measured_acceptance
from onbeat.simulator.replay.model import learning_model
from onbeat.simulator.result import SimulationObserver, SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.offered import ClassIds, OfferedLoad
from onbeat.workload.slo_classes import SLOClass

_WINDOW = 32
"""Steps to look ahead for the one that is asked for."""


def step_cycles(steps: Sequence[RecordedStep]) -> list[MeasuredStep]:
    """Return the time of each step, the host's before it included: from end to end, or from an idle plan."""
    cycles = []
    last_end = 0.0
    for step in steps:
        start = step.planned if step.follows_idleness else last_end
        cycles.append(MeasuredStep(step.shape, step.end - start))
        last_end = step.end
    return cycles


class RecordedStepTimes(StepTimeModel):
    """A `core.StepTimeModel` that answers with recorded times, one after the other.

    It expects to be asked for the recorded steps in their order. Where the batch is another one (a request
    was aborted in the recorded run, and here it was not), it goes on with the nearest later step of the very
    shape, and otherwise takes the next one as it is.

    Parameters
    ----------
    cycles : at least one.
    planner : returns the model that the recorded scheduler planned with, as it was before the first step, or
        None where it had none. Asked only if the policy plans by predicted times.

    Attributes
    ----------
    num_asked : steps that were asked for.
    num_matched : of these, steps whose batch was exactly a recorded one.
    """

    def __init__(
        self, cycles: Sequence[MeasuredStep], planner: Callable[[], StepTimeModel | None] = lambda: None
    ) -> None:
        if not cycles:
            raise ConfigError("the record has no steps; record a run that served a request")
        self._cycles = cycles
        self._planner = planner
        self._next = 0
        self.num_asked = 0
        self.num_matched = 0

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        """Return the time of the next recorded step; a recorded time has no quantiles."""
        if q is not None:
            raise ConfigError(f"recorded step times have no quantiles (asked for {q}); ask for the mean")
        self.num_asked += 1
        cycles, start = self._cycles, min(self._next, len(self._cycles) - 1)
        for index in range(start, min(start + _WINDOW, len(cycles))):
            if cycles[index].shape == shape:
                self.num_matched += 1
                self._next = index + 1
                return cycles[index].seconds
        self._next = start + 1
        return cycles[start].seconds

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        """Raise ConfigError: what was not run was not measured."""
        raise ConfigError(
            f"recorded step times cannot say how many tokens fit into {budget:g} s beside {shape} with "
            f"{cached_tokens} cached (quantile {q}); simulate this policy with --profile FILE"
        )

    def with_learning(self) -> StepTimeModel:
        """Return what the scheduler plans with: not these times, which it could not know beforehand."""
        planner = self._planner()
        if planner is None:
            raise ConfigError(
                "the recorded policy plans by predicted step times, but the record has no step-time model"
            )
        return planner

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn nothing: the times are given."""


PERCENTILES = (50.0, 90.0, 99.0)
COMPARED = {"ttft": "TTFT", "itl": "TBT", "e2el": "E2E"}
"""Metrics by their key in results, and their names."""


@dataclass(frozen=True, slots=True)
class PercentileError:
    """One percentile of one metric, measured and simulated, seconds."""

    metric: str
    """Key of `COMPARED`."""
    percentile: float
    measured: float
    simulated: float

    @property
    def relative_error(self) -> float:
        """(simulated - measured) / measured."""
        return (self.simulated - self.measured) / self.measured


@dataclass(frozen=True, slots=True)
class Forecast:
    """A simulation of a recorded run against what was measured."""

    errors: tuple[PercentileError, ...]
    num_requests: int
    """Compared: those that ran to their end in the recorded run."""
    num_steps: int
    num_recorded_steps: int
    num_matched_steps: int | None = None
    """Simulated steps whose batch was the recorded one; None where step times were predicted."""


def forecast_with_recorded_times(
    recording: Recording, history: RunHistory, config: SchedulerConfig
) -> Forecast:
    """Simulate a recorded run with its own step times, host gaps included.

    What remains is the error of the simulator itself: when requests are considered, and in which order
    things happen.
    """
    times = RecordedStepTimes(step_cycles(history.steps), lambda: learning_model(recording.header))
    run = _Run(recording, history, lambda request: request.sent)
    # Told of every step, the simulator takes none of them at once, so each is asked for in its turn.
    result = simulate(run.load, run.settings(config), times, observer=SimulationObserver())
    return run.compare(result, history, num_matched_steps=times.num_matched)


def forecast_with_model(
    recording: Recording,
    history: RunHistory,
    config: SchedulerConfig,
    step_time: StepTimeModel,
    *,
    host_overhead: float,
) -> Forecast:
    """Simulate the arrivals of a recorded run with a step-time model.

    Parameters
    ----------
    host_overhead : seconds from step to step; `RunHistory.host_overhead` is the run's own.
    """
    run = _Run(recording, history, lambda request: request.record.arrival)
    settings = replace(run.settings(config), host_overhead=host_overhead)
    return run.compare(simulate(run.load, settings, step_time), history)


class _Run:
    """The load of a recorded run, and its way back from simulated to recorded requests.

    A request that did not run to its end asks for as many tokens as it got, but at least one; one that no
    step ever took is left out: it was rejected, ended in the queue or aborted.
    """

    def __init__(
        self, recording: Recording, history: RunHistory, sent: Callable[[RecordedRequest], float]
    ) -> None:
        taken = [
            (sent(request), number)
            for number, request in enumerate(history.requests)
            if request.record.scheduled is not None
        ]
        if not taken:
            raise ConfigError(f"{recording.path} has no request that was ever scheduled; record a busier run")
        taken.sort()
        requests = [history.requests[number] for _, number in taken]
        self._acceptance = replace(
            measured_acceptance(requests), known=tuple(request.drafts for request in requests)
        )
        self._records = [request.record for request in requests]
        self._is_relegating = any(request.shed is ShedMode.RELEGATE for request in requests)
        classes, class_ids = group_by_objectives(requests)
        self._origin = min(taken[0][0], min(record.arrival for record in self._records))
        times = np.array([time for time, _ in taken]) - self._origin
        ids: dict[bytes, int] = {}
        blocks = [recording.block_hashes(number) for _, number in taken]
        self.load = OfferedLoad(
            name="recorded",
            arrivals=np.maximum(times, 0.0),
            num_prompt_tokens=np.array([record.num_prompt_tokens for record in self._records]),
            num_output_tokens=np.array(
                [max(record.num_output_tokens, not record.is_embedding) for record in self._records]
            ),
            block_ids=tuple(tuple(ids.setdefault(each, len(ids)) for each in hashes) for hashes in blocks),
            block_size=scheduler_config(recording.header).block_size,
            ids_cover_output=True,
            classes=classes,
            class_ids=class_ids,
        )

    def settings(self, config: SchedulerConfig) -> SimulationConfig:
        """Return what is simulated: one replica that takes all that the recorded one took.

        Drafts that the recorded run verified turn out as they did there.
        """
        limits = replace(config, max_num_queued_reqs=None, max_num_queued_tokens=None, max_queue_seconds=None)
        shed = ShedMode.RELEGATE if self._is_relegating else ShedMode.OFF
        return SimulationConfig(scheduler=limits, shed=shed, acceptance=self._acceptance)

    def compare(
        self, result: SimulationResult, history: RunHistory, *, num_matched_steps: int | None = None
    ) -> Forecast:
        """Compare the requests that ran to their end in the recorded run."""
        if not result.is_complete:
            raise KeyboardInterrupt  # the simulation has taken it in
        measured, simulated = [], []
        for row, record in enumerate(self._records):
            if record.is_completed:
                virtual = result.records[row]
                virtual.arrival = record.arrival - self._origin  # it was sent when the engine looked
                measured.append(record)
                simulated.append(virtual)
        if not measured:
            raise ConfigError("no recorded request ran to its end; record a longer run")
        return Forecast(
            errors=percentile_errors(measured, simulated),
            num_requests=len(measured),
            num_steps=result.total.num_steps,
            num_recorded_steps=len(history.steps),
            num_matched_steps=num_matched_steps,
        )


def group_by_objectives(requests: Sequence[RecordedRequest]) -> tuple[tuple[SLOClass, ...], ClassIds]:
    """Group requests by their objectives, and say of each in which group it is."""
    numbers: dict[tuple[SLO, float], int] = {}
    class_ids = np.array(
        [
            numbers.setdefault((request.record.slo or SLO(), request.weight), len(numbers))
            for request in requests
        ],
        dtype=np.int32,  # each call of a job has an objective of its own
    )
    counts = np.bincount(class_ids)
    classes = tuple(
        SLOClass(name=str(number), slo=slo, weight=weight, share=counts[number] / len(requests))
        for (slo, weight), number in numbers.items()
    )
    return classes, class_ids


def percentile_errors(
    measured: Sequence[RequestRecord], simulated: Sequence[RequestRecord]
) -> tuple[PercentileError, ...]:
    """Compare the percentiles of two sets of records; metrics without values are left out."""
    ours, theirs = collect_samples(measured), collect_samples(simulated)
    return tuple(
        PercentileError(metric, p, percentile(ours[metric], p), percentile(theirs[metric], p))
        for metric in COMPARED
        if ours[metric].size and theirs[metric].size
        for p in PERCENTILES
    )
