"""What is studied: set-ups, workloads, objectives, policies, and the cells that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLO_MODES, SLOMode
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.simulator.setup import ReplicaSettings
from onbeat.workload.slo_classes import SLOClass


# POLICIES.update(VARIANTS)  # wherever a policy is looked up, worker processes included

MAX_NUM_SEQS = 256
LOOSE_FACTOR = 10.0
"""A cell binds only if its objectives cost capacity: it is compared with objectives so many times looser."""

SET_UPS = {
    "mistral": ReplicaSettings(
        model="mistralai/Mistral-7B-v0.3", device="a100-80-sxm", max_num_seqs=MAX_NUM_SEQS
    ),
    "llama": ReplicaSettings(model="meta-llama/Llama-3.1-8B", device="h100-sxm", max_num_seqs=MAX_NUM_SEQS),
}
WORKLOADS = ("poisson", "azure-code", "azure-conv", "mooncake")
MORE_WORKLOADS = ("mooncake-ticks",)
"""Only where they are asked for."""


def _one(ttft: float, tbt: float) -> tuple[SLOClass, ...]:
    return (SLOClass(name="all", slo=SLO(ttft=ttft, tbt=tbt)),)


OBJECTIVES: dict[str, tuple[SLOClass, ...]] = {
    "1s-50ms": _one(1.0, 0.05),
    "1s-100ms": _one(1.0, 0.1),
    "2s-250ms": _one(2.0, 0.25),
    "mix": (
        SLOClass(name="fast", slo=SLO(ttft=0.5, tbt=0.03), share=1 / 3),
        SLOClass(name="usual", slo=SLO(ttft=2.0, tbt=0.1), share=1 / 3),
        SLOClass(name="slow", slo=SLO(ttft=10.0, tbt=0.5), share=1 / 3),
    ),
}

STATIC_POLICIES = (
    "orca",
    "prefill-first",
    "sarathi-256",
    "sarathi-512",
    "sarathi-1024",
    "sarathi-2048",
)
"""Tuned by hand: they look at no objective, so that one run of theirs is scored for all of them."""
BOUND = "bound"
"""Stands among the policies for the rate that none can pass (`planner.fluid_bound`)."""
_BLIND = frozenset({"static", "orca", "prefill-first", "sarathi", "hybrid-only", "chunk-only"})


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One combination that gets a capacity for each policy."""

    set_up: str
    workload: str
    slo: str
    mode: SLOMode

    def __str__(self) -> str:
        return f"{self.set_up} {self.workload} {self.slo} {self.mode}"


def all_cells(
    set_ups: Iterable[str] = (),
    workloads: Iterable[str] = (),
    slos: Iterable[str] = (),
    modes: Iterable[SLOMode] = (),
) -> list[Cell]:
    """Return the cells that a selection leaves; an empty selection takes all."""
    return [
        Cell(*each)
        for each in product(
            tuple(set_ups) or SET_UPS,
            tuple(workloads) or WORKLOADS,
            tuple(slos) or OBJECTIVES,
            tuple(modes) or SLO_MODES,
        )
    ]


def loosened(classes: tuple[SLOClass, ...]) -> tuple[SLOClass, ...]:
    """Return the classes with every objective `LOOSE_FACTOR` times as long."""
    return tuple(
        replace(
            each,
            slo=SLO(ttft=_times(each.slo.ttft), tbt=_times(each.slo.tbt), e2e=_times(each.slo.e2e)),
        )
        for each in classes
    )


def _times(limit: float | None) -> float | None:
    return None if limit is None else limit * LOOSE_FACTOR


def split_policy(name: str) -> tuple[str, int | None]:
    """Return (policy, token budget) of a name such as `sarathi-512`; None is the policy's own budget.

    Raises
    ------
    ConfigError : an unknown policy.
    """
    if name in POLICIES:
        return name, None
    policy, _, budget = name.rpartition("-")
    if policy in POLICIES and budget.isdigit():
        return policy, int(budget)
    raise ConfigError(
        f"unknown policy {name!r}; known are {', '.join(POLICIES)}, each with or without a token budget, "
        "such as sarathi-512"
    )


def is_blind(name: str) -> bool:
    """Whether a policy looks at no objective."""
    return name != BOUND and split_policy(name)[0] in _BLIND


def settings_of(set_up: str, policy: str) -> ReplicaSettings:
    """Return the replica of a set-up under a policy."""
    name, budget = split_policy("sarathi" if policy == BOUND else policy)
    return replace(SET_UPS[set_up], policy=name, max_num_batched_tokens=budget)
