"""What the search asks of an objective."""

from __future__ import annotations

from typing import Protocol

from onbeat.planner.hopeless import Allowance
from onbeat.planner.verdict import Verdict
from onbeat.simulator.result import SimulationResult
from onbeat.workload.offered import OfferedLoad


class Objective(Protocol):
    """Judges a finished run."""

    @property
    def name(self) -> str:
        """As the command line spells it."""
        ...

    def judge(self, result: SimulationResult) -> Verdict:
        """Say whether the run kept the objective; one that was not finished did not."""
        ...

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        """Return what the objective allows of a run of this load; beyond that it is lost for certain.

        Raises
        ------
        ConfigError : it cannot judge this load.
        """
        ...


def unfinished(result: SimulationResult) -> Verdict | None:
    """Return the verdict on a run that did not come to its end; None for one that did."""
    if result.is_complete and len(result.records) == result.num_requests:
        return None
    num_ended = len(result.records)
    return Verdict(
        is_met=False, reason=f"the run was not finished: {num_ended} of {result.num_requests} requests ended"
    )
