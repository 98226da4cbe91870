"""A fleet under a virtual clock: the live fleet's decisions, carried out on virtual replicas."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from math import inf, nan
from typing import NamedTuple

from onbeat.core.errors import ConfigError, Overloaded, RequestRejected, SLOUnattainable
from onbeat.core.fleet import ReplicaLimits, replica_id, replica_number
from onbeat.core.handover import MoveVerb
from onbeat.core.request import FinishReason
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.events import (
    Answered,
    Arrived,
    Delivered,
    DrainAsked,
    FleetAction,
    FleetEvent,
    Joined,
    Lost,
    Refuse,
    Refused,
    Reported,
    Rescale,
    ScaleAsked,
    ScalingAsked,
    Send,
    Start,
    Stop,
    Tick,
    Withdraw,
)
from onbeat.scheduler.cluster.fleet import Decided, Fleet, FleetConfig
from onbeat.scheduler.cluster.routing import Router
from onbeat.scheduler.cluster.work import WorkEstimate, describe
from onbeat.scheduler.replica.policies import composition
from onbeat.simulator.client import Clients, OfferedRequest
from onbeat.simulator.config import FleetChange, KVLink, ReplicaKind, SimulationConfig
from onbeat.simulator.deliveries import REFUSALS, refuse
from onbeat.simulator.moves import VirtualMoves
from onbeat.simulator.observer import Collector
from onbeat.simulator.replica import VirtualReplica
from onbeat.simulator.result import FleetSize, ReplicaCounters

MakeReplica = Callable[[int, ReplicaKind], VirtualReplica]

_RARE = (Lost, Joined, DrainAsked, ScaleAsked, ScalingAsked, Refused, Tick)
"""Events after which the fleet may want another tick."""


def wants_reports(config: SimulationConfig, router: Router) -> bool:
    """Return whether anything that is decided depends on how replicas stand."""
    return not router.ignores_state or config.kv_link is not None or config.autoscale is not None


class Deciders(NamedTuple):
    """Who decides about a fleet, and who is told."""

    router: Router
    """It has no members yet."""
    work: WorkEstimate | None = None
    """Predicts work, for a router that looks at it."""
    on_decision: Decided | None = None
    """Is told of each event of the fleet, its time and the actions."""


def fleet_config(config: SimulationConfig) -> FleetConfig:
    """Return how the fleet of a simulation treats its replicas."""
    plain = FleetConfig(
        drain_seconds=config.fleet_times.drain,
        max_wait_seconds=config.scheduler.max_queue_seconds,
        num_prefill=config.num_prefill,
        pool_rule=config.pool_rule,
        move_rule=config.move_rule,
    )
    autoscale = config.autoscale
    if autoscale is None:
        return plain
    return replace(plain, autoscale=autoscale.policy, scale_down_seconds=autoscale.down_seconds)


class FleetLoop:
    """Runs requests through a fleet whose replicas die, drain and are added.

    At each instant, steps end first, by ascending replica; then the fleet hears what is due: reports, starts
    that are done, deaths; then requests arrive; then replicas plan. A death is noticed when it happens.

    Parameters
    ----------
    make_replica : makes a replica of a kind, each time that one starts.
    """

    def __init__(
        self,
        clients: Clients,
        config: SimulationConfig,
        step_time: StepTimeModel,
        deciders: Deciders,
        collector: Collector,
        make_replica: MakeReplica,
    ) -> None:
        router, self._work, on_decision = deciders
        times = config.fleet_times
        self._clients, self._collector = clients, collector
        self._make_replica = make_replica
        self._fleet = Fleet(router, fleet_config(config), on_decision=on_decision)
        self._autoscale = config.autoscale
        self._times = times
        self._kinds = config.kinds or (ReplicaKind(scheduler=config.scheduler, step_time=step_time),)
        self._reports = wants_reports(config, router)
        self._num_replicas = config.num_replicas
        self._replicas: dict[int, VirtualReplica] = {}
        """Those that live, by number."""
        self.counters: dict[int, ReplicaCounters] = {}
        """Of replicas that have lived."""
        self.decisions: Counter[str] = Counter()
        """What was decided how often: the reasons of requests sent and refused, starts and stops."""
        self.sizes: list[FleetSize] = []
        """How many replicas there were to be, of a fleet that changes its own size."""
        self._starting: dict[int, int] = {}
        """The newest start of a replica that starts, by number: one that was stopped meanwhile is not ready
        when that start would have been done."""
        self._num_starts = 0
        self._held: dict[int, float] = {}
        """Since when a replica has been held, by number: from its start, before it is ready."""
        self.replica_seconds = 0.0
        """For which replicas were held, those that are still held left out."""
        self._open: dict[str, OfferedRequest] = {}
        self._told: dict[str, int] = {}
        """Tokens of each open request that the fleet knows of."""
        self._not_begun: dict[str, int] = {}
        """Requests resumed elsewhere that have had no tokens there, and how many they had before."""
        self._refusals: dict[str, Overloaded | SLOUnattainable] = {}
        self._steps: list[tuple[float, int]] = []
        """(when, replica); an entry counts only if it is the replica's `next_time`."""
        self._timed: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_timed = 0
        self._tick = inf
        self._called: set[int] = set()
        self._let_go: set[int] = set()
        """Replicas that have more room since this instant, whether they run a step or not."""
        self._events: deque[FleetEvent] = deque()
        self._is_telling = False
        self._moves = None if config.kv_link is None else self._make_moves(config.kv_link)
        for change in config.fleet_changes:
            self._at(change.when, partial(self._change, change))

    def run(self) -> None:
        """Run to the end of the last request.

        Raises
        ------
        ConfigError : a request that no replica can ever run.
        """
        clients, timed = self._clients, self._timed
        self._begin()
        now = 0.0
        while clients.num_under_way or clients.next_time < inf:
            now = self._next_time()
            assert now < inf, "nothing runs, but a request has not ended"
            self._called.clear()
            self._end_steps(now)
            ended = sorted(self._called)
            while timed and timed[0][0] <= now:
                heappop(timed)[2](now)
            if self._moves is not None:
                self._moves.end_copies(now)
            if self._tick <= now:
                self._tell(Tick(), now)
            while clients.next_time <= now:
                self._arrive(now)
            self._plan_all(now)
            if self._reports:
                for number in sorted({*ended, *self._let_go}):
                    self._report(number, now)
                self._let_go.clear()
        if self._moves is not None:
            self._moves.close(now)
        for number in list(self._held):
            self._give_back(number, now)

    def _plan_all(self, now: float) -> None:
        """Let every replica plan that has something new; a request that one gives up may go to another."""
        while self._called or (self._moves is not None and self._moves.is_asked):
            if self._moves is not None and self._moves.is_asked:
                self._moves.do_next(now)
                continue
            number = min(self._called)
            self._called.remove(number)
            if number in self._replicas:
                self._plan(number, now)

    def _make_moves(self, link: KVLink) -> VirtualMoves:
        return VirtualMoves(
            self._replicas,
            link,
            block_size=self._kinds[0].scheduler.block_size,
            message_seconds=self._times.report,
            memory_bandwidth=lambda number: self._kind(number).memory_bandwidth,
            answer=self._hear_of,
            call=self._called.add,
            on_room=self._let_go.add,
        )

    def _kind(self, number: int) -> ReplicaKind:
        return self._kinds[min(number, len(self._kinds) - 1)]

    def _begin(self) -> None:
        autoscale = self._autoscale
        num_replicas = self._num_replicas if autoscale is None else max(1, autoscale.bounds.least)
        self._tell(ScaleAsked(num_replicas), 0.0)
        if autoscale is not None:
            self.sizes.append(FleetSize(0.0, num_replicas, ""))
            self._tell(ScalingAsked(autoscale.bounds.least, autoscale.bounds.most), 0.0)

    def _next_time(self) -> float:
        """Return when something happens next."""
        now = min(self._clients.next_time, self._tick)
        if self._steps and self._steps[0][0] < now:
            now = self._steps[0][0]
        if self._timed and self._timed[0][0] < now:
            now = self._timed[0][0]
        if self._moves is not None and self._moves.links.next_time < now:
            now = self._moves.links.next_time
        return now

    # ---- what happens ----

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        self._num_timed += 1
        heappush(self._timed, (when, self._num_timed, call))

    def _hear_of(self, answered: Answered, now: float, delay: float) -> None:
        """Tell the fleet what came of a step of a move, once that is heard of."""
        if delay:
            self._at(now + delay, lambda then: self._tell(answered, then))
        else:
            self._tell(answered, now)

    def _end_steps(self, now: float) -> None:
        steps = self._steps
        while steps and steps[0][0] <= now:
            number = heappop(steps)[1]
            replica = self._replicas.get(number)
            if replica is None or replica.next_time != now:
                continue  # out of date
            finished = replica.end(now)
            self._called.add(number)
            self._tell_deliveries(number, replica.started, finished, now)
            if self._moves is not None and number in self._replicas:
                self._moves.on_step_end(number, now)

    def _tell_deliveries(
        self, number: int, started: Sequence[OfferedRequest], finished: Sequence[OfferedRequest], now: float
    ) -> None:
        """Tell the fleet of first tokens and of ends."""
        ended = {offered.request.request_id for offered in finished}
        begun = [offered for offered in started if offered.request.request_id not in ended]
        for request_id, num_before in list(self._not_begun.items()):
            offered = self._open[request_id]
            if offered.place != number or request_id in ended:
                continue
            if len(offered.record.delivery_times) > num_before:
                del self._not_begun[request_id]
                begun.append(offered)
        for offered in (*begun, *finished):
            is_finished = offered.request.request_id in ended
            if self._moves is not None:
                self._moves.on_first_token(number, offered.request.request_id, now, is_finished=is_finished)
            self._tell_delivery(number, offered, now, is_finished=is_finished)
            if is_finished:
                self._close(offered, now)

    def _tell_delivery(self, number: int, offered: OfferedRequest, now: float, *, is_finished: bool) -> None:
        request_id, record = offered.request.request_id, offered.record
        num_tokens = len(record.delivery_times)
        num_new, self._told[request_id] = num_tokens - self._told.get(request_id, 0), num_tokens
        self._tell(
            Delivered(replica_id(number), request_id, num_new, record.num_cached_tokens, is_finished), now
        )

    def _arrive(self, now: float) -> None:
        offered = self._clients.send(now)
        self._collector.on_request(offered)
        self._open[offered.request.request_id] = offered
        self._tell(Arrived(describe(offered.request, self._work)), now)

    def _change(self, change: FleetChange, now: float) -> None:
        name = replica_id(change.number)
        if change.kind == "scale":
            self._tell(ScaleAsked(change.number), now)
        elif change.number not in self._replicas:
            return  # it is down already
        elif change.kind == "kill":
            self._kill(change.number, now)
        else:
            self._tell(DrainAsked(name, self._times.drain, change.kind == "restart"), now)

    def _kill(self, number: int, now: float) -> None:
        replica = self._replicas[number]
        for offered in replica.abandon(now):
            self._not_begun.pop(offered.request.request_id, None)
            if len(offered.record.delivery_times) > self._told.get(offered.request.request_id, 0):
                self._tell_delivery(number, offered, now, is_finished=False)
        if self._moves is not None:
            self._moves.lose(number, now)
        self._remove(number, died=True)
        self._tell(Lost(replica_id(number), "killed"), now)

    def _remove(self, number: int, *, died: bool = False) -> None:
        counters = self._replicas.pop(number).counters()
        if died:  # with what it held, such as the KV of streams that were leaving
            counters = replace(counters, num_leaked_blocks=0)
        before = self.counters.get(number)
        self.counters[number] = counters if before is None else before.joined(counters)

    def _started(self, number: int, start: int, now: float) -> None:
        """Let a replica join whose start is done, unless it was stopped since."""
        if self._starting.get(number) == start:
            del self._starting[number]
            self._joined(number, now)

    def _joined(self, number: int, now: float) -> None:
        kind = self._kind(number)
        self._replicas[number] = self._make_replica(number, kind)
        limits = kind.scheduler
        self._tell(
            Joined(
                replica_id(number),
                ReplicaLimits(
                    device=kind.device,
                    max_model_len=limits.max_model_len,
                    max_num_seqs=limits.max_num_seqs,
                    num_blocks=limits.num_blocks,
                    block_size=limits.block_size,
                    moves_streams=self._moves is not None
                    and not composition(limits.policy).release.holds_finished,
                ),
            ),
            now,
        )
        if self._reports:
            self._report(number, now)

    def _report(self, number: int, now: float) -> None:
        """Let what a replica reports now be heard of a little later."""
        replica = self._replicas.get(number)
        if replica is None or replica.next_time <= now:
            return  # it is gone; or its run had no further step, and it reports once that has ended
        load = replica.load(now)

        def hear(then: float) -> None:
            if self._replicas.get(number) is replica:
                self._tell(Reported(replica_id(number), load), then)

        self._at(now + self._times.report, hear)

    def _plan(self, number: int, now: float) -> None:
        """Start a step where the replica is free."""
        replica = self._replicas[number]
        if replica.next_time <= now:  # a run that was cut at this very instant; none of it ends
            replica.end(now)
        if self._moves is not None:
            self._moves.on_step_end(number, now)
        for offered in replica.start(now, self._clients.next_time):
            if self._moves is not None:
                self._moves.forget(number, offered.request.request_id)
            self._tell(Refused(replica_id(number), offered.request.request_id, is_for_load=True), now)
        if replica.next_time < inf:
            heappush(self._steps, (replica.next_time, number))

    # ---- what is done about it ----

    def _tell(self, event: FleetEvent, now: float) -> None:
        """Tell the fleet, and carry out what it decides, with what comes of that."""
        self._events.append(event)
        if self._is_telling:
            return
        self._is_telling = True
        while self._events:
            event = self._events.popleft()
            for action in self._fleet.on_event(event, now):
                self._carry_out(action, now)
            if isinstance(event, _RARE):
                self._tick = self._fleet.next_time
        self._is_telling = False

    def _carry_out(self, action: FleetAction, now: float) -> None:
        if isinstance(action, Send):
            self.decisions[action.why] += 1
            self._send(action, now)
        elif isinstance(action, Withdraw):
            number = replica_number(action.replica)
            self._replicas[number].withdraw(action.request_id, now)
            if self._moves is not None:
                self._moves.forget(number, action.request_id)
            self._not_begun.pop(action.request_id, None)
            self._called.add(number)
        elif isinstance(action, Refuse):
            self.decisions[action.reason] += 1
            self._refuse(action, now)
        elif isinstance(action, Start):
            self.decisions["start"] += 1
            number = replica_number(action.replica)
            self._held.setdefault(number, now)
            is_first = now == 0.0 and number not in self.counters
            delay = 0.0 if is_first else action.delay + self._times.start
            self._num_starts += 1
            self._starting[number] = self._num_starts
            self._at(now + delay, partial(self._started, number, self._num_starts))
        elif isinstance(action, Rescale):
            self.decisions[f"rescale ({action.why})"] += 1
            self.sizes.append(FleetSize(now, action.num_replicas, action.why))
        elif isinstance(action, Stop):
            self.decisions["stop"] += 1
            number = replica_number(action.replica)
            self._give_back(number, now)
            self._starting.pop(number, None)
            if number in self._replicas:
                self._stop(number, now)
        else:
            assert self._moves is not None, "no replica moves streams"
            if action.verb is MoveVerb.TAKE:
                self.decisions[f"moved: {self._moves.why(action.move)}"] += 1
            self._moves.ask(action, self._open.get(action.request_id))

    def _stop(self, number: int, now: float) -> None:
        if self._moves is not None:
            self._moves.leave(number, now)
        self._remove(number)

    def _give_back(self, number: int, now: float) -> None:
        self.replica_seconds += now - self._held.pop(number, now)

    def _send(self, action: Send, now: float) -> None:
        number, offered = replica_number(action.replica), self._open[action.request_id]
        request, times = offered.request, offered.record.delivery_times
        if len(times) > len(request.resumed_token_ids):
            request = replace(request, resumed_token_ids=[1] * len(times), first_token_time=times[0])
            offered.request = request
        offered.record.finish_reason, offered.record.end = None, nan  # it may have been given up elsewhere
        offered.place = number
        if len(times):
            self._not_begun[request.request_id] = len(times)
        try:
            self._replicas[number].add(offered, now)
            if action.stops:
                assert self._moves is not None, "no replica moves streams"
                self._moves.stop_after_first(number, request.request_id)
        except REFUSALS as refusal:
            offered.record.replica = self._replicas[number].name
            self._refusals[request.request_id] = refusal
            retry_after = refusal.retry_after
            self._events.append(
                Refused(action.replica, request.request_id, is_for_load=True, retry_after=retry_after)
            )
        except RequestRejected as error:
            raise ConfigError(f"request {offered.index} of the load can never run: {error}") from error
        self._called.add(number)

    def _refuse(self, action: Refuse, now: float) -> None:
        offered = self._open[action.request_id]
        if offered.record.finish_reason is not None:
            offered.record.end = now  # it was given up in a queue
        elif len(offered.record.delivery_times):
            offered.record.finish_reason, offered.record.end = FinishReason.ERROR.value, now
        else:
            refusal = self._refusals.get(action.request_id)
            refusal = refusal or Overloaded(action.reason, code="server_overloaded")
            refuse(offered, refusal, offered.record.replica, now)
        self._close(offered, now)

    def _close(self, offered: OfferedRequest, now: float) -> None:
        request_id = offered.request.request_id
        del self._open[request_id]
        for known in (self._told, self._not_begun, self._refusals):
            known.pop(request_id, None)
        self._clients.on_finish(now)
        self._collector.on_finish(offered, now)

    def all_counters(self) -> list[ReplicaCounters]:
        """Return what each replica has done, over all its lives, by number."""
        for number in list(self._replicas):
            self._remove(number)
        return [self.counters[number] for number in sorted(self.counters)]
