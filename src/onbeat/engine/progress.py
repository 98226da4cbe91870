"""What an engine says while it starts."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str], None]
"""Hears one line of text at a time."""


class Detail(str):
    """A line for who looks for a fault: `onbeat serve` shows it with `--log-level debug` alone."""

    __slots__ = ()
