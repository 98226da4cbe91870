"""How many examples property tests try: few as a rule, 40 percent with `thorough`, all with `searching`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import settings

_Case = TypeVar("_Case")

SEARCHING = 100
"""Percent."""
THOROUGH = 40
QUICK = 10


def register_profiles() -> None:
    """Make the profiles known, and the quick one the default."""
    # No deadlines: cores are shared, so a slow example says nothing. What every change must pass tries the
    # same examples each time, so that a failure belongs to the change; `make test-all` looks for new ones.
    for name, percent, is_fixed in (
        ("quick", QUICK, False),
        ("thorough", THOROUGH, True),
        ("searching", SEARCHING, False),
    ):
        settings.register_profile(name, max_examples=percent, derandomize=is_fixed, deadline=None)
    settings.load_profile("quick")


def examples(most: int, **options: Any) -> settings:
    """Return settings that try so many examples in the searching profile, and their part of it in others.

    Parameters
    ----------
    options : further ones of hypothesis.
    """
    return settings(max_examples=max(most * _percent() // SEARCHING, 1), deadline=None, **options)


def part_of(cases: Sequence[_Case]) -> Sequence[_Case]:
    """Return the cases of a list that the profile tries: the first, and of the others its part."""
    return cases[:: SEARCHING // _percent()]


def _percent() -> int:
    return settings.default.max_examples if settings.default is not None else SEARCHING
