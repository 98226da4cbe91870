"""The configurations that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, Protocol

from onbeat.core.options import change
from onbeat.core.slo import DEFAULT_SHED_ORDER
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.record import RequestRecord
from onbeat.planner.objectives import Allowance, Objective, Verdict
from onbeat.planner.search import Stopped
from onbeat.scheduler.replica.policies import composition
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.result import SimulationObserver, SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.offered import OfferedLoad

Labels = tuple[tuple[str, str], ...]
"""What sets a case apart: (setting, value)."""

TBT = "slo_tbt_ms"
"""Label of the TBT objective: it changes the load and the objective, not the replica."""
_SHORT_NAMES = {
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "max_num_batched_tokens": "budget",
    "max_num_seqs": "seqs",
    "shed_order": "shed order",
    TBT: "TBT objective (ms)",
}


class BuiltCase(NamedTuple):
    """What a simulation needs of a case."""

    config: SimulationConfig
    step_time: StepTimeModel
    num_devices: int


class Case(Protocol):
    """A configuration. It is sent to other processes, so it can be pickled and builds its parts there."""

    @property
    def labels(self) -> Labels: ...

    def build(self) -> BuiltCase:
        """Make the parts anew, so that no run sees what a step-time model learned in another.

        Raises
        ------
        ConfigError : they do not fit together, or the model does not fit the devices.
        """


def short_name(setting: str) -> str:
    """Return what tables and charts call a setting."""
    return _SHORT_NAMES.get(setting, setting)


def case_name(labels: Labels) -> str:
    """Return what sets a case apart, in one line."""
    return ", ".join(f"{short_name(name)} {value}" for name, value in labels) or "as given"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCase:
    """A configuration named as the command line names it.

    Parameters
    ----------
    tbt, context_tokens : of an automatic token budget (`resolve`).
    """

    settings: Deployment
    labels: Labels = ()
    tbt: float | None = None
    context_tokens: int | None = None

    def build(self) -> BuiltCase:
        simulation = resolve(self.settings, tbt=self.tbt, context_tokens=self.context_tokens)
        return BuiltCase(simulation.config, simulation.step_time, simulation.num_devices)


def settings_grid(base: Deployment, axes: Mapping[str, Sequence[Any]]) -> list[tuple[Labels, Deployment]]:
    """Return every combination of some settings, in the order of the axes, the last one fastest.

    A token budget is for chunked prompts, an order of shedding for the policy that sheds by it: where
    policies vary, those without such a choice take their own default instead, once.

    Parameters
    ----------
    base : the settings that stay.
    axes : setting of `Deployment` or its limits -> its values, at least one each.

    Raises
    ------
    ConfigError : a setting that there is none of.
    """
    cases: dict[Labels, Deployment] = {}
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        unused = _choices_without(chosen["policy"]) if len(axes.get("policy", ())) > 1 else {}
        labels = tuple(
            (name, str(value)) for name, value in chosen.items() if name not in unused and value is not None
        )
        cases[labels] = change(base, **(chosen | unused))
    return list(cases.items())


def _choices_without(name: str) -> dict[str, Any]:
    """Return the settings that a policy has no use for, with their defaults."""
    policy = composition(name)
    unused: dict[str, Any] = {}
    if policy.whole_prompts:
        unused["max_num_batched_tokens"] = None
    if not policy.predicts_waits:
        unused["shed_order"] = DEFAULT_SHED_ORDER
    return unused


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


class MissCounter(SimulationObserver):
    """An observer that ends a run by raising `ObjectiveMissed`.

    Ended requests are counted in batches, beside those under way that are lost: under overload they end late.
    Since a batch depends on virtual time alone, so does the end.

    Parameters
    ----------
    allowances : what the objective allows.
    num_requests : that were offered.
    """

    wants_steps = False

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
