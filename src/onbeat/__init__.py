"""onbeat: serve large language models to a latency objective."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onbeat.core.errors import MissingExtra
from onbeat.core.request import SamplingParams

if TYPE_CHECKING:
    from onbeat.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is asked for."""
    if name != "LLM":
        raise AttributeError(f"module 'onbeat' has no attribute {name!r}")
    try:
        return importlib.import_module("onbeat.engine.llm").LLM
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"onbeat.LLM needs {error.name!r}, which is not installed: pip install 'onbeat[serve]'"
        ) from error
