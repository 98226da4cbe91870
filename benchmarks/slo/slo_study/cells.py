"""What is studied: set-ups, objectives, policies, and the cells that they make with workloads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from onbeat.core.errors import ConfigError
from onbeat.core.options import change, make
from onbeat.core.slo import SLO, SLO_MODES, SLOMode
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.simulator.deployment import Deployment
from onbeat.workload.slo_classes import SLOClass


def _set_up(model: str, device: str, **others: int) -> Deployment:
    set_up = {"max_num_seqs": 256, "max_queue_seconds": 0.0, **others}
    return make(Deployment, model=model, device=device, **set_up)


SET_UPS = {
    "mistral": _set_up("mistralai/Mistral-7B-v0.3", "a100-80-sxm"),
    "llama": _set_up("meta-llama/Llama-3.1-8B", "h100-sxm"),
    "70b-4xa100": _set_up("meta-llama/Llama-3.1-70B", "a100-80-sxm", tensor_parallel=4),
    "70b-8xh100": _set_up("meta-llama/Llama-3.1-70B", "h100-sxm", tensor_parallel=8),
    "7b-l4": _set_up("Qwen/Qwen2.5-7B", "l4"),
    "3b-a10g": _set_up("Qwen/Qwen2.5-3B", "a10g"),
    "32b-h200": _set_up("Qwen/Qwen2.5-32B", "h200"),
    "moe-h100": _set_up("Qwen/Qwen3-30B-A3B", "h100-sxm"),
    # 48,000 tokens of KV cache, 190 a slot: requests are preempted.
    "little-memory": _set_up("mistralai/Mistral-7B-v0.3", "a100-80-sxm", num_blocks=3000),
    "1024-slots": _set_up("meta-llama/Llama-3.1-8B", "h100-sxm", max_num_seqs=1024),
    "32-slots": _set_up("mistralai/Mistral-7B-v0.3", "a100-80-sxm", max_num_seqs=32),
    # Nobody says how long answers are.
    "undeclared": _set_up("mistralai/Mistral-7B-v0.3", "a100-80-sxm", declared_max_tokens=4096),
}


def _one(ttft: float, tbt: float | None = None) -> tuple[SLOClass, ...]:
    return (SLOClass(name="all", slo=SLO(ttft=ttft, tbt=tbt)),)


def _thirds(**slos: SLO) -> tuple[SLOClass, ...]:
    return tuple(SLOClass(name=name, slo=slo, share=1 / 3) for name, slo in slos.items())


OBJECTIVES: dict[str, tuple[SLOClass, ...]] = {
    "1s-50ms": _one(1.0, 0.05),
    "1s-100ms": _one(1.0, 0.1),
    "2s-250ms": _one(2.0, 0.25),
    "mix": _thirds(fast=SLO(ttft=0.5, tbt=0.03), usual=SLO(ttft=2, tbt=0.1), slow=SLO(ttft=10, tbt=0.5)),
    "tight-mix": _thirds(
        fast=SLO(ttft=0.5, tbt=0.03), usual=SLO(ttft=1, tbt=0.04), slow=SLO(ttft=2, tbt=0.05)
    ),
    "5s-50ms": _one(5.0, 0.05),
    "500ms-100ms": _one(0.5, 0.1),
    "10s-30ms": _one(10.0, 0.03),
    "2s": _one(2.0),
    "20s-e2e": (SLOClass(name="all", slo=SLO(e2e=20.0)),),
    "e2e-mix": _thirds(fast=SLO(ttft=1.0, tbt=0.1), answers=SLO(e2e=30.0), slow=SLO(ttft=10.0, e2e=120.0)),
}
MIXES = ("mix", "tight-mix", "e2e-mix")
WITHOUT_MODES = ("2s", "20s-e2e")
"""Without a TBT objective both modes are one."""

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
FAMILIES = {
    "static": tuple(f"sarathi-{budget}" for budget in BUDGETS),
    "static+triage": tuple(f"sarathi-triage-{budget}" for budget in BUDGETS),
    "edf+triage": tuple(f"edf-triage-{budget}" for budget in BUDGETS),
}
"""Policies that count by the best of them in each cell."""
SUBJECT, SIMPLE, STATIC = "slo", "simple", "static"
STUDIED = (STATIC, SUBJECT, SIMPLE, "static+triage", "niyama", "edf+triage")
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

    @property
    def group(self) -> tuple[str, str]:
        """What runs of policies that look at no objective are shared by."""
        return self.set_up, self.workload


OLD_CELLS = tuple(
    Cell(*each)
    for each in product(
        ("mistral", "llama"),
        ("poisson", "azure-code", "azure-conv", "mooncake"),
        ("1s-50ms", "1s-100ms", "2s-250ms", "mix"),
        SLO_MODES,
    )
)
_NEW = {
    ("70b-4xa100", "poisson"): ("1s-100ms", "5s-50ms"),
    ("70b-4xa100", "bimodal"): ("500ms-100ms", "mix"),
    ("70b-8xh100", "documents"): ("10s-30ms", "5s-50ms", "2s"),
    ("7b-l4", "chat"): ("500ms-100ms", "1s-100ms", "2s-250ms"),
    ("7b-l4", "sharegpt"): ("2s-250ms", "e2e-mix"),
    ("3b-a10g", "bimodal"): ("1s-100ms", "mix"),
    ("3b-a10g", "arxiv"): ("2s-250ms", "2s"),
    ("32b-h200", "sharegpt"): ("5s-50ms", "e2e-mix"),
    ("32b-h200", "long-outputs"): ("1s-50ms", "10s-30ms"),
    ("moe-h100", "poisson"): ("1s-50ms", "mix"),
    ("moe-h100", "documents"): ("2s-250ms", "5s-50ms"),
    ("little-memory", "sharegpt"): ("1s-100ms", "5s-50ms", "e2e-mix"),
    ("little-memory", "long-outputs"): ("1s-100ms",),
    ("1024-slots", "long-outputs"): ("1s-50ms", "2s-250ms"),
    ("32-slots", "poisson"): ("1s-100ms", "mix"),
    ("32-slots", "sharegpt"): ("2s-250ms",),
    ("undeclared", "mixed-answers"): ("20s-e2e",),
}
NEW_CELLS = tuple(
    Cell(*group, slo, mode)
    for group, slos in _NEW.items()
    for slo in slos
    for mode in (("stream",) if slo in WITHOUT_MODES else SLO_MODES)
)
CELLS = OLD_CELLS + NEW_CELLS


def select_cells(
    set_ups: Iterable[str], workloads: Iterable[str], slos: Iterable[str], modes: Iterable[str]
) -> list[Cell]:
    """Return the cells that a selection leaves; an empty selection takes all."""
    wanted = [frozenset(each) for each in (set_ups, workloads, slos, modes)]
    found = [
        cell
        for cell in CELLS
        if all(
            not names or name in names
            for names, name in zip(wanted, (cell.set_up, cell.workload, cell.slo, cell.mode), strict=True)
        )
    ]
    if not found:
        raise ConfigError("no cell of the study is left by this selection; give fewer conditions")
    return found


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
        f"such as sarathi-512; and families of them: {', '.join(FAMILIES)}"
    )


def members(name: str) -> tuple[str, ...]:
    """Return the policies of a family; of a policy itself."""
    names = FAMILIES.get(name, (name,))
    for each in names:
        split_policy(each)
    return names


def fits(set_up: str, name: str) -> bool:
    """Return whether a set-up takes a policy: each of its slots needs a token of a step's budget."""
    budget = split_policy(name)[1]
    return budget is None or budget >= SET_UPS[set_up].limits.max_num_seqs


def is_blind(name: str) -> bool:
    """Whether a policy looks at no objective, so that one run of it is scored for all of them."""
    return split_policy(name)[0] in _BLIND


def settings_of(set_up: str, policy: str) -> Deployment:
    """Return the replica of a set-up under a policy."""
    name, budget = split_policy(policy)
    return change(SET_UPS[set_up], policy=name, max_num_batched_tokens=budget)
