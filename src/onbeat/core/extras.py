"""Libraries that few commands need, and that an installation may lack."""

from __future__ import annotations

import importlib
from typing import Any

from onbeat.core.errors import MissingExtra


def require(module: str, *, extra: str, purpose: str) -> Any:
    """Return a module of an optional library, imported now.

    Parameters
    ----------
    module : its full name.
    extra : of onbeat, that brings the library.
    purpose : what needs it, as the subject of a sentence.

    Raises
    ------
    MissingExtra : the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{purpose} needs {error.name!r}, which is not installed: pip install 'onbeat[{extra}]'"
        ) from error
