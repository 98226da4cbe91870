"""The whole state of an object as a value that can be compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

from onbeat.core.request import Request
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.fake_step_time import LinearStepTime
from tests.pure.scheduler.timed import FakeStepTime

_ATOMS = (int, float, str, bytes, bool, type(None), Enum, Request, SchedulerConfig, type)
_CACHES = ("block_hashes",)
"""Attributes that are filled as they are asked for: functions of what else there is."""
_MODELS = (FakeStepTime, LinearStepTime)
"""They have no state."""


def digest(value: object) -> Any:
    """Return nested tuples of all that an object holds, however deep.

    Objects met again are named by their place in the walk, so that two digests are equal only where the same
    things are shared, too.
    """
    return _Walk().look(value)


class _Walk:
    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._alive: list[object] = []

    def look(self, value: object) -> Any:
        if isinstance(value, _ATOMS):
            return value
        if isinstance(value, (FunctionType, *_MODELS)):
            return type(value).__name__
        place = self._places.get(id(value))
        if place is not None:
            return ("seen", place)
        self._places[id(value)] = len(self._places)
        self._alive.append(value)  # temporary objects must not leave their ids to others
        name = type(value).__name__
        if isinstance(value, MethodType):
            return (name, value.__func__.__name__, self.look(value.__self__))
        if isinstance(value, dict):
            return (name, tuple((self.look(key), self.look(each)) for key, each in value.items()))
        if isinstance(value, set | frozenset):
            return (name, frozenset(map(self.look, value)))
        parts: tuple[Any, ...] = ()
        if isinstance(value, list | tuple | deque):
            parts = tuple(map(self.look, value))
        return (name, parts, tuple((key, self.look(each)) for key, each in attributes(value)))


def attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield names and values of all that an object keeps, in its slots or in its dictionary, but caches."""
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in _CACHES and hasattr(value, name):
                yield name, getattr(value, name)
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
