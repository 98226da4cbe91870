"""`onbeat bench serve --check-plan`: the load of a plan, and whether its promise was kept."""

from __future__ import annotations

import argparse
from dataclasses import MISSING
from typing import Any

from onbeat.bench.promise import refuse_too_few
from onbeat.cli.bench_settings import BenchOptions
from onbeat.cli.options import read_value
from onbeat.core.errors import ConfigError, quoted
from onbeat.core.options import change, settings_of
from onbeat.planner.plan_file import Promise

_OWN = ("num-prompts", "salt", "seed")
"""Flags of the load that may differ from the plan's: how long the test is, and what is drawn."""


def with_planned_load(options: BenchOptions, promise: Promise) -> BenchOptions:
    """Return the options with the load of a plan.

    Raises
    ------
    ConfigError : the command line asks for another load, or for too few requests, or the plan for a flag that
        there is none of.
    """
    settings = {setting.key.replace("_", "-"): setting for setting in settings_of(BenchOptions)}
    given = _values(options)
    changes: dict[str, Any] = {"slo_mode": promise.mode, "ignore_eos": True}
    for name, value in promise.load.items():
        if name not in settings:
            raise ConfigError(f"{promise.path} has the load flag {name!r}, which a load test does not take")
        setting = settings[name]
        try:
            wanted = read_value(setting, str(value)) if not isinstance(value, bool) else value
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{promise.path}: {name} is {quoted(value)}: {error}") from error
        own, default = given[setting.name], setting.default
        is_given = default is not MISSING and own != default
        if is_given and own != wanted and name not in _OWN:
            raise ConfigError(
                f"{setting.flag} changes the load, but the plan has {name} {value}; leave it out, or "
                "make another plan"
            )
        if not (is_given and name in _OWN):
            changes[setting.name] = wanted
    for name in ("sweep_rate", "sweep_concurrency", "preset", "max_concurrency", "ramp_up_strategy"):
        if given[name] is not None:
            raise ConfigError(f"--check-plan runs the load of its plan: leave out --{name.replace('_', '-')}")
    num_prompts = changes.get("num_prompts", given["num_prompts"])
    if num_prompts is not None:
        refuse_too_few(num_prompts, promise.share)  # rather than once they were sent
    return change(options, **changes)


def _values(options: Any) -> dict[str, Any]:
    """Return the settings of options and of their parts, by name."""
    found: dict[str, Any] = {}
    for name in options.__dataclass_fields__:
        value = getattr(options, name)
        if hasattr(value, "__dataclass_fields__"):
            found |= _values(value)
        else:
            found[name] = value
    return found
