"""From the flags of `onbeat capacity` to the cases and loads that it compares."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onbeat.cli.capacity_options import TBT, CapacityOptions, parse_vary
from onbeat.cli.options import read_options
from onbeat.cli.simulate_options import replica_settings
from onbeat.core.errors import ConfigError
from onbeat.core.options import change, changed
from onbeat.core.slo import SLOMode
from onbeat.planner.cases import Labels, ReplicaCase, settings_grid
from onbeat.planner.objective import Objective
from onbeat.planner.objectives import parse_objective
from onbeat.scheduler.replica.token_budget import mean_decode_context
from onbeat.simulator.deployment import AUTO, Deployment
from onbeat.simulator.resolve import Resolved, decode_context, resolve, step_times_text, what_binds
from onbeat.workload.load import Load, tightest_tbt
from onbeat.workload.offered import LongerThanContext, OfferedLoad

_PLENTY_OF_BLOCKS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """A configuration, what it is judged by, and the load of each repeat."""

    case: ReplicaCase
    objective: Objective | None
    loads: tuple[OfferedLoad, ...]
    step_times: str
    """What predicts them; empty where the configuration cannot run."""
    error: str = ""
    """Why the configuration cannot run at all: its memory, as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    labels: Labels
    settings: Deployment
    simulation: Resolved | None
    error: str = ""


def plan_cases(args: argparse.Namespace, options: CapacityOptions) -> list[PlannedCase]:
    """Return every configuration that the flags name.

    Raises
    ------
    ConfigError : bad input. A model that does not fit its devices is not: that is a case which cannot run.
    """
    if args.request_rate is not None:
        raise ConfigError(
            "capacity searches for the rate: leave out --request-rate. --sweep-rate runs given rates; "
            "--arrivals gamma draws Poisson arrivals for a trace"
        )
    axes = parse_vary(options.vary)
    objectives_ms = axes.pop(TBT, [])
    base = replica_settings(args)
    for each, value in changed(base).items():
        if value not in axes.get(each.name, [value]) and each.name != "device":  # which must be given
            raise ConfigError(f"--vary does not try {each.flag} {value}: add it to --vary, or leave it out")
    drafts = _draft_cases(base, axes)
    planned: list[PlannedCase] = []
    workload = read_options(args, Load)
    for tbt_ms in objectives_ms or [None]:
        own = workload if tbt_ms is None else change(workload, tbt=tbt_ms / 1e3)
        tbt = tightest_tbt(own.classes())
        objective = _objective(options, tbt, args.slo_mode)
        loads = _loads(own, options.study.repeats, drafts)
        if objective is not None:
            _require_rate(loads[0])
            objective.allowances(loads[0])  # refuses a load that it cannot judge
        for draft in drafts:
            labels = draft.labels if tbt_ms is None else (*draft.labels, (TBT, f"{tbt_ms:g}"))
            case = ReplicaCase(
                settings=draft.settings,
                labels=labels,
                tbt=tbt,
                context_tokens=_context_tokens(draft, loads[0]),
            )
            planned.append(
                PlannedCase(
                    case=case,
                    objective=objective,
                    loads=loads,
                    step_times=""
                    if draft.simulation is None
                    else step_times_text(draft.settings, draft.simulation.errors),
                    error=draft.error or _too_short(draft, loads),
                )
            )
    return planned


def _require_rate(load: OfferedLoad) -> None:
    rate = load.rate
    if rate is None or not np.isfinite(rate):
        raise ConfigError(
            f"the {load.name} load has no rate to search: it is a closed loop, or all its requests arrive at "
            "once; give --arrivals gamma, or leave out --max-concurrency"
        )


def _objective(options: CapacityOptions, tbt: float | None, mode: SLOMode) -> Objective | None:
    if options.objective is None and options.is_sweep:
        return None
    return parse_objective(options.objective or "sarathi", tbt=tbt, mode=mode)


def _draft_cases(base: Deployment, axes: dict[str, list[Any]]) -> list[_Draft]:
    """Build each configuration once: bad input comes to light before anything runs."""
    drafts, refusals = [], []
    for labels, settings in settings_grid(base, axes):
        # What an automatic budget needs to know of the load is not known yet.
        is_auto = settings.limits.max_num_batched_tokens == AUTO
        trial = change(settings, max_num_batched_tokens=None) if is_auto else settings
        try:
            drafts.append(_Draft(labels=labels, settings=settings, simulation=resolve(trial)))
        except ConfigError as error:
            drafts.append(_Draft(labels=labels, settings=settings, simulation=None, error=str(error)))
            if not _fits_with_plenty_of_memory(trial):
                refusals.append(error)
    if len(refusals) == len(drafts):
        raise refusals[0]
    return drafts


def _fits_with_plenty_of_memory(settings: Deployment) -> bool:
    try:
        resolve(replace(settings, num_blocks=_PLENTY_OF_BLOCKS))
    except ConfigError:
        return False
    return True


def _too_short(draft: _Draft, loads: tuple[OfferedLoad, ...]) -> str:
    """Return why a configuration cannot take the longest requests; empty where it can, or cannot run."""
    if draft.simulation is None:
        return ""
    try:
        for load in loads:
            load.check_lengths(draft.simulation.config.max_model_len, overlong="error")
    except LongerThanContext as error:
        return str(what_binds(draft.settings, error))
    return ""


def _loads(workload: Load, num_repeats: int, drafts: list[_Draft]) -> tuple[OfferedLoad, ...]:
    """Return the load of each repeat; one for all where the seed changes nothing."""
    longest = {draft.simulation.config.max_model_len: draft.settings for draft in drafts if draft.simulation}
    max_model_len = max(longest, default=_PLENTY_OF_BLOCKS)
    try:
        loads = [
            replace(workload, seed=workload.seed + repeat).offered(
                max_model_len=max_model_len, overlong=drafts[0].settings.overlong
            )
            for repeat in range(num_repeats)
        ]
    except LongerThanContext as error:
        raise what_binds(longest[max_model_len], error) from None
    return (loads[0],) if all(_are_equal(loads[0], load) for load in loads[1:]) else tuple(loads)


def _are_equal(a: OfferedLoad, b: OfferedLoad) -> bool:
    columns = ("arrivals", "num_prompt_tokens", "num_output_tokens", "class_ids")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)


def _context_tokens(draft: _Draft, load: OfferedLoad) -> int:
    """Return the mean context of a decode: the load's, or what a full batch has KV memory for."""
    if draft.simulation is None:
        return mean_decode_context(load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist())
    return decode_context(load, draft.simulation.config.scheduler)
