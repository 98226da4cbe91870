"""Prometheus metrics of a fleet and of its replicas, which the label `engine` tells apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from onbeat.core.fleet import ReplicaView
from onbeat.core.protocols import FleetView
from onbeat.metrics.counts import EngineGauges, RunCounts
from onbeat.metrics.families import counter, counters, gauge, gauges, histogram
from onbeat.metrics.fleet_counts import FleetCounts

STATES = ("starting", "ready", "draining", "down")


def fleet_metrics(fleet: FleetView, fleet_counts: FleetCounts, counts: RunCounts) -> Iterator[Metric]:
    """Yield what the fleet does, and how each replica stands."""
    replicas = fleet.replicas()
    states = Counter(dict.fromkeys(STATES, 0))
    states.update(each.state for each in replicas)
    yield gauges("onbeat_fleet_replicas", "Replicas by state", "state", states)
    yield from _scaling_metrics(fleet, fleet_counts)
    yield gauge("onbeat_fleet_requests_waiting", "Requests that no replica has", fleet.num_waiting)
    yield counters(
        "onbeat_fleet_routed", "Requests sent to a replica", ("engine", "why"), fleet_counts.routed
    )
    failed = fleet_counts.num_failed
    for name, text, value in (
        ("resumed", "Requests that went on elsewhere behind tokens", fleet_counts.num_resumed),
        ("resumed_tokens", "Tokens of theirs that were computed once more", fleet_counts.num_resumed_tokens),
        ("lost", "Requests that ended with an error since their replicas were lost", failed),
    ):
        yield counter(f"onbeat_fleet_{name}", text, value)
    yield counters(
        "onbeat_fleet_moves",
        "Moves of running requests, with their KV, to another replica",
        ("why", "outcome"),
        fleet_counts.moves,
    )
    yield counters(
        "onbeat_fleet_replica_moves",
        "Requests that came to a replica, or left it, with their KV",
        ("engine", "direction"),
        fleet_counts.replica_moves,
    )
    yield counter("onbeat_fleet_moved_bytes", "KV that was copied for them", fleet_counts.num_moved_bytes)
    yield histogram(
        "onbeat_fleet_move_gap_seconds",
        "From the last token before a move to the first one after it",
        fleet_counts.move_gap,
    )
    yield counters("onbeat_fleet_replicas_lost", "Replicas that were lost", "engine", fleet_counts.lost)
    yield histogram(
        "onbeat_fleet_ttft_prediction_error_ratio",
        "Distance of the router's predicted from the actual TTFT, as a share of the actual",
        fleet_counts.ttft_error,
    )
    yield from _replica_metrics(replicas, counts)


def _scaling_metrics(fleet: FleetView, fleet_counts: FleetCounts) -> Iterator[Metric]:
    """Yield what a fleet that changes its own size has decided."""
    scaling = fleet.scaling
    if scaling is None:
        return
    for name, text, value in (
        ("replicas_wanted", "Replicas that the fleet has decided on", scaling.num_wanted),
        ("replicas_min", "Fewest replicas that it may have", scaling.least),
        ("replicas_max", "Most replicas that it may have", scaling.most),
        ("load_share", "Of their time, what the load of the last minute takes", scaling.share),
        ("planned_share", "Up to which a replica is loaded", scaling.planned_share),
    ):
        if value is not None:
            yield gauge(f"onbeat_fleet_{name}", text, value)
    yield counters(
        "onbeat_fleet_rescales",
        "Decisions to have more or fewer replicas",
        ("direction", "why"),
        fleet_counts.rescales,
    )


def _replica_metrics(replicas: Sequence[ReplicaView], counts: RunCounts) -> Iterator[Metric]:
    nothing = EngineGauges()
    rows = [(each, counts.engines.get(each.replica, nothing)) for each in replicas]
    for name, text, values in (
        (
            "outstanding",
            "Requests that it has been sent and has not ended",
            [r.num_outstanding for r, _ in rows],
        ),
        ("streaming", "Of these, those that have had tokens from it", [r.num_streaming for r, _ in rows]),
        ("running", "Requests in its batch, as of its last step", [e.num_running for _, e in rows]),
        ("waiting", "Requests in its queue, as of its last step", [e.num_waiting for _, e in rows]),
        ("kv_blocks_used", "KV cache blocks held by requests", [e.num_used_blocks for _, e in rows]),
        ("kv_blocks", "KV cache blocks in all", [r.limits.num_blocks if r.limits else 0 for r, _ in rows]),
        ("step_seconds_last", "Length of its last step", [e.step_seconds for _, e in rows]),
        (
            "predicted_wait_seconds",
            "Until a prompt with a deadline would be begun",
            [e.predicted_wait for _, e in rows],
        ),
        ("silence_seconds", "Since its last sign of life", [r.silence for r, _ in rows]),
        ("lives", "Times that it got ready", [r.num_lives for r, _ in rows]),
    ):
        names = [each.replica for each in replicas]
        yield gauges(f"onbeat_replica_{name}", text, "engine", dict(zip(names, values, strict=True)))
    yield gauges(
        "onbeat_replica_state",
        "1 for the state that it is in",
        ("engine", "state"),
        {(each.replica, state): float(each.state == state) for each in replicas for state in STATES},
    )
    roles = {(each.replica, each.role): 1.0 for each in replicas if each.role}
    if roles:
        yield gauges("onbeat_replica_role", "1 for what it is for", ("engine", "role"), roles)
    engines = counts.engines.items()
    for name, text, totals in (
        ("steps", "Forward passes", {e: g.num_steps for e, g in engines}),
        (
            "prefix_cache_queries",
            "Prompt tokens looked up in its prefix cache",
            {e: g.num_prefix_queries for e, g in engines},
        ),
        ("prefix_cache_hits", "Of these, tokens found", {e: g.num_prefix_hits for e, g in engines}),
    ):
        yield counters(f"onbeat_replica_{name}", text, "engine", totals)
