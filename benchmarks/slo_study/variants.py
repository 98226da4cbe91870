"""Variants of the policy that plans with deadlines, for the ablation: each leaves one idea out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from onbeat.scheduler.replica.policies import Policy, make_slo_policy
from onbeat.scheduler.replica.slo.tuning import SLOTuning

VARIANTS: dict[str, Callable[[], Policy]] = {
    "slo/mean": partial(make_slo_policy, SLOTuning(quantile=None, gap_quantile=None)),
    "slo/no-skips": partial(make_slo_policy, SLOTuning(skips=False)),
    "slo/no-look-ahead": partial(make_slo_policy, SLOTuning(looks_ahead=False)),
    "slo/no-pace": partial(make_slo_policy, SLOTuning(paces=False)),
    "slo/no-triage": partial(make_slo_policy, SLOTuning(triages=False)),
    "slo/no-long-steps": partial(make_slo_policy, SLOTuning(reach=0.0)),
    "slo/no-margin": partial(make_slo_policy, SLOTuning(step_margin=0.0)),
    # Requests declare their exact length, so `max_tokens` is an oracle; a low quantile foresees nothing.
    "slo/lengths-oracle": partial(make_slo_policy, SLOTuning(length_quantile=None)),
    "slo/lengths-none": partial(make_slo_policy, SLOTuning(length_quantile=0.01)),
}
"""Name -> factory; they stand among the policies while the study runs."""
