"""Looks for the packages of an extra, without the seconds that importing them takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from onbeat.core.errors import MissingExtra


def check_packages(command: str, packages: Iterable[str]) -> None:
    """Do nothing if all packages are installed.

    Raises
    ------
    MissingExtra : names the first that is not, and the cure.
    """
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(
                f"onbeat {command} needs {name!r}, which is not installed: pip install 'onbeat[serve]'"
            )
