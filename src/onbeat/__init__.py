"""onbeat: serve large language models to a latency objective."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onbeat.core.request import SamplingParams
from onbeat.core.slo import SLO
from onbeat.version import __version__

if TYPE_CHECKING:
    from onbeat.engine.llm import LLM
    from onbeat.simulator.api import simulate
    from onbeat.workload.load import Load
    from onbeat.workload.offered import OfferedLoad

__all__ = [
    "LLM",
    "SLO",
    "Load",
    "OfferedLoad",
    "SamplingParams",
    "__version__",
    "simulate",
]

_HOMES = {
    "LLM": "onbeat.engine.llm",
    "Load": "onbeat.workload.load",
    "OfferedLoad": "onbeat.workload.offered",
    "simulate": "onbeat.simulator.api",
}
"""Loaded when asked for."""


def __getattr__(name: str) -> Any:
    """Load what needs more than the standard library only when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'onbeat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
