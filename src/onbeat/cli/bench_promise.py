"""`onbeat bench serve --check-plan`: the load of a plan, and whether its promise was kept."""

from __future__ import annotations

import argparse
from typing import Any

from onbeat.bench.promise import refuse_too_few
from onbeat.cli.bench_settings import BenchOptions
from onbeat.cli.options import read_value
from onbeat.core.errors import ConfigError, quoted
from onbeat.core.options import change, changed, settings_of
from onbeat.planner.plan_file import Promise

_OWN = ("num-prompts", "num-warmups", "salt", "seed", "tokenizer")
"""Flags of the load that may differ from the plan's: how long the test is, and what is drawn."""


def with_planned_load(options: BenchOptions, promise: Promise) -> BenchOptions:
    """Return the options with the load of a plan.

    Raises
    ------
    ConfigError : the command line asks for another load, or for too few requests, or the plan for a flag that
        there is none of.
    """
    settings = {setting.key.replace("_", "-"): setting for setting in settings_of(BenchOptions)}
    planned = {**promise.load, "slo-mode": promise.mode}
    given = {each.name: value for each, value in changed(options).items()}
    changes: dict[str, Any] = {"ignore_eos": True}
    for name, value in planned.items():
        if name not in settings:
            raise ConfigError(f"{promise.path} has the load flag {name!r}, which a load test does not take")
        setting = settings[name]
        try:
            wanted = read_value(setting, str(value)) if not isinstance(value, bool) else value
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{promise.path}: {name} is {quoted(value)}: {error}") from error
        if name not in _OWN and given.get(setting.name, wanted) != wanted:
            raise ConfigError(
                f"{setting.flag} changes the load, but the plan has {name} {value}; leave it out, or "
                "make another plan"
            )
        if name not in _OWN or setting.name not in given:
            changes[setting.name] = wanted
    for each in changed(options.load):
        if each.key.replace("_", "-") not in {*planned, *_OWN}:
            raise ConfigError(f"--check-plan runs the load of its plan: leave out {each.flag}")
    num_prompts = changes.get("num_prompts", given.get("num_prompts"))
    if num_prompts is not None:
        refuse_too_few(num_prompts, promise.share)  # rather than once they were sent
    return change(options, **changes)
