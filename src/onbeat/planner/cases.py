"""The configurations that are compared."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from onbeat.core.step_time import StepTimeModel
from onbeat.simulator.simulation_config import SimulationConfig

Labels = tuple[tuple[str, str], ...]
"""What sets a case apart: (setting, value)."""

_SHORT_NAMES = {
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "max_num_batched_tokens": "budget",
    "max_num_seqs": "seqs",
    "shed_order": "shed order",
    "slo_tbt_ms": "TBT objective (ms)",
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
        ...


def short_name(setting: str) -> str:
    """Return what tables and charts call a setting."""
    return _SHORT_NAMES.get(setting, setting)


def case_name(labels: Labels, default: str = "as given") -> str:
    """Return what sets a case apart, in one line."""
    return ", ".join(f"{short_name(name)} {value}" for name, value in labels) or default
