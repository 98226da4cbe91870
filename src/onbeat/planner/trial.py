"""One run of a load, judged; given up as soon as its objective is lost for certain."""

from __future__ import annotations

from collections.abc import Callable

from onbeat.planner.cases import Case
from onbeat.planner.hopeless import Hopeless, HopelessWatch
from onbeat.planner.objective import Objective
from onbeat.planner.search import Stopped
from onbeat.planner.verdict import Verdict
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad

IsStopped = Callable[[], bool]


def run_trial(
    case: Case, load: OfferedLoad, objective: Objective, is_stopped: IsStopped, *, to_the_end: bool = False
) -> Verdict:
    """Run a load and judge it.

    Parameters
    ----------
    to_the_end : finish a run that is lost, for the sake of its numbers.

    Raises
    ------
    Stopped : it was asked to end, or Ctrl-C ended it.
    ConfigError : the case cannot run this load.
    """
    built = case.build()
    watch = None if to_the_end else HopelessWatch(objective.allowances(load), len(load))
    try:
        result = simulate(
            load,
            built.config,
            built.step_time,
            observer=watch,
            on_progress=lambda *_: stop_if(is_stopped),
        )
    except Hopeless as hopeless:
        return hopeless.verdict
    require_finished(result)
    return objective.judge(result)


def stop_if(is_stopped: IsStopped) -> None:
    """Leave a run that was asked to end.

    Raises
    ------
    Stopped : it was.
    """
    if is_stopped():
        raise Stopped


def require_finished(result: SimulationResult) -> None:
    """Raise `Stopped` where Ctrl-C ended the simulation: its records say nothing of the rate."""
    if not result.is_complete:
        raise Stopped
