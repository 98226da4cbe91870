"""Prometheus names for objectives, and for what the policy does to keep them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from onbeat.metrics.breakdown import by_prompt_decile, worst_decile
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.families import counter, counters, gauge, gauges, histogram, histograms
from onbeat.metrics.policy_counts import LoadEstimate, PolicyCounts
from onbeat.metrics.slo_counts import WINDOW_SECONDS, SLOCounts, objectives_by_class


def slo_metrics(counts: RunCounts, now: float, *, uptime: float) -> Iterator[Metric]:
    """Yield the metrics of objectives, refusals and plans.

    Parameters
    ----------
    now : seconds, on the clock of steps and requests.
    uptime : seconds that have been counted.
    """
    yield from _classes(counts.slo)
    yield from _recent(counts.slo, now, window=min(uptime, WINDOW_SECONDS))
    yield from _worst_decile(counts.slo, now)
    yield counters(
        "onbeat_requests_rejected",
        "Requests refused at arrival or ended in the queue",
        "reason",
        counts.refused,
    )
    yield gauge(
        "onbeat_requests_best_effort", "Open requests served from what is left over", counts.num_best_effort
    )
    yield from _policy(counts.policy)
    load = counts.policy.load(num_open=counts.num_open)
    if load is not None:
        yield from _load(load)


def _classes(counts: SLOCounts) -> Iterator[Metric]:
    classes = counts.classes.items()
    yield counters(
        "onbeat_slo_requests",
        "Ended requests with objectives, by what became of them",
        ("slo_class", "outcome"),
        {(name, outcome): number for name, own in classes for outcome, number in own.outcomes.items()},
    )
    yield gauges(
        "onbeat_slo_objective_seconds",
        "Objectives of the latest request of a class",
        ("slo_class", "objective"),
        objectives_by_class(counts),
    )
    yield histograms(
        "onbeat_slo_time_to_first_token_seconds",
        "Arrival to first delivery of requests with objectives",
        "slo_class",
        {name: own.ttft for name, own in classes},
    )
    yield histograms(
        "onbeat_slo_time_between_tokens_seconds",
        "Gap between two deliveries of a request with objectives",
        "slo_class",
        {name: own.gap for name, own in classes},
    )


def _recent(counts: SLOCounts, now: float, *, window: float) -> Iterator[Metric]:
    recent = {name: own.judged_and_good(now) for name, own in counts.classes.items()}
    yield gauges(
        "onbeat_slo_attainment",
        "Share of the requests ended in the last minute that were good",
        "slo_class",
        {name: good / judged if judged else None for name, (judged, good) in recent.items()},
    )
    yield gauges(
        "onbeat_goodput_requests_per_second",
        "Good requests per second of the last minute",
        "slo_class",
        {name: good / window if window > 0 else None for name, (_, good) in recent.items()},
    )


def _worst_decile(counts: SLOCounts, now: float) -> Iterator[Metric]:
    outcomes = counts.recent(now)
    if outcomes.waits.size:
        yield gauge(
            "onbeat_slo_longest_wait_seconds",
            "Longest wait for a first token, or in vain, of the requests ended in the last minute",
            float(outcomes.waits.max()),
        )
    worst = worst_decile(by_prompt_decile(outcomes))
    if worst is None:
        return
    yield gauge(
        "onbeat_slo_attainment_worst_decile",
        "Share of good requests in the decile of prompt lengths where it is least, of the last minute",
        worst.attainment,
    )
    yield gauges(
        "onbeat_slo_worst_decile_prompt_tokens",
        "Shortest and longest prompt of that decile",
        "bound",
        {"min": worst.min_prompt_tokens, "max": worst.max_prompt_tokens},
    )


def _policy(counts: PolicyCounts) -> Iterator[Metric]:
    yield counter("onbeat_chunk_tokens", "Prompt tokens that steps have computed", counts.num_chunk_tokens)
    yield histogram("onbeat_step_budget_seconds", "Time that the policy allowed a step", counts.budget)
    yield counter(
        "onbeat_steps_over_budget", "Steps that took longer than their budget", counts.num_over_budget
    )
    yield histogram(
        "onbeat_decode_slack_seconds",
        "Time to the next deadline of each running stream, at each step; below 0 is late",
        counts.slack,
    )
    state = counts.state
    if state is not None:
        yield counter("onbeat_requests_relegated", "Requests turned into best effort", state.num_relegated)
        yield counter(
            "onbeat_requests_lost",
            "Running requests that could no longer keep their objectives",
            state.num_missed,
        )


def _load(load: LoadEstimate) -> Iterator[Metric]:
    for name, text, value in (
        ("predicted_wait_seconds", "Time until a prompt that came now would be begun", load.predicted_wait),
        (
            "predicted_queue_seconds",
            "Time until a prompt that came now and could not be in time would be begun",
            load.queue_seconds,
        ),
    ):
        yield gauge(f"onbeat_{name}", text, value)
