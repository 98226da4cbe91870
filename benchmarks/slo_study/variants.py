"""Variants of the policy that plans with deadlines, for the ablation: each leaves one idea out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from onbeat.scheduler.replica.policies import Policy, make_slo_policy
from onbeat.scheduler.replica.slo.composer import SLOTuning

VARIANTS: dict[str, Callable[[], Policy]] = {
    "slo/mean": partial(make_slo_policy, SLOTuning(quantile=None)),
    "slo/no-skips": partial(make_slo_policy, SLOTuning(skips=False)),
    "slo/no-pace": partial(make_slo_policy, SLOTuning(paces=False)),
    "slo/no-triage": partial(make_slo_policy, SLOTuning(triages=False)),
}
"""Name -> factory; they stand among the policies while the study runs."""
