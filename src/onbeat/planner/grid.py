"""A grid of configurations over some of the settings of a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.options import change
from onbeat.core.slo import DEFAULT_SHED_ORDER
from onbeat.planner.cases import BuiltCase, Labels
from onbeat.scheduler.replica.policies import composition
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCase:
    """A configuration named as the command line names it.

    Parameters
    ----------
    tbt, context_tokens : of an automatic token budget (`resolve`).
    """

    settings: Deployment
    labels: Labels = ()
    tbt: float | None = None
    context_tokens: int | None = None

    def build(self) -> BuiltCase:
        simulation = resolve(self.settings, tbt=self.tbt, context_tokens=self.context_tokens)
        return BuiltCase(simulation.config, simulation.step_time, simulation.num_devices)


def settings_grid(base: Deployment, axes: Mapping[str, Sequence[Any]]) -> list[tuple[Labels, Deployment]]:
    """Return every combination of some settings, in the order of the axes, the last one fastest.

    A token budget is for chunked prompts, an order of shedding for the policy that sheds by it: where
    policies vary, those without such a choice take their own default instead, once.

    Parameters
    ----------
    base : the settings that stay.
    axes : setting of `Deployment` or its limits -> its values, at least one each.

    Raises
    ------
    ConfigError : a setting that there is none of, or an axis without values.
    """
    for name, values in axes.items():
        if not values:
            raise ConfigError(f"the axis {name} has no values; give at least one")
    cases: dict[Labels, Deployment] = {}
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        unused = _choices_without(chosen["policy"]) if len(axes.get("policy", ())) > 1 else {}
        labels = tuple(
            (name, str(value)) for name, value in chosen.items() if name not in unused and value is not None
        )
        cases[labels] = change(base, **(chosen | unused))
    return list(cases.items())


def _choices_without(name: str) -> dict[str, Any]:
    """Return the settings that a policy has no use for, with their defaults."""
    policy = composition(name)
    unused: dict[str, Any] = {}
    if policy.whole_prompts:
        unused["max_num_batched_tokens"] = None
    if not policy.predicts_waits:
        unused["shed_order"] = DEFAULT_SHED_ORDER
    return unused
