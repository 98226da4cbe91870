"""One run of a load, judged; ended as soon as its objective is missed for certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from onbeat.core.step import StepStats
from onbeat.metrics.record import RequestRecord
from onbeat.planner.cases import BuiltCase, Case
from onbeat.planner.objective import Allowance, Objective, Verdict
from onbeat.planner.search import Stopped
from onbeat.simulator.observer import StepsWanted
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad

IsStopped = Callable[[], bool]


def run_trial(
    case: Case, load: OfferedLoad, objective: Objective, is_stopped: IsStopped, *, to_the_end: bool = False
) -> Verdict:
    """Run a load and judge it; raises as `simulate_trial`, but for a miss.

    Parameters
    ----------
    to_the_end : finish a run that misses its objective, for the sake of its numbers.
    """
    try:
        result = simulate_trial(case.build(), load, is_stopped, watched=None if to_the_end else objective)
    except ObjectiveMissed as missed:
        return missed.verdict
    return replace(objective.judge(result), beyond=result.beyond)


def simulate_trial(
    built: BuiltCase, load: OfferedLoad, is_stopped: IsStopped, *, watched: Objective | None = None
) -> SimulationResult:
    """Run a load.

    Parameters
    ----------
    watched : the run ends where this is missed for certain; without, it goes to the end.

    Raises
    ------
    ObjectiveMissed : the objective is missed.
    Stopped : the run was asked to end, or Ctrl-C ended it: its records say nothing of the rate.
    ConfigError : the case cannot run this load.
    """

    def stop_if_asked(*_: object) -> None:
        if is_stopped():
            raise Stopped

    watch = None if watched is None else MissCounter(watched.allowances(load), len(load))
    result = simulate(load, built.config, built.step_time, observer=watch, on_progress=stop_if_asked)
    if not result.is_complete:
        raise Stopped
    return result


class ObjectiveMissed(Exception):
    """Ends a run; carries the verdict, and the requests that had ended or were lost by then."""

    def __init__(self, verdict: Verdict, records: Sequence[RequestRecord]) -> None:
        super().__init__(verdict.reason)
        self.verdict, self.records = verdict, records


class MissCounter:
    """An observer that ends a run by raising `ObjectiveMissed`.

    Ended requests are counted in batches, beside those under way that are lost: under overload they end late.
    Since a batch depends on virtual time alone, so does the end.

    Parameters
    ----------
    allowances : what the objective allows.
    num_requests : that were offered.
    """

    wanted_steps: StepsWanted = "none"

    def __init__(self, allowances: Sequence[Allowance], num_requests: int, *, batch: int = 32) -> None:
        self._allowances = allowances
        self._num_requests = num_requests
        self._batch = batch
        self._counts = [0] * len(allowances)
        self._uncounted: list[RequestRecord] = []
        self._ended: list[RequestRecord] = []
        self._open: dict[str, RequestRecord] = {}

    def on_request(self, record: RequestRecord) -> None:
        """Take note of a request that may be lost before it ends."""
        self._open[record.request_id] = record

    def on_step(self, replica: int, stats: StepStats) -> None:
        pass

    def on_finish(self, record: RequestRecord) -> None:
        """Count an ended request.

        Raises
        ------
        ObjectiveMissed : one that is too many.
        """
        self._open.pop(record.request_id, None)
        self._uncounted.append(record)
        if len(self._uncounted) < self._batch:
            return
        self._ended += self._uncounted
        for index, allowance in enumerate(self._allowances):
            self._counts[index] += allowance.count(self._uncounted)
            lost = [each for each in self._open.values() if allowance.is_lost(each, record.end)]
            count = self._counts[index] + len(lost)
            if count > allowance.allowed:
                raise ObjectiveMissed(self._verdict(allowance, count), [*self._ended, *lost])
        self._uncounted = []

    def _verdict(self, allowance: Allowance, count: int) -> Verdict:
        reason = (
            f"{count} {allowance.what}, where {allowance.allowed} are allowed, after {len(self._ended)} of "
            f"{self._num_requests} requests"
        )
        return Verdict(is_met=False, reason=reason)
