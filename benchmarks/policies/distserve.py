"""Every prompt on a prefill replica, where its KV waits (Zhong et al., "DistServe", OSDI 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onbeat.scheduler.cluster.membership import Replica, RoutedRequest
from onbeat.scheduler.cluster.migration import (
    MOST_STOPPED,
    Migration,
    PoolPolicy,
    could_take,
    num_blocks_of,
)
from onbeat.scheduler.cluster.moves import STANDS_STILL, Move

WAITS_FOR_CAPACITY = replace(STANDS_STILL, waits_for_capacity=True)
"""The stages of a move whose request stands still until a replica has capacity."""


class DistServe(PoolPolicy):
    """Keeps streams that no replica has capacity for where their prompts were computed (section 4.3).

    They stand still, in the order of their first tokens, so that bursts hold up prompts and not streams.
    """

    def __init__(self, migration: Migration) -> None:
        super().__init__(migration)
        self._waiting = migration.waiting
        migration.least_left = 0
        self._may_have_capacity = False
        """Whether a replica may have capacity since those that wait were last looked at."""

    def prompt_replicas(
        self,
        open_request: RoutedRequest,  # noqa: ARG002 (they are all sent there)
        prefill: Sequence[Replica],
        decode: Sequence[Replica],  # noqa: ARG002
    ) -> Sequence[Replica]:
        """Return those that compute prompts."""
        return prefill

    def on_first_token(self, open_request: RoutedRequest, source: Replica, now: float) -> None:  # noqa: ARG002
        """Let a request wait behind those that came before it."""
        self._waiting[open_request.request.request_id] = open_request, None
        self._may_have_capacity = True

    def on_no_capacity(self, open_request: RoutedRequest, move: Move) -> None:
        """Let a request wait before all others: it was the first of them."""
        others = dict(self._waiting)
        self._waiting.clear()
        self._waiting.update({move.request_id: (open_request, move), **others})

    def on_change(self) -> None:
        """Hear that a replica may have more capacity than before, or that none ever will."""
        self._may_have_capacity = True

    def advance(self, now: float, *, is_time: bool) -> None:
        """Move those that wait, the first first, until there is no capacity for one."""
        if not self._waiting or not (self._may_have_capacity or is_time):
            return
        self._may_have_capacity = False
        migration = self._migration
        for request_id, (open_request, move) in list(self._waiting.items()):
            assert open_request.replica is not None
            source = self._members.replicas[open_request.replica]
            destination = migration.destination(open_request, source, most_coming=MOST_STOPPED)
            if destination is None and any(
                could_take(open_request, each) for each in migration.candidates(source)
            ):
                return
            del self._waiting[request_id]
            if destination is None and move is None:
                migration.put_back(open_request, source, now)
            elif destination is None:
                assert move is not None
                migration.moves.stay(move)
            elif move is None:
                migration.begin(open_request, source, destination, "prefill", now, course=WAITS_FOR_CAPACITY)
            else:
                num_blocks = num_blocks_of(open_request, destination)
                migration.moves.try_again(move, destination.replica_id, num_blocks=num_blocks, now=now)
