"""Both replicas of a request chosen at its arrival (Patel et al., "Splitwise", ISCA 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from onbeat.scheduler.cluster.membership import Replica, ReplicaState, RoutedRequest
from onbeat.scheduler.cluster.migration import PoolPolicy
from onbeat.scheduler.cluster.moves import Course, Stage

MOST_QUEUED_TOKENS = 8192
"""In a queue of prompts that has not only this one. The paper speaks of a threshold; this is that of its
authors' simulator (Mutinifni/splitwise-sim)."""

COPIED_AHEAD = Course(
    first=Stage.PROMPT,
    next={
        # Capacity is asked for once there is something to copy: it is no use to a prompt that waits its turn.
        Stage.PROMPT: (Stage.RESERVE, Stage.RESERVE, Stage.RESERVE),
        Stage.RESERVE: (None, Stage.COPY, Stage.LEND),
        Stage.COPY: (None, None, Stage.LEND),
        Stage.LEND: (Stage.RESERVE_MORE, Stage.COPY, Stage.LEND),
        Stage.RESERVE_MORE: (None, Stage.COPY, Stage.LEND),
    },
    on_first_token={Stage.PROMPT: Stage.RESERVE, Stage.LEND: Stage.FREEZE},
    unlimited=frozenset((Stage.PROMPT, Stage.LEND)),  # it may have to wait for its turn
)
"""The stages of a move that begins as its request is sent: what each chunk of the prompt has filled is copied
while the next one is computed, and what is left once it has its first token (section 4.3)."""


class Splitwise(PoolPolicy):
    """Sends a prompt to the shortest queue, and copies its KV to where it will generate as it is computed.

    What one pool has no capacity for goes to replicas of the other, which are mixed until that has ended
    (section 4).
    """

    def prompt_replicas(
        self, open_request: RoutedRequest, prefill: Sequence[Replica], decode: Sequence[Replica]
    ) -> Sequence[Replica]:
        """Return where a prompt waits least: in its pool, then on a mixed replica, then on any other."""
        mixed = [each for each in (*prefill, *decode) if self._is_mixed(each)]
        orders = {each.order for each in mixed}
        for pool in ([each for each in prefill if each.order not in orders], mixed):
            shortest = min(pool, key=_queue, default=None)
            if shortest is not None and _takes_one_more(shortest, open_request.num_tokens):
                return [shortest]
        others = [each for each in decode if each.order not in orders]
        return [min(others or (*prefill, *decode), key=_queue)]

    def stream_replica(self, open_request: RoutedRequest, source: Replica) -> Replica | None:
        """Return where a stream finds the most capacity: its pool, a mixed replica, or one for prompts."""
        pools: tuple[list[Replica], ...] = [], [], []
        for each in self._members.having(ReplicaState.READY):
            if each.limits.moves_streams:
                is_prefill = self._members.is_prefill(each.replica_id)
                pools[1 if self._is_mixed(each) else 2 * is_prefill].append(each)
        migration = self._migration
        for pool in pools:
            fitting = [each for each in pool if migration.fits(open_request, each, most_coming=inf)]
            if fitting:
                # Of equal ones it stays where its prompt is: nothing is copied then.
                return max(
                    fitting,
                    key=lambda each: (migration.freeness(open_request, each), each is source, -each.order),
                )
        return None

    def on_sent(self, open_request: RoutedRequest, source: Replica, destination: Replica, now: float) -> None:
        """Begin to copy a prompt to where its stream will go on."""
        self._migration.begin(open_request, source, destination, "prefill", now, course=COPIED_AHEAD)

    def _is_mixed(self, replica: Replica) -> bool:
        """Return whether a replica has work of the other pool: prompts in its queue, or streams that stay.

        Its reports would not do: they count streams that are about to leave.
        """
        if not self._members.is_prefill(replica.replica_id):
            return replica.num_queued_tokens > 0
        return replica.num_streams > self._migration.moves.num_from(replica.replica_id)


def _queue(replica: Replica) -> tuple[int, int]:
    return replica.num_queued_tokens, replica.order


def _takes_one_more(replica: Replica, num_tokens: int) -> bool:
    num_queued = replica.num_queued_tokens
    return not num_queued or num_queued + num_tokens <= MOST_QUEUED_TOKENS
