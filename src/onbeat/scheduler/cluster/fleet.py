"""What a fleet of replicas does about everything that happens to it: events in, actions out.

Whoever carries the actions out, live or simulated, tells what came of them as further events. Nothing here
reads a clock, and equal events at equal times make equal actions, so that a record of them can be replayed.

Every request has one owner: one replica, or the fleet itself while no replica takes it.

How many replicas a fleet has: as many as are asked for, or as it decides itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice
from math import inf
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaId, ReplicaView, ScalingView, replica_id
from onbeat.scheduler.cluster import events
from onbeat.scheduler.cluster.membership import (
    FleetRules,
    Membership,
    Replica,
    ReplicaState,
    RoutedRequest,
    check_count,
    deadline,
    least,
)
from onbeat.scheduler.cluster.requests import Requests
from onbeat.scheduler.cluster.routing import Router
from onbeat.scheduler.cluster.scaling import ScaleBounds, Scaling
from onbeat.scheduler.cluster.scaling_policy import ScalingPolicy

MOST_WAITING = 1024
"""New requests that wait for a replica to start; further ones are refused."""
MOST_LIVES = 3
"""Replicas in a row that may die under a request before its next token: one that kills them must end."""
Decided = Callable[[events.FleetEvent, float, Sequence[events.FleetAction]], None]


class Fleet:
    """Decides where requests go, and which replicas are started and stopped.

    Parameters
    ----------
    router : has no members yet.
    on_decision : is told of each event, its time and the actions.

    Notes
    -----
    The start of a fleet is `ScaleAsked`. A call costs what its router does; those that change the membership
    O(replicas + requests that move).
    """

    def __init__(
        self, router: Router, rules: FleetRules | None = None, *, on_decision: Decided | None = None
    ) -> None:
        self._members = Membership(router, rules or FleetRules())
        self._rules, self._router, self._act = self._members.rules, router, self._members.act
        self._on_decision = on_decision
        self._moves_streams = False
        """Whether there have been two replicas between which streams can move."""
        self._scaling: Scaling | None = None
        self._watcher = ScalingPolicy()
        if self._rules.autoscale:
            self._scaling = Scaling(self._rules.autoscale, self._rules.scale_down_seconds, self._members)
            self._watcher = self._scaling.policy
        self._requests = Requests(self._members, self._watcher)
        self._migration = self._requests.migration
        self._handlers: dict[type[events.FleetEvent], Callable[[Any, float], None]] = {
            events.Arrived: self._on_arrival,
            events.Delivered: self._on_delivery,
            events.Refused: self._on_refusal,
            events.Aborted: self._on_abort,
            events.Reported: self._on_report,
            events.Joined: self._on_join,
            events.Lost: self._on_loss,
            events.DrainAsked: self._on_drain,
            events.ScaleAsked: self._on_scale,
            events.ScalingAsked: self._on_scaling,
            events.Answered: self._migration.on_answer,
            events.Tick: self._on_tick,
        }

    def on_event(self, event: events.FleetEvent, now: float) -> list[events.FleetAction]:
        """Return what is to be done about an event, in this order.

        What comes too late is ignored: deliveries and refusals of a request by a replica that no longer owns
        it, reports of a replica that is not a member.

        Parameters
        ----------
        now : seconds of the clock by which requests arrive; not before that of the last call.

        Raises
        ------
        ConfigError : fewer than no replicas are asked for, or scaling of a fleet that is not made for it.
        """
        self._members.actions.clear()
        self._handlers[type(event)](event, now)
        if self._scaling is not None and now >= self._scaling.next_time:
            self._rescale(self._scaling.look(len(self._members.open), now), now)
        while self._requests.left:
            self._stop_if_drained(self._requests.left.pop(), now)
        if self._moves_streams:
            self._migration.advance(now)
        actions = self._members.actions[:]
        if self._on_decision is not None:
            self._on_decision(event, now, actions)
        return actions

    @property
    def next_time(self) -> float:
        """When a `Tick` is wanted at the latest, seconds; infinite where none is."""
        return min(self.next_duty, inf if self._scaling is None else self._scaling.next_time)

    @property
    def next_duty(self) -> float:
        """When one is wanted for more than a look at the size: for requests that go elsewhere, or moves."""
        drained = (each.drains_until for each in self._members.having(ReplicaState.DRAINING))
        return min((*drained, self._requests.next_time, self._migration.next_time))

    def count(self, state: ReplicaState) -> int:
        """Return how many replicas are in a state."""
        return len(self._members.by_state[state])

    def replicas(self) -> list[ReplicaView]:
        """Return how each replica stands, as far as a fleet knows."""
        return [each.view() for each in self._members.replicas.values()]

    @property
    def num_waiting(self) -> int:
        """Requests that are with no replica: none takes them at present."""
        return len(self._requests.waiting)

    @property
    def scaling(self) -> ScalingView | None:
        """How a fleet that changes its own size stands; None of any other."""
        return None if self._scaling is None else self._scaling.view()

    @property
    def scales_by_costs(self) -> bool:
        """Whether it decides on the number of replicas by what these predict of their steps."""
        return self._watcher.needs_costs

    def state(self, replica: ReplicaId) -> ReplicaState:
        """Return the state of a replica; one that was never heard of is stopped."""
        known = self._members.replicas.get(replica)
        return ReplicaState.STOPPED if known is None else known.state

    def is_coming(self, replica: ReplicaId) -> bool:
        """Return whether a replica is about to get ready: it starts, or drains and is then started again."""
        known = self._members.replicas.get(replica)
        return known is not None and known.is_coming

    def role(self, replica: ReplicaId) -> str:
        """Return what a replica is for: `prefill` or `decode`; nothing where all are alike."""
        if not self._rules.num_prefill:
            return ""
        return "prefill" if self._members.is_prefill(replica) else "decode"

    def _on_arrival(self, event: events.Arrived, now: float) -> None:
        num_tokens = event.request.num_output_tokens
        open_request = RoutedRequest(event.request, num_output_tokens=num_tokens, is_kept=num_tokens > 0)
        request_id = event.request.request_id
        assert request_id not in self._members.open, f"{request_id} arrives twice"
        self._members.open[request_id] = open_request
        if self._scaling is not None:
            self._watcher.on_arrival(event.request, now)
            self._rescale(self._scaling.wake(now), now)
        is_full = len(self._requests.waiting) >= MOST_WAITING
        self._requests.send(open_request, now, may_wait=not is_full)

    def _on_delivery(self, event: events.Delivered, now: float) -> None:
        open_request = self._members.open.get(event.request_id)
        if open_request is None or open_request.replica != event.replica:
            return
        replica = self._members.replicas[event.replica]
        is_first = event.num_tokens > 0 and not open_request.has_started
        if is_first:
            open_request.has_started, open_request.refused_by = True, ()
            self._router.on_first_token(replica.number, open_request.request)
            self._watcher.on_first_token(open_request.request, event.num_cached_tokens, now)
        if event.num_tokens:
            open_request.num_output_tokens += event.num_tokens
            open_request.num_deaths = 0
        if is_first and not event.is_finished:
            self._migration.on_first_token(open_request, replica, now)
        if event.is_finished:
            self._requests.release(open_request, replica)
            del self._members.open[event.request_id]
            self._watcher.on_end(open_request.request, open_request.num_output_tokens, now)
            if replica.state is ReplicaState.DRAINING:
                self._stop_if_drained(replica, now)

    def _on_refusal(self, event: events.Refused, now: float) -> None:
        open_request = self._members.open.get(event.request_id)
        if open_request is None or open_request.replica != event.replica:
            return
        replica = self._members.replicas[event.replica]
        self._requests.release(open_request, replica)
        if not event.is_for_load:
            self._requests.refuse(open_request, "invalid", now)
        else:
            open_request.refused_by += (replica.replica_id,)
            open_request.retry_after = least(open_request.retry_after, event.retry_after)
            self._requests.send(open_request, now, why="retried")
        self._stop_if_drained(replica, now)

    def _on_abort(self, event: events.Aborted, now: float) -> None:
        open_request = self._members.open.pop(event.request_id, None)
        if open_request is None:
            return
        self._watcher.on_end(open_request.request, None, now)
        if open_request.replica is None:
            del self._requests.waiting[event.request_id]
            return
        replica = self._members.replicas[open_request.replica]
        self._requests.release(open_request, replica)
        self._act(events.Withdraw(replica.replica_id, event.request_id))
        self._stop_if_drained(replica, now)

    def _on_report(self, event: events.Reported, now: float) -> None:
        replica = self._members.replicas.get(event.replica)
        if replica is None:
            return
        replica.load = event.load
        if replica.state is ReplicaState.READY:
            self._watcher.on_report(event.load, replica.limits)
            self._router.on_report(replica.number, event.load, now)
            self._migration.on_report(replica, now)

    def _on_join(self, event: events.Joined, now: float) -> None:
        replica = self._members.get(event.replica)
        if replica.state in (ReplicaState.STOPPED, ReplicaState.DOWN):
            self._act(events.Stop(event.replica))
            return
        if replica.starts is not None:
            self._requests.start_seconds, replica.starts = now - replica.starts, None
        if replica.state is not ReplicaState.STARTING:  # it came back before anybody saw it go
            self._leave(replica, ReplicaState.STARTING, "")
        orphans = self._take_all(replica)
        self._members.enter(replica, event.limits)
        if event.limits.moves_streams and not self._moves_streams:
            others = (each for each in self._members.replicas.values() if each is not replica)
            self._moves_streams = any(each.limits.moves_streams for each in others)
        self._router.join(replica.number, event.limits)
        self._migration.look()
        self._resume(orphans, now)
        self._requests.send_waiting(now)

    def _on_loss(self, event: events.Lost, now: float) -> None:
        replica = self._members.replicas.get(event.replica)
        if replica is None or replica.state in (ReplicaState.STOPPED, ReplicaState.DOWN):
            return
        for open_request in replica.open.values():
            if open_request.has_started or event.num_taken is None or open_request.number <= event.num_taken:
                open_request.num_deaths += 1
        orphans = self._take_all(replica)
        if replica.state is ReplicaState.DRAINING:
            self._end(replica, now, is_alive=False)
        else:
            delay = replica.on_death(now)
            state = ReplicaState.DOWN if delay is None else ReplicaState.STARTING
            self._leave(replica, state, event.why)
            if delay is not None:
                self._start(replica, now, delay)
        self._resume(orphans, now)
        self._requests.send_waiting(now)

    def _resume(self, orphans: list[RoutedRequest], now: float) -> None:
        """Send the requests of a replica that is gone elsewhere, those that are due first."""
        for open_request in orphans:
            if not open_request.request.resumes:
                self._requests.refuse(open_request, "replica_lost", now)
            elif open_request.num_deaths >= MOST_LIVES:
                self._requests.refuse(open_request, "too_many_lives", now)
            else:
                open_request.refused_by, open_request.retry_after, open_request.is_kept = (), None, True
                self._requests.send(open_request, now, why="resumed")

    def _take_all(self, replica: Replica) -> list[RoutedRequest]:
        """Take all requests from a replica that is gone; return them, those that are due first."""
        self._migration.moves.on_lost(replica.replica_id)
        taken = sorted(replica.open.values(), key=deadline)
        for open_request in taken:
            self._requests.release(open_request, replica)
        return taken

    def _leave(self, replica: Replica, state: ReplicaState, why: str) -> None:
        """Let a replica be no member any more."""
        if replica.state is ReplicaState.READY:
            self._router.leave(replica.number)
            self._migration.on_leave(replica)
        self._members.change(replica, state, why)

    def _on_drain(self, event: events.DrainAsked, now: float) -> None:
        replica = self._members.replicas.get(event.replica)
        if replica is not None:
            self._drain(replica, now, seconds=event.seconds, restarts=event.restarts)

    def _drain(self, replica: Replica, now: float, *, seconds: float, restarts: bool) -> None:
        """Begin to end a replica, or change when it ends and whether it comes back."""
        if replica.state in (ReplicaState.STARTING, ReplicaState.DOWN) and not restarts:
            self._end(replica, now, is_alive=replica.state is ReplicaState.STARTING)
        if replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            return
        self._leave(replica, ReplicaState.DRAINING, "restarts" if restarts else "ends")
        replica.drains_until, replica.restarts = now + seconds, restarts
        if self._members.ready:  # else it serves them itself, as far as it gets
            unstarted = [each for each in replica.open.values() if not each.has_started]
            self._send_all_elsewhere(unstarted, replica, now)
            self._migration.look()
        self._stop_if_drained(replica, now)
        if self._requests.waiting and not self._members.is_one_coming:
            self._requests.send_waiting(now)

    def _send_all_elsewhere(self, moved: Iterable[RoutedRequest], replica: Replica, now: float) -> None:
        for open_request in sorted(moved, key=deadline):
            self._requests.send_elsewhere(open_request, replica, None, now)

    def _stop_if_drained(self, replica: Replica, now: float) -> None:
        if replica.state is ReplicaState.DRAINING and not replica.open:
            self._end(replica, now, is_alive=True)

    def _end(self, replica: Replica, now: float, *, is_alive: bool) -> None:
        """Stop a replica that is to end and has nothing left, and start it again if it is to come back."""
        if is_alive:
            self._act(events.Stop(replica.replica_id))
        restarts, replica.drains_until, replica.restarts = replica.restarts, inf, False
        self._leave(replica, ReplicaState.STOPPED, "")
        if restarts:
            self._start(replica, now)
        elif self._requests.waiting:
            self._requests.send_waiting(now)

    def _start(self, replica: Replica, now: float, delay: float = 0.0) -> None:
        if replica.state is not ReplicaState.STARTING:
            self._members.change(replica, ReplicaState.STARTING)
        replica.starts = now
        self._act(events.Start(replica.replica_id, delay))

    def _on_tick(self, event: events.Tick, now: float) -> None:  # noqa: ARG002 (all there is to it is the time)
        for replica in self._members.having(ReplicaState.DRAINING):
            if replica.drains_until <= now:
                self._send_all_elsewhere(replica.open.values(), replica, now)
                self._stop_if_drained(replica, now)
        self._requests.send_due(now)

    # --- how many replicas there are ------------------------------------------------------------------

    def _on_scale(self, event: events.ScaleAsked, now: float) -> None:
        """Have so many replicas, those that stay down started again included."""
        check_count(event.num_replicas)
        self._forgive()
        if self._scaling is not None and self._scaling.next_time < inf:
            self._scaling.set_bounds(event.num_replicas, event.num_replicas, now)
        self._resize(event.num_replicas, now)

    def _on_scaling(self, event: events.ScalingAsked, now: float) -> None:
        """Let the fleet decide from now on, between two numbers."""
        if self._scaling is None:
            raise ConfigError("this fleet does not decide on its size; start it with --autoscale")
        bounds = ScaleBounds(event.least, event.most)
        self._scaling.set_bounds(bounds.least, bounds.most, now)
        self._forgive()

    def _rescale(self, decided: events.Rescale | None, now: float) -> None:
        """Have another number of replicas, if one was decided on."""
        if decided is not None:
            self._act(decided)
            self._resize(decided.num_replicas, now)

    def _forgive(self) -> None:
        """Let those that stay down be started again: they were asked for, too, and are again."""
        for replica in self._members.having(ReplicaState.DOWN):
            self._members.change(replica, ReplicaState.STOPPED)

    def _resize(self, num_replicas: int, now: float) -> None:
        """Start replicas, or let some end, until so many serve or will."""
        members = self._members
        expected = members.expected()
        unused = (name for name in map(replica_id, count()) if self.state(name) is ReplicaState.STOPPED)
        for name in islice(unused, max(0, num_replicas - len(expected))):
            replica = members.get(name)
            replica.deaths.clear()
            self._start(replica, now)
        # Those that compute prompts go last, those that are not ready first, then those with the least to do,
        # the last named of them.
        expected.sort(
            key=lambda each: (
                self._members.is_prefill(each.replica_id),
                each.state is ReplicaState.READY,
                len(each.open),
                -each.order,
            )
        )
        for replica in expected[: max(0, len(expected) - num_replicas)]:
            self._drain(replica, now, seconds=self._rules.drain_seconds, restarts=False)
