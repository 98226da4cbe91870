"""A fleet under a virtual clock: the live fleet's decisions, carried out on virtual replicas.

Virtual replicas start, live, report and end here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf, nan

from onbeat.core.errors import ConfigError, Overloaded, RequestRejected
from onbeat.core.fleet import replica_id, replica_number
from onbeat.core.handover import MoveVerb
from onbeat.core.request import FinishReason
from onbeat.scheduler.cluster import events
from onbeat.scheduler.cluster.fleet import Decided, Fleet
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.replica.policies import composition
from onbeat.simulator.deliveries import REFUSALS, count_singles, refuse
from onbeat.simulator.fleet_loop import HEAR, REPORT, TICK, FleetLoop, FrontEnd, Member
from onbeat.simulator.replica import make_replica
from onbeat.simulator.result import FleetSize, ReplicaCounters, SimulationObserver
from onbeat.simulator.simulation_config import FleetChange, ReplicaKind, SimulationConfig
from onbeat.simulator.virtual_clients import OfferedRequest
from onbeat.simulator.virtual_moves import VirtualMoves
from onbeat.simulator.virtual_replica import Around

_USUAL = (events.Arrived, events.Delivered, events.Aborted, events.Reported, events.Answered)
"""Events after which the fleet wants no other tick than before."""


class VirtualFleet(FrontEnd):
    """Carries out what a fleet decides, on virtual replicas that start, die, drain and are added.

    A death is noticed when it happens.

    Parameters
    ----------
    loop : runs the replicas.
    kinds : what the replicas are, the first first; further ones are like the last.
    observer : hears of steps.
    on_decision : is told of each event of the fleet, its time and the actions.

    Attributes
    ----------
    decisions : what was decided how often: the reasons of requests sent and refused, starts and stops.
    sizes : how many replicas there were to be, of a fleet that changes its own size.
    seconds : for which replicas were held, those that are still held left out.
    """

    def __init__(
        self,
        loop: FleetLoop,
        config: SimulationConfig,
        kinds: Sequence[ReplicaKind],
        observer: SimulationObserver | None,
        *,
        on_decision: Decided | None = None,
    ) -> None:
        self._loop, self._members = loop, loop.members
        self._config, self._times = config, config.fleet_times
        router = make_router(config.router)
        # Something may be decided whenever a replica reports; or many wait through steps of decodes alone.
        decides = router.reads_every_report or bool(config.kv_link or config.fleet.autoscale)
        lets_wait = router.reads_reports and not composition(config.scheduler.policy).predicts_waits
        self._reports_all = wants_all = (decides or lets_wait) and not config.is_of_one
        self.hears_news = router.reads_reports and not (wants_all or config.is_of_one)
        self._fleet = Fleet(router, config.fleet_rules, on_decision=on_decision)
        self._dispatcher = events.EventDispatcher(self._fleet.on_event, self)
        looks = decides or bool(config.fleet_changes)
        self._kinds, self._around = kinds, Around(observer, is_watched=wants_all, looks_at_streams=looks)
        self._counters: dict[int, ReplicaCounters] = {}
        """Of replicas that have lived, by number."""
        self._starting: dict[int, int] = {}
        """The newest start of a replica, by number: one that was stopped meanwhile does not get ready."""
        self._held: dict[int, float] = {}
        """Since when a replica has been held, by number: from its start, before it is ready."""
        self.seconds = 0.0
        self.decisions: Counter[str] = Counter()
        self.sizes: list[FleetSize] = []
        self._open: dict[str, OfferedRequest] = {}
        self._num_before: dict[str, int] = {}
        """Requests resumed elsewhere that have had no tokens there, and how many they had before."""
        self._tick = inf
        self._may_tick = False
        """Whether the fleet may want another tick than the next."""
        self._report_times: dict[int, float] = {}
        """By number, the instant at which a replica is to report, or has."""
        self._moves = VirtualMoves(
            loop, config, self._kind, answer=self._tell, on_capacity=self._ask_for_report
        )
        self.hears_all = self._hears_all = wants_all or config.kv_link is not None

    def open(self) -> None:
        """Start the replicas, and have happen to them what is to happen."""
        asked = self._config.fleet
        for change in self._config.fleet_changes:
            self._loop.at(change.when, HEAR, partial(self._change, change))
        self._tell(events.ScaleAsked(asked.first_replicas), 0.0)
        if asked.autoscale is not None:
            self.sizes.append(FleetSize(0.0, asked.first_replicas, ""))
            self._tell(events.ScalingAsked(asked.autoscale.least, asked.autoscale.most), 0.0)

    def counters(self, *, is_complete: bool) -> list[ReplicaCounters]:
        """Let all be gone; return what each replica has done, over all its lives, by number.

        Parameters
        ----------
        is_complete : whether all requests have ended.
        """
        if is_complete:
            self._moves.close()
            for number in list(self._held):
                self._give_back(number, self._loop.now)
        for number in list(self._members):
            self._remove(number)
        return [self._counters[number] for number in sorted(self._counters)]

    # ---- what happens ----

    def _tell(self, event: events.FleetEvent, now: float) -> None:
        """Tell the fleet, and carry out what it decides, with what comes of that."""
        if not isinstance(event, _USUAL):
            self._may_tick = True
        self._dispatcher.dispatch(event, now)
        if self._may_tick and not self._dispatcher.is_dispatching:
            self._may_tick = False
            when = self._fleet.next_time
            if when != self._tick:
                self._tick = when
                if when < inf:
                    self._loop.at(max(when, now), TICK, partial(self._on_tick, when))

    def _on_tick(self, when: float, now: float) -> None:
        if self._tick == when:  # else another time is wanted by now
            self._tick = inf
            self._tell(events.Tick(), now)

    def arrive(self, offered: OfferedRequest, now: float) -> None:
        """Ask the fleet where a request goes."""
        self._open[offered.request.request_id] = offered
        request = offered.request
        self._dispatcher.dispatch(
            events.Arrived(events.RoutingRequest.of(request, request.block_hashes or ())), now
        )

    def on_step(self, member: Member, finished: Sequence[OfferedRequest], now: float) -> None:
        """Tell the fleet of first tokens and of ends."""
        for offered in member.replica.started:
            if offered.record.finish_reason is None:
                self._tell_delivery(member, offered, now)
        if self._num_before:
            self._tell_resumed(member, now)
        for offered in finished:
            self._num_before.pop(offered.request.request_id, None)
            self._tell_delivery(member, offered, now, is_finished=True)
            self._close(offered, now)
        if not member.is_gone:
            self._moves.on_step_end(member.number)
        if self._reports_all:
            self._ask_for_report(member.number)

    def _tell_resumed(self, member: Member, now: float) -> None:
        """Tell of the first tokens that requests had here which have gone on behind those from elsewhere."""
        for request_id, num_before in list(self._num_before.items()):
            offered = self._open[request_id]
            is_here = offered.place == member.number and offered.record.finish_reason is None
            if is_here and len(offered.record.delivery_times) > num_before:
                del self._num_before[request_id]
                self._tell_delivery(member, offered, now)
        self.hears_all = self._hears_all or bool(self._num_before)

    def _tell_delivery(
        self, member: Member, offered: OfferedRequest, now: float, *, is_finished: bool = False
    ) -> None:
        request_id, record = offered.request.request_id, offered.record
        if not member.is_gone:
            self._moves.on_first_token(member.number, request_id, is_finished=is_finished)
        num_tokens, name = len(record.delivery_times), replica_id(member.number)
        num_new, offered.num_told = num_tokens - offered.num_told, num_tokens
        self._dispatcher.dispatch(
            events.Delivered(name, request_id, num_new, record.num_cached_tokens, is_finished), now
        )

    def before_plan(self, member: Member, now: float) -> None:  # noqa: ARG002
        """Let moves take note of the requests that have left a batch."""
        self._moves.on_step_end(member.number)

    def on_expired(self, member: Member, offered: OfferedRequest, now: float) -> None:
        """Tell the fleet of a request that a replica ended in its queue, or would not have."""
        self._moves.forget(member.number, offered.request.request_id)
        if offered.refusal is not None:
            self._tell_refusal(member, offered, now)
        else:
            self._tell_delivery(member, offered, now, is_finished=True)
            self._close(offered, now)

    def _tell_refusal(self, member: Member, offered: OfferedRequest, now: float) -> None:
        request_id, refusal = offered.request.request_id, offered.refusal
        retry_after = None if refusal is None else refusal.retry_after
        name = replica_id(member.number)
        self._tell(events.Refused(name, request_id, is_for_load=True, retry_after=retry_after), now)

    def _change(self, change: FleetChange, now: float) -> None:
        name = replica_id(change.number)
        if change.kind == "scale":
            self._tell(events.ScaleAsked(change.number), now)
        elif change.number not in self._members:
            return  # it is down already
        elif change.kind == "kill":
            self._kill(change.number, now)
        else:
            seconds = self._times.drain_seconds
            self._tell(events.DrainAsked(name, seconds, change.kind == "restart"), now)

    def _kill(self, number: int, now: float) -> None:
        member = self._members[number]
        member.is_gone = True
        for offered in member.replica.abandon(now):
            self._num_before.pop(offered.request.request_id, None)
            if len(offered.record.delivery_times) > offered.num_told:
                self._tell_delivery(member, offered, now)
        self._moves.lose(number)
        self._remove(number, died=True)
        self._tell(events.Lost(replica_id(member.number), "killed"), now)

    # ---- lives of replicas ----

    def _kind(self, number: int) -> ReplicaKind:
        """Return what a replica is."""
        return self._kinds[min(number, len(self._kinds) - 1)]

    def do_start(self, action: events.Start, now: float) -> None:
        """Begin to start a replica, after a delay; those of the beginning are there at once."""
        self.decisions["start"] += 1
        number = replica_number(action.replica)
        self._held.setdefault(number, now)
        is_first = now == 0.0 and number not in self._counters
        start = self._starting[number] = self.decisions["start"]
        when = now if is_first else now + action.delay + self._times.start_seconds
        self._loop.at(when, HEAR, partial(self._started, number, start))

    def _started(self, number: int, start: int, now: float) -> None:
        """Let a replica join whose start is done, unless it was stopped since."""
        if self._starting.get(number) != start:
            return
        del self._starting[number]
        kind = self._kind(number)
        self._loop.join(number, make_replica(number, self._config, kind, self._around), self)
        moves = self._config.kv_link is not None and not composition(kind.scheduler.policy).holds_finished
        limits = kind.scheduler.replica_limits(device=kind.device, moves_streams=moves)
        self._tell(events.Joined(replica_id(number), limits), now)
        if self.hears_news or self._reports_all:
            self._take_report(number, now)

    def do_stop(self, action: events.Stop, now: float) -> None:
        """End a replica, or its start."""
        self.decisions["stop"] += 1
        number = replica_number(action.replica)
        self._give_back(number, now)
        if number in self._members:
            self._moves.leave(number)
            self._remove(number)

    def _give_back(self, number: int, now: float) -> None:
        """Hold a replica no longer, nor start it."""
        self.seconds += now - self._held.pop(number, now)
        self._starting.pop(number, None)

    def _remove(self, number: int, *, died: bool = False) -> None:
        """Let a replica be gone."""
        counters = self._loop.leave(number).counters()
        if died:  # with what it held, such as the KV of streams that were leaving
            counters = replace(counters, num_leaked_blocks=0)
        before = self._counters.get(number)
        self._counters[number] = counters if before is None else before.joined(counters)

    # ---- reports and moves ----

    def on_news(self, member: Member, now: float) -> None:
        """Let it be heard of a little later how a replica stands."""
        self._take_report(member.number, now)

    def _ask_for_report(self, number: int) -> None:
        """Let a replica say how it stands at this instant, once all have planned."""
        now = self._loop.now
        if self._report_times.get(number) != now:
            self._report_times[number] = now
            self._loop.at(now, REPORT, partial(self._take_report, number), number)

    def _take_report(self, number: int, now: float) -> None:
        """Let what a replica reports now be heard of a little later."""
        member = self._members.get(number)
        if member is None or member.replica.next_time <= now:
            return  # it is gone; or its run had no further step, and it reports once that has ended
        member.replica.has_news = False
        report = events.Reported(replica_id(number), member.replica.load(now))
        self._loop.at(now + self._times.report_seconds, HEAR, partial(self._hear, member, report))

    def _hear(self, member: Member, report: events.Reported, now: float) -> None:
        if not member.is_gone:
            self._dispatcher.dispatch(report, now)

    def do_send(self, action: events.Send, now: float) -> None:
        """Let a replica take a request, behind the tokens that its client has, or refuse it."""
        self.decisions[action.why] += 1
        number, offered = replica_number(action.replica), self._open[action.request_id]
        request, times = offered.request, offered.record.delivery_times
        if len(times) > len(request.resumed_token_ids):
            request = replace(request, resumed_token_ids=[1] * len(times), first_token_time=times[0])
            offered.request = request
        record = offered.record  # it may have been ended in the queue of another replica
        record.finish_reason, record.end, record.fate, record.predicted_wait = None, nan, None, None
        offered.place, offered.refusal = number, None
        if len(times):
            self._num_before[request.request_id] = len(times)
            self.hears_all = True
        member = self._members[number]
        try:
            member.replica.add(offered, now)
            if action.stops:
                self._moves.stop_after_first(number, request.request_id)
        except REFUSALS as refusal:
            record.replica, offered.refusal = member.replica.name, refusal
            self._tell_refusal(member, offered, now)
        except RequestRejected as error:
            raise ConfigError(f"request {offered.index} of the load can never run: {error}") from error
        member.call(now)

    def do_withdraw(self, action: events.Withdraw, now: float) -> None:
        """Take a request from a replica, unless that has refused it, of which the fleet has yet to hear."""
        number = replica_number(action.replica)
        if self._open[action.request_id].refusal is None:
            self._members[number].replica.withdraw(action.request_id, now)
        self._moves.forget(number, action.request_id)
        self._num_before.pop(action.request_id, None)
        if (member := self._members.get(number)) is not None:
            member.call(now)

    def do_refuse(self, action: events.Refuse, now: float) -> None:
        """End a request."""
        self.decisions[action.reason] += 1
        offered = self._open[action.request_id]
        if offered.record.finish_reason is not None:
            offered.record.end = now  # it was ended in a queue
        elif len(offered.record.delivery_times):
            count_singles(offered.record)  # who comes and goes has no drafts
            offered.record.finish_reason, offered.record.end = FinishReason.ERROR.value, now
        else:
            refusal = offered.refusal or Overloaded(action.reason)
            refuse(offered, refusal, offered.record.replica, now)
        self._close(offered, now)

    def do_move_step(self, action: events.MoveStep, now: float) -> None:  # noqa: ARG002
        """Let a step of a move be taken once no step of a replica is left to end at this instant."""
        if action.verb is MoveVerb.TAKE:
            self.decisions[f"moved: {self._moves.moves[action.move].why}"] += 1
        self._moves.ask(action, self._open.get(action.request_id))

    def do_rescale(self, action: events.Rescale, now: float) -> None:
        """Note another size."""
        self.decisions[f"rescale ({action.why})"] += 1
        self.sizes.append(FleetSize(now, action.num_replicas, action.why))

    def _close(self, offered: OfferedRequest, now: float) -> None:
        request_id = offered.request.request_id
        del self._open[request_id]
        self._num_before.pop(request_id, None)
        self._loop.close(offered, now)
