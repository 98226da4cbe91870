"""Count what a fleet does with requests: where they go and why, what deaths cost, how predictions fare."""

from __future__ import annotations

from collections import Counter

from onbeat.core.fleet import ReplicaId
from onbeat.metrics.buckets import ERROR_RATIOS, GAP_SECONDS
from onbeat.metrics.histogram import Histogram


class FleetCounts:
    """Plain numbers; `metrics.exporter_fleet` gives them names."""

    def __init__(self) -> None:
        self.routed: Counter[tuple[str, ...]] = Counter()
        """(replica, why) -> requests sent there."""
        self.num_resumed = 0
        """Requests that went on elsewhere after they had had tokens."""
        self.num_resumed_tokens = 0
        """Tokens that they had had, which another replica computed again."""
        self.num_failed = 0
        """Requests that ended with an error since their replicas were lost."""
        self.lost: Counter[str] = Counter()
        """Replica -> times that it was lost."""
        self.rescales: Counter[tuple[str, ...]] = Counter()
        """(`up` or `down`, why) -> times that the fleet decided to have more or fewer replicas."""
        self.moves: Counter[tuple[str, ...]] = Counter()
        """(why, `moved` or `stayed`) -> requests that were to go on elsewhere with their KV; those that
        stayed ended first, or it failed."""
        self.replica_moves: Counter[tuple[str, ...]] = Counter()
        """(replica, `in` or `out`) -> requests that came or went on elsewhere, with their KV."""
        self.num_moved_bytes = 0
        """KV that was copied."""
        self.move_gap = Histogram(GAP_SECONDS)
        """Seconds from the last token before a move to the first one after it."""
        self.ttft_error = Histogram(ERROR_RATIOS)
        """|predicted - actual| / actual TTFT, of the router's predictions."""

    @property
    def num_moved(self) -> int:
        """Requests that went on elsewhere with their KV."""
        return sum(count for (_, outcome), count in self.moves.items() if outcome == "moved")

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
