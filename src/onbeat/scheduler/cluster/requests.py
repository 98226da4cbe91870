"""The requests of a fleet: which replica has each, which of them wait, and how they are sent or refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf

from onbeat.scheduler.cluster.events import Refuse, Send, Withdraw
from onbeat.scheduler.cluster.membership import (
    Membership,
    Replica,
    ReplicaState,
    RoutedRequest,
    deadline,
    least,
)
from onbeat.scheduler.cluster.migration import Migration
from onbeat.scheduler.cluster.routing import RoutingChoice
from onbeat.scheduler.cluster.scaling_policy import ScalingPolicy
from onbeat.scheduler.replica.admission import SHORTEST_RETRY

_MOST_TRIES = 2
"""Replicas that a new request is sent to before it is refused for their load."""
_REFUSED_AGAIN = 0.5
"""Seconds after which a request that has had tokens is sent again, where all have refused it."""


class Requests:
    """Those that have not ended.

    Parameters
    ----------
    watcher : hears what becomes of them.

    Attributes
    ----------
    waiting : those that are with no replica, in the order in which they came to wait.
    migration : moves them.
    left : replicas from which a request has been moved, until the fleet has looked at them.
    start_seconds : that the last start of a replica has taken; None where none is known.
    """

    def __init__(self, members: Membership, watcher: ScalingPolicy) -> None:
        self.waiting: dict[str, RoutedRequest] = {}
        self.left: list[Replica] = []
        self.start_seconds: float | None = None
        self._members, self._router = members, members.router
        self._watcher = watcher
        self._scales = bool(members.rules.autoscale)
        """A request that would rather be refused than late is then, where it would wait for a start."""
        wait = members.rules.max_wait_seconds
        self._max_wait = inf if wait is None else wait
        self.migration = Migration(members, on_moved=self.move, resend=self.send_elsewhere)

    @property
    def next_time(self) -> float:
        """When one is to be sent again that all have refused, or has waited for too long; or infinity."""
        return min((each.waits_until for each in self.waiting.values()), default=inf)

    def send_due(self, now: float) -> None:
        """Send those again that all have refused, once it is time, and refuse who has waited for too long."""
        due = [each for each in self.waiting.values() if each.waits_until <= now]
        late = [each for each in due if not each.refused_by]
        self._send_again([each for each in due if each.refused_by], now)
        for open_request in late:
            del self.waiting[open_request.request.request_id]
            self.refuse(open_request, "no_replica", now, self._seconds_to_start(now))

    def release(self, open_request: RoutedRequest, replica: Replica) -> None:
        """Let a replica no longer own a request."""
        request = open_request.request
        self.migration.on_end(request.request_id)
        del replica.open[request.request_id]
        open_request.replica = None
        if not open_request.has_started:
            self._router.on_first_token(replica.number, request)
        self._router.on_finish(replica.number, request)

    def send(
        self,
        open_request: RoutedRequest,
        now: float,
        *,
        why: str = "",
        may_wait: bool = True,
        to: Replica | None = None,
    ) -> None:
        """Send a request that nobody owns to a replica; let it wait, or refuse it, where none takes it.

        Parameters
        ----------
        to : the only one that it may go to, a ready one that takes its length; None lets the router choose.
        """
        if open_request.num_output_tokens != open_request.request.num_output_tokens:
            open_request.request = replace(
                open_request.request, num_output_tokens=open_request.num_output_tokens
            )
        request = open_request.request
        may_try = len(open_request.refused_by) < _MOST_TRIES or open_request.is_kept
        choice = self._route(open_request, now, to) if may_try else None
        if choice is None:
            self._wait_or_refuse(open_request, now, may_wait=may_wait)
            return
        replica = self._members.by_number[choice.replica]
        open_request.replica, open_request.has_started = replica.replica_id, False
        goes_to = self.migration.stream_replica(open_request, replica)
        open_request.stops = goes_to is not replica
        replica.open[request.request_id] = open_request
        replica.num_sent += 1
        open_request.number = replica.num_sent
        if self._scales:
            self._watcher.on_sent(request, choice.predicted_ttft, now)
        self._members.act(
            Send(
                replica.replica_id,
                request.request_id,
                why or choice.why,
                choice.predicted_ttft,
                open_request.stops,
            )
        )
        if open_request.stops and goes_to is not None:
            self.migration.pool_policy.on_sent(open_request, replica, goes_to, now)

    def send_elsewhere(
        self, open_request: RoutedRequest, replica: Replica, destination: Replica | None, now: float
    ) -> None:
        """Take a request back from a replica, and send it to another; None lets the router say to which.

        It ends where it has tokens and is not to be resumed.
        """
        self.release(open_request, replica)
        self._members.act(Withdraw(replica.replica_id, open_request.request.request_id))
        if open_request.may_begin_again:
            open_request.refused_by, open_request.retry_after, open_request.is_kept = (), None, True
            self.send(open_request, now, why="moved", to=destination)
        else:
            self.refuse(open_request, "replica_lost", now)

    def move(self, open_request: RoutedRequest, destination: Replica) -> None:
        """Let a request go on elsewhere, with its KV."""
        assert open_request.replica is not None
        source, request_id = self._members.replicas[open_request.replica], open_request.request.request_id
        destination.open[request_id] = source.open.pop(request_id)
        open_request.replica, open_request.number = destination.replica_id, 0
        self._router.on_finish(source.number, open_request.request)
        self._router.take(destination.number, open_request.request)
        self.left.append(source)

    def send_waiting(self, now: float) -> None:
        """Try once more to send those that wait, those that are due first: the members have changed."""
        self._send_again(list(self.waiting.values()), now)

    def refuse(
        self, open_request: RoutedRequest, reason: str, now: float, retry_after: float | None = None
    ) -> None:
        """End a request that no replica has without another token; see `Refuse`."""
        request_id = open_request.request.request_id
        del self._members.open[request_id]
        if reason in ("overloaded", "no_replica"):
            self._watcher.on_refusal(open_request.request, now)
        self._watcher.on_end(open_request.request, None, now)
        self._members.act(Refuse(request_id, reason, retry_after))

    def _send_again(self, waiting: list[RoutedRequest], now: float) -> None:
        for open_request in sorted(waiting, key=deadline):
            del self.waiting[open_request.request.request_id]
            open_request.refused_by, open_request.retry_after = (), None
            self.send(open_request, now, why="waited")

    def _route(self, open_request: RoutedRequest, now: float, to: Replica | None) -> RoutingChoice | None:
        if to is not None:
            others = {each.number for each in self._members.having(ReplicaState.READY) if each is not to}
            return self._router.route(open_request.request, now, others)
        if not self._members.ready:
            return None
        excluded = self._members.excluded_for(open_request)
        if self._members.rules.num_prefill:
            excluded = self._narrow(open_request, excluded)
        return self._router.route(open_request.request, now, excluded)

    def _narrow(self, open_request: RoutedRequest, excluded: Collection[int]) -> Collection[int]:
        """Return the numbers of ready replicas that a request is better not sent to, of two pools.

        Parameters
        ----------
        excluded : those that it must not go to.
        """
        members = self._members
        ready = [each for each in members.having(ReplicaState.READY) if each.number not in excluded]
        prefill = [each for each in ready if members.is_prefill(each.replica_id)]
        decode = [each for each in ready if not members.is_prefill(each.replica_id)]
        if not (prefill and decode):
            return excluded
        replicas = self.migration.pool_policy.prompt_replicas(open_request, prefill, decode)
        kept = {each.number for each in replicas}
        return {*excluded, *(each.number for each in ready if each.number not in kept)}

    def _wait_or_refuse(self, open_request: RoutedRequest, now: float, *, may_wait: bool) -> None:
        members, has_tokens = self._members, open_request.num_output_tokens > 0
        if open_request.refused_by and not has_tokens:
            wait = least(open_request.retry_after, self._router.least_wait(open_request.request, now))
            self.refuse(open_request, "overloaded", now, None if wait is None else max(wait, SHORTEST_RETRY))
        elif open_request.refused_by and members.ready:
            open_request.waits_until = now + max(open_request.retry_after or 0.0, _REFUSED_AGAIN)
            self.waiting[open_request.request.request_id] = open_request
        elif members.is_one_coming and (may_wait or has_tokens):
            self._wait_for_start(open_request, now)
        elif members.ready:
            self.refuse(open_request, "too_long", now)
        else:
            self.refuse(
                open_request, "no_replica", now, self.start_seconds if members.is_one_coming else None
            )

    def _wait_for_start(self, open_request: RoutedRequest, now: float) -> None:
        """Let a request wait for a replica, if it is expected soon enough."""
        start = self._seconds_to_start(now)
        open_request.refused_by, open_request.waits_until = (), inf
        if not open_request.num_output_tokens:
            is_late = self._scales and now + start > open_request.request.ttft_deadline
            if is_late and open_request.request.rather_refused:
                self.refuse(open_request, "unattainable", now, start)
                return
            if start > self._max_wait:
                self.refuse(open_request, "no_replica", now, start)
                return
            open_request.waits_until = now + self._max_wait
        self.waiting[open_request.request.request_id] = open_request

    def _seconds_to_start(self, now: float) -> float:
        """Return the seconds until a replica is ready, by the last start; 0 where none is known.

        A start that takes longer than the last is expected to be late by as much again.
        """
        starts = [each.starts for each in self._members.having(ReplicaState.STARTING)]
        known = [each for each in starts if each is not None]
        if self.start_seconds is None:
            return 0.0
        return abs(min(known, default=now) + self.start_seconds - now)
