"""Count what a fleet does with requests: where they go and why, what deaths cost, how predictions fare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from onbeat.core.fleet import FleetView, ReplicaId, ReplicaView, ScalingView
from onbeat.metrics.declare import counter, gauge, histogram, part
from onbeat.metrics.histogram import ERROR_RATIOS, GAP_SECONDS, Histogram

STATES = ("starting", "ready", "draining", "down")


@dataclass(slots=True)
class FleetCounts:
    """What a fleet has done."""

    routed: Counter[tuple[str, ...]] = counter(
        "fleet_routed_total", "requests sent to a replica, and why there", "engine", "why"
    )
    num_resumed: int = counter("fleet_resumed_total", "requests that went on elsewhere behind tokens")
    num_resumed_tokens: int = counter(
        "fleet_resumed_tokens_total", "tokens of theirs that were computed once more"
    )
    num_failed: int = counter(
        "fleet_lost_total", "requests that ended with an error since their replicas were lost"
    )
    lost: Counter[str] = counter("fleet_replicas_lost_total", "times that a replica was lost", "engine")
    rescales: Counter[tuple[str, ...]] = counter(
        "fleet_rescales_total",
        "with `--autoscale`: decisions to have more replicas (`up`) or fewer (`down`), and why",
        *("direction", "why"),
    )
    moves: Counter[tuple[str, ...]] = counter(
        "fleet_moves_total",
        "running requests that were to go elsewhere with their KV: `moved` or `stayed`",
        *("why", "outcome"),
    )
    replica_moves: Counter[tuple[str, ...]] = counter(
        "fleet_replica_moves_total",
        "requests that so came to a replica (`in`), or left it (`out`)",
        *("engine", "direction"),
    )
    num_moved_bytes: int = counter("fleet_moved_bytes_total", "KV that was copied for them")
    move_gap: Histogram = histogram(
        "fleet_move_gap_seconds", "from the last token before a move to the first one after it", GAP_SECONDS
    )
    ttft_error: Histogram = histogram(
        "fleet_ttft_prediction_error_ratio",
        "|predicted - actual| / actual TTFT, of the router's predictions",
        ERROR_RATIOS,
    )

    def count_move(self, source: ReplicaId, destination: ReplicaId, why: str) -> None:
        """Count a request that has moved."""
        self.moves[why, "moved"] += 1
        self.replica_moves[source, "out"] += 1
        self.replica_moves[destination, "in"] += 1

    def count_routed(self, replica: ReplicaId, why: str, *, num_sent_tokens: int) -> None:
        """Count a request that goes to a replica.

        Parameters
        ----------
        num_sent_tokens : output tokens that its client has already.
        """
        self.routed[replica, why] += 1
        if num_sent_tokens:
            self.num_resumed += 1
            self.num_resumed_tokens += num_sent_tokens

    def count_prediction(self, predicted: float, actual: float) -> None:
        """Count a first token; both are seconds since the request was sent to its replica."""
        if actual > 0:
            self.ttft_error.observe(abs(predicted - actual) / actual)


@dataclass(frozen=True, slots=True)
class ReplicaGauges:
    """How one replica stands."""

    num_outstanding: int = gauge("replica_outstanding", "requests sent to it that have not ended")
    num_streaming: int = gauge("replica_streaming", "of these, those that have had tokens from it")
    num_blocks: int = gauge("replica_kv_blocks", "KV blocks in all")
    silence: float | None = gauge("replica_silence_seconds", "since its last sign of life")
    num_lives: int = gauge("replica_lives", "times that it got ready")
    state: Mapping[str, int] = gauge("replica_state", "1 for the state that it is in", "state")
    role: Mapping[str, int] = gauge(
        "replica_role", "with `--disaggregate`: 1 for `prefill` or `decode`", "role"
    )

    @classmethod
    def of(cls, view: ReplicaView) -> ReplicaGauges:
        """Return the gauges of a replica."""
        return cls(
            num_outstanding=view.num_outstanding,
            num_streaming=view.num_streaming,
            num_blocks=view.limits.num_blocks if view.limits else 0,
            silence=view.silence,
            num_lives=view.num_lives,
            state={state: int(view.state == state) for state in STATES},
            role={view.role: 1} if view.role else {},
        )


@dataclass(frozen=True, slots=True)
class ScalingGauges:
    """How a fleet that changes its own size stands."""

    num_wanted: int = gauge(
        "fleet_replicas_wanted", "with `--autoscale`: replicas that the fleet has decided on"
    )
    least: int = gauge("fleet_replicas_min", "fewest replicas that it may have")
    most: int = gauge("fleet_replicas_max", "most replicas that it may have")
    share: float | None = gauge(
        "fleet_load_share", "of the replicas' time, what the last minute's load takes"
    )
    planned_share: float | None = gauge("fleet_planned_share", "up to which a replica is loaded")

    @classmethod
    def of(cls, view: ScalingView) -> ScalingGauges:
        """Return the gauges of such a fleet."""
        return cls(view.num_wanted, view.least, view.most, view.share, view.planned_share)


@dataclass(frozen=True, slots=True)
class FleetGauges:
    """How a fleet stands."""

    num_waiting: int = gauge("fleet_requests_waiting", "requests that no replica has")
    states: Mapping[str, int] = gauge("fleet_replicas", "replicas by state", "state")
    scaling: ScalingGauges | None = part(ScalingGauges)
    replicas: Mapping[ReplicaId, ReplicaGauges] = part(ReplicaGauges, "engine")

    @classmethod
    def of(cls, fleet: FleetView) -> FleetGauges:
        """Return the gauges of a fleet."""
        replicas = fleet.replicas()
        states = Counter(dict.fromkeys(STATES, 0))
        states.update(each.state for each in replicas)
        own = fleet.scaling
        return cls(
            num_waiting=fleet.num_waiting,
            states=states,
            scaling=ScalingGauges.of(own) if own else None,
            replicas={each.replica: ReplicaGauges.of(each) for each in replicas},
        )
