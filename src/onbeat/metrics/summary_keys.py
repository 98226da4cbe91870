"""The keys under which the summary of a run is saved: those of `vllm bench serve`, where it has them."""

from __future__ import annotations

from typing import Any

from onbeat.core.slo import SLO
from onbeat.metrics.breakdown import Breakdown, GroupOutcome, TenantOutcome
from onbeat.metrics.distribution import Distribution
from onbeat.metrics.summary import ClassSummary, Counts, GroupSummary, RunSummary, Score

SCHEMA_VERSION = 1
"""Of these keys."""


def run_keys(summary: RunSummary) -> dict[str, Any]:
    """Return a whole run as it is saved."""
    return (
        {"schema_version": SCHEMA_VERSION, "duration": summary.counts.duration}
        | _count_keys(summary.counts)
        | {
            "request_goodput": summary.score.request_goodput,
            "max_output_tokens_per_s": summary.max_output_tokens_per_s,
            "max_concurrent_requests": summary.max_concurrent_requests,
        }
        | _score_keys(summary.score)
        | {"classes": {name: class_keys(own) for name, own in summary.classes.items()}}
        | _breakdown_keys(summary.breakdown)
        | _latency_keys(summary)
    )


def class_keys(summary: ClassSummary) -> dict[str, Any]:
    """Return one class of objectives as it is saved."""
    return (
        _count_keys(summary.counts)
        | _score_keys(summary.score)
        | ({} if summary.objectives is None else _objective_keys(summary.objectives))
        | _latency_keys(summary)
    )


def distribution_keys(distribution: Distribution, name: str) -> dict[str, float | None]:
    """Return the statistics of a metric as they are saved: `mean_ttft_ms`, `p99_ttft_ms`.

    Parameters
    ----------
    name : of the metric, in the keys.
    """
    return {f"{statistic}_{name}_ms": value for statistic, value in distribution.statistics_ms.items()}


def _latency_keys(summary: GroupSummary) -> dict[str, float | None]:
    keys: dict[str, float | None] = {}
    for metric, distribution in summary.latencies.items():
        keys |= distribution_keys(distribution, metric)
    return keys


def _count_keys(counts: Counts) -> dict[str, Any]:
    return {
        "offered": counts.num_offered,
        "completed": counts.num_completed,
        "failed": counts.num_failed,
        "rejected": counts.num_rejected,
        "total_input_tokens": counts.num_prompt_tokens,
        "total_output_tokens": counts.num_output_tokens,
        "request_throughput": counts.request_throughput,
        "output_throughput": counts.output_throughput,
        "total_token_throughput": counts.total_token_throughput,
    }


def _score_keys(score: Score) -> dict[str, Any]:
    keys: dict[str, Any] = {"attainment": score.attainment, "goodput": score.goodput}
    if score.num_good is not None:
        keys |= {
            "good": score.num_good,
            "offered_with_slo": score.own.num_offered,
            "slo_mode": score.slo_mode,
        }
    if score.request_goodput is not None:
        keys["request_goodput"] = score.request_goodput
    return keys


def _objective_keys(objectives: SLO) -> dict[str, float | None]:
    limits = {"ttft": objectives.ttft, "tbt": objectives.tbt, "e2e": objectives.e2e}
    return {f"slo_{name}_ms": milliseconds(limit) for name, limit in limits.items()}


def _breakdown_keys(breakdown: Breakdown) -> dict[str, Any]:
    worst = breakdown.worst_decile
    return {
        "attainment_by_prompt_decile": [_outcome_keys(decile) for decile in breakdown.deciles],
        "attainment_by_tenant": [_tenant_keys(tenant) for tenant in breakdown.tenants],
        "worst_decile": None if worst is None else _outcome_keys(worst),
    }


def _outcome_keys(own: GroupOutcome) -> dict[str, Any]:
    return {
        "min_prompt_tokens": own.min_prompt_tokens,
        "max_prompt_tokens": own.max_prompt_tokens,
        "offered": own.num_offered,
        "good": own.num_good,
        "attainment": own.attainment,
        "longest_wait_ms": own.longest_wait * 1e3,
        "median_ttft_ms": milliseconds(own.median_ttft),
    }


def _tenant_keys(own: TenantOutcome) -> dict[str, Any]:
    return {"tenant": own.tenant, "num_tenants": own.num_tenants, **_outcome_keys(own.outcome)}


def milliseconds(seconds: float | None) -> float | None:
    """Return a time as it is saved; None stays None."""
    return None if seconds is None else seconds * 1e3
