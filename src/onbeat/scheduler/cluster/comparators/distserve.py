"""Every prompt on a prefill replica, where its KV waits for room (Zhong et al., "DistServe", OSDI 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onbeat.scheduler.cluster.membership import Membership, OpenRequest, Replica
from onbeat.scheduler.cluster.move_rules import MOST_STOPPED, Mover
from onbeat.scheduler.cluster.move_stages import STANDS_STILL, Move
from onbeat.scheduler.cluster.pools import PoolPolicy, Pools

WAITS_FOR_ROOM = replace(STANDS_STILL, waits_for_room=True)
"""The stages of a move whose request stands still until a replica has room."""


class DistServe(PoolPolicy):
    """Keeps streams that no replica has room for where their prompts were computed (section 4.3).

    They stand still, in the order of their first tokens, so that bursts hold up prompts and not streams.
    """

    least_left = 0

    def __init__(self, mover: Mover, members: Membership, pools: Pools) -> None:
        super().__init__(mover, members, pools)
        self._waiting: dict[str, tuple[OpenRequest, Move | None]] = {}
        """By request, in the order of their first tokens; with their moves, where one has been begun."""
        self._may_have_room = False
        """Whether a replica may have room since these were last looked at."""

    def prompt_replicas(
        self,
        opened: OpenRequest,  # noqa: ARG002 (they are all sent there)
        prefill: Sequence[Replica],
        decode: Sequence[Replica],  # noqa: ARG002
    ) -> Sequence[Replica]:
        """Return those that compute prompts."""
        return prefill

    def on_first_token(self, opened: OpenRequest, source: Replica, now: float) -> None:  # noqa: ARG002
        """Let a request wait behind those that came before it."""
        self._waiting[opened.request.request_id] = opened, None
        self._may_have_room = True

    def on_no_room(self, opened: OpenRequest, move: Move) -> None:
        """Let a request wait before all others: it was the first of them."""
        self._waiting = {move.request_id: (opened, move), **self._waiting}

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request stands still until a replica has room."""
        return request_id in self._waiting

    def on_end(self, request_id: str) -> None:
        """Hear that a request has left its replica."""
        self._waiting.pop(request_id, None)

    def on_change(self) -> None:
        """Hear that a replica may have more room than before, or that none ever will."""
        self._may_have_room = True

    def advance(self, now: float, *, is_time: bool) -> None:
        """Move those that wait, the first first, until there is no room for one."""
        if not self._waiting or not (self._may_have_room or is_time):
            return
        self._may_have_room = False
        mover = self._mover
        for request_id, (opened, move) in list(self._waiting.items()):
            assert opened.replica is not None
            source = self._members.replicas[opened.replica]
            destination = mover.destination(opened, source, most_coming=MOST_STOPPED)
            if destination is None and mover.may_ever_move(opened, source):
                return
            del self._waiting[request_id]
            if move is not None:
                mover.try_again(move, opened, destination, now)
            elif destination is not None:
                mover.begin(opened, source, destination, "prefill", now, course=WAITS_FOR_ROOM)
            else:
                mover.put_back(opened, source, now)
