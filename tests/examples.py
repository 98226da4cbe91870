"""How many examples property tests try: few as a rule, all with the profiles thorough and searching."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

THOROUGH = 100
"""Percent."""
QUICK = 10


def register_profiles() -> None:
    """Make the profiles known, and the quick one the default."""
    # No deadlines: cores are shared, so a slow example says nothing. What every change must pass tries the
    # same examples each time, so that a failure belongs to the change; `make test-all` looks for new ones.
    for name, percent, is_fixed in (
        ("quick", QUICK, False),
        ("thorough", THOROUGH, True),
        ("searching", THOROUGH, False),
    ):
        settings.register_profile(name, max_examples=percent, derandomize=is_fixed, deadline=None)
    settings.load_profile("quick")


def examples(thorough: int, **options: Any) -> settings:
    """Return settings that try so many examples in the thorough profile, and their part of it in others.

    Parameters
    ----------
    options : further ones of hypothesis.
    """
    percent = settings.default.max_examples if settings.default is not None else THOROUGH
    return settings(max_examples=max(thorough * percent // THOROUGH, 1), deadline=None, **options)
