"""From times of steps to ratios to their floors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from onbeat.perfmodel.model_sizes import ModelSpec

from .floor import Case, MachineRates, WeightBytes, floor_of

Round = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What ran."""

    model: ModelSpec
    weights: WeightBytes
    kv_bytes: float
    """Of one number in the KV cache."""

    def floor(self, case: Case, rates: MachineRates) -> float:
        """Return the least seconds of a step."""
        return floor_of(case, self.model, self.weights, self.kv_bytes, rates).total


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A case over all rounds; times are seconds."""

    case: Case
    steps: list[float]
    """Median of each round."""
    floors: list[float]
    """Of each round: the mean of those by the machine's limits just before and just after the case."""
    ratios: list[float]
    """Step over floor, each within its round."""
    best_ratio: float
    """The quickest step over the floor by the highest limits of all rounds."""
    host_shares: list[float]
    """What of the steps is outside the forward pass, of each round."""


def case_result(case: Case, rounds: Sequence[Round], subject: Subject) -> CaseResult:
    """Return a case's times beside its floors."""
    own = [each["steps"][case.name] for each in rounds]
    steps = [statistics.median(times["whole"]) for times in own]
    floors = [
        statistics.fmean(subject.floor(case, MachineRates(**limits)) for limits in each["limits"][case.name])
        for each in rounds
    ]
    best_floor = subject.floor(case, higher(all_limits(rounds)))
    return CaseResult(
        case=case,
        steps=steps,
        floors=floors,
        ratios=[step / floor for step, floor in zip(steps, floors, strict=True)],
        best_ratio=min(min(times["whole"]) for times in own) / best_floor,
        host_shares=[1 - sum(times["forward"]) / sum(times["whole"]) for times in own],
    )


def all_limits(rounds: Sequence[Round]) -> list[Mapping[str, float]]:
    """Return every measurement of the machine, in no order."""
    return [limits for each in rounds for pair in each["limits"].values() for limits in pair]


def higher(limits: Sequence[Mapping[str, float]]) -> MachineRates:
    """Return the highest of each limit: other programs can only take from what a machine gives."""
    return MachineRates(
        read=max(each["read"] for each in limits), multiply=max(each["multiply"] for each in limits)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourResult:
    """A case without and with a busy neighbour; times are seconds."""

    quiet: float
    """Median of all steps."""
    busy: float
    longest_busy: float
    ratios: list[float]
    """Median busy step over median quiet step of each round."""


def neighbour_result(name: str, rounds: Sequence[Round]) -> NeighbourResult:
    """Return what a neighbour costs a case."""
    quiet = [each["quiet"][name]["whole"] for each in rounds]
    busy = [each["busy"][name]["whole"] for each in rounds]
    all_busy = list(chain(*busy))
    return NeighbourResult(
        quiet=statistics.median(chain(*quiet)),
        busy=statistics.median(all_busy),
        longest_busy=max(all_busy),
        ratios=[
            statistics.median(with_it) / statistics.median(without)
            for with_it, without in zip(busy, quiet, strict=True)
        ],
    )
