"""A router that prices the wait of a request in the prefill work that a choice costs the fleet.

It knows of a replica's load by the last report, and by what the replica was sent since.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from math import floor, inf, log2, sqrt
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.core.slo import SLO
from onbeat.scheduler import triage
from onbeat.scheduler.cluster import routing
from onbeat.scheduler.cluster.events import RoutingRequest

_A_BIT_LESS = 1 - 1e-9
"""So that a sum that is rounded is no less than a bound of it."""
_SHORTEST_STEP = 1e-4
"""Seconds: of a replica that reports no time for a step."""


class FirstToken(NamedTuple):
    """When a request would have its first token, seconds from now."""

    seconds: float
    """By the work that is done before, and once it gets a slot and blocks, late or not."""
    likely: float
    """If capacity comes in time where a prompt is given up else: that one has it nobody knows when."""


class Sent(NamedTuple):
    """A request that a replica's last report does not count."""

    number: int
    """How many the replica had been sent with it."""
    deadline: float
    """Of its first token; infinite for best effort."""
    seconds: float
    """Of prefill work."""
    num_blocks: int
    """That its prompt wants."""
    request_id: str


@dataclass(slots=True)
class LoadView:
    """A replica's last report, and what it was sent since.

    Times are the router's. Each call costs O(requests sent since the report).
    """

    limits: ReplicaLimits
    load: ReplicaLoad = field(default_factory=lambda: ReplicaLoad(time=0.0, num_taken=0))
    reported: float = -inf
    """When the report came."""
    num_sent: int = 0
    sent: deque[Sent] = field(default_factory=deque)
    num_ended: int = 0
    """Since the last report."""
    ends: triage.Ends = field(default_factory=triage.Ends)
    counted: float = -inf
    """Up to when, by the report that last said another number of requests that run, or that some ended."""

    def on_report(self, load: ReplicaLoad, now: float) -> None:
        """Take a report, and count no more what it counts."""
        before = self.load.num_running
        if self.num_ended or load.num_running != before or self.reported == -inf:
            if self.reported > -inf and load.num_running:
                self.ends.count(now - self.counted, before, self.num_ended)
            self.num_ended, self.counted = 0, now  # else it is the same whether each step between was told
        self.load, self.reported = load, now
        # It was sent some that nobody asked a router about.
        self.num_sent = max(self.num_sent, load.num_taken)
        while self.sent and self.sent[0].number <= load.num_taken:
            self.sent.popleft()

    def send(self, deadline: float, seconds: float, num_blocks: int, request_id: str) -> None:
        """Count a request that is sent."""
        self.num_sent += 1
        self.sent.append(Sent(self.num_sent, deadline, seconds, num_blocks, request_id))

    def take_back(self, request_id: str) -> None:
        """Count no more a request that ended, or was taken back, before a report has counted it."""
        for index, each in enumerate(self.sent):
            if each.request_id == request_id:
                del self.sent[index]
                return

    @property
    def num_requests(self) -> int:
        """Requests that run, wait or are on their way."""
        return self.load.num_running + self.load.num_waiting + len(self.sent)

    def capacity_wait(self, deadline: float, num_blocks: int, now: float) -> float:
        """Return the seconds until a request gets a slot and its blocks; see `first_token.capacity_wait`.

        Parameters
        ----------
        num_blocks : that its prompt wants.
        """
        load, sent = self.load, self.sent
        num_free = self.limits.max_num_seqs - load.num_running - load.num_kept_slots
        num_lacking = load.num_queued_blocks - load.num_free_blocks
        num_waiting = load.num_waiting
        has_slot = num_free > num_waiting + len(sent)
        if has_slot and num_lacking + num_blocks + sum([each.num_blocks for each in sent]) <= 0:
            return 0.0
        num_held = self.limits.num_blocks + num_lacking
        wanted = load.num_queued_blocks / max(num_waiting, 1)
        ahead = [triage.Demand(self.reported + until, num, wanted) for until, _, num in load.backlog if num]
        if sent:
            ahead = sorted((*ahead, *(triage.Demand(each.deadline, 1, each.num_blocks) for each in sent)))
        given_back = max(num_held / max(load.num_running + num_waiting, 1), 1.0)
        ends = replace(self.ends)
        ends.count(self.reported - self.counted, load.num_running, 0)
        capacity = triage.FreeCapacity(num_free, load.num_free_blocks, given_back, ends.gap(load.num_running))
        wait = triage.capacity_wait(ahead, triage.Demand(deadline, 1, num_blocks), capacity, self.reported)
        return max(0.0, self.reported + wait - now) if wait else 0.0

    def work_left(self, now: float) -> float:
        """Return the seconds of prefill work that it has, roughly: what orders many replicas."""
        load = self.load
        total = load.best_effort_work
        if load.backlog:
            total = sum([seconds for _, seconds, _ in load.backlog]) + total
        if total:
            total = max(0.0, total - max(0.0, now - self.reported - load.busy) * load.prefill_share)
        return total + sum([each.seconds for each in self.sent]) if self.sent else total

    def soonest(self, seconds: float, now: float) -> float:
        """Return a bound of `FirstToken.seconds` from below, without a look at what waits.

        Parameters
        ----------
        seconds : of prefill work, on this replica.
        """
        return self._step_left(now) + max(_A_BIT_LESS * seconds, self.load.decode_seconds)

    def _step_left(self, now: float) -> float:
        """Return the seconds until a step ends, which may be one of many alike that nobody reports."""
        seconds, left = self.load.decode_seconds, self.reported + self.load.busy - now
        if left < 0.0 and self.load.num_decodes and seconds:
            return left % seconds
        return max(left, 0.0)

    def first_token(
        self, deadline: float, objective: float, seconds: float, num_blocks: int, now: float
    ) -> FirstToken | None:
        """Return when a request would have its first token, if it were sent now.

        Parameters
        ----------
        deadline : of its first token, infinite without any.
        objective : its TTFT objective, seconds; likewise.
        seconds : of prefill work, on this replica.
        num_blocks : that its prompt wants.

        Returns
        -------
        None where the replica predicts nothing.
        """
        costs = self.load.costs
        if costs is None:
            return None
        start = now + self._step_left(now)
        jobs, best_effort = self._jobs(now)
        total = sum([job.seconds for job in jobs])
        num_ahead = bisect_right(jobs, deadline, key=itemgetter(0))
        prefill = self._prefill_share(costs, num_ahead, objective)
        before = None if jobs or best_effort else 0.0
        if before is None and deadline < inf:
            own: triage.DueWork[bool] = triage.DueWork(deadline, seconds, state=False)
            due_before = sum([job.seconds for job in jobs[:num_ahead]])
            jobs.insert(num_ahead, own)
            late = triage.select_feasible(
                jobs, start=start + prefill.fixed_seconds, share=prefill.share, cost=_cost
            )[1]
            before = triage.seconds_before(own, late, by_deadline=due_before)
        if before is None:  # behind all
            before = total + best_effort
        shortest = self.load.decode_seconds
        turn = start - now + max(triage.finish_seconds(prefill, before + seconds, seconds + total), shortest)
        wait = self.capacity_wait(deadline, num_blocks, now)
        if wait:  # capacity comes free at the end of a step
            wait += 0.5 * shortest + max(triage.finish_seconds(prefill, seconds, seconds), shortest)
        in_time = min(wait, max(deadline - now, 0.0)) if self.load.gives_up else wait
        return FirstToken(max(turn, wait), max(turn, in_time))

    def _jobs(self, now: float) -> tuple[list[triage.DueWork[bool]], float]:
        """Return the prompts with deadlines, by deadline, and the work of the others, seconds."""
        load = self.load
        done = max(0.0, now - self.reported - load.busy) * load.prefill_share
        jobs: list[triage.DueWork[bool]] = []
        for until, seconds, _ in load.backlog:
            if done >= seconds:
                done -= seconds
                continue
            jobs.append(triage.DueWork(self.reported + until, seconds - done, state=until <= 0.0))
            done = 0.0
        best_effort = max(0.0, load.best_effort_work - done)
        if self.sent:
            best_effort += sum(each.seconds for each in self.sent if each.deadline == inf)
            jobs += [
                triage.DueWork(each.deadline, each.seconds, state=False)
                for each in self.sent
                if each.deadline < inf
            ]
            jobs.sort(key=itemgetter(0))
        return jobs, best_effort

    def _prefill_share(self, costs: PrefillCosts, num_more: int, objective: float) -> triage.PrefillShare:
        """Return what prompts get of a step beside the streams and so many more decodes."""
        load = self.load
        fixed = load.full_seconds * (1 - load.prefill_share) + costs.decode * num_more
        length = load.full_seconds
        if objective < inf:
            length = max(length, sqrt(costs.step * objective))
        length = max(length, fixed, _SHORTEST_STEP)
        return triage.PrefillShare(0, length, max(1 - fixed / length, triage.LEAST_SHARE))


def _cost(job: triage.DueWork[bool]) -> float | None:
    return None if job.state else job.seconds


_PRICE = 0.3
"""Seconds of prefill work that a second until the first token is worth."""
_MOST_HOLDERS = _MOST_IDLE = 4
"""Replicas that are looked at, of those that hold the longest prefixes, and of those of each device with the
least to do: there a slow replica has no less to do than a fast one."""
_A_REQUEST = 1e-3
"""Seconds that a request counts as beside prefill work, where those with the least to do are looked for."""
_TIER_SECONDS = 60.0
"""Between two looks at which classes have replicas of their own."""
_TIER_PAYS = 1.25
"""Prefill work that comes, over what steps can do that are as short as the tightest class asks, from which on
classes are kept together: below, they lose more by having fewer replicas than others gain."""
_BINDS = 0.95
"""Of the tightest TBT, of which streams that earn slack leave 31/32: no shorter step is so because of it."""
_UNKNOWN_COSTS = PrefillCosts(token=5e-5, pair=0.0, step=0.01, decode=1e-4)
"""Of replicas that predict nothing: what is compared is work, in the unit of this guess."""


class _Offer(NamedTuple):
    """What a request would cost on a replica. The least is chosen."""

    cost: float
    num_requests: int
    last_choice: int
    """Of equal ones, the least recently chosen."""
    number: int
    bid: _Bid
    first_token: FirstToken | None


class _Bid(NamedTuple):
    """What is known of an offer before anything is predicted."""

    least: float
    """A bound of what it costs, from below."""
    number: int
    work: float
    """Seconds of uncached prefill on the reference device."""
    seconds: float
    """Of the same work on the replica itself."""
    num_blocks: int
    """Of KV that the uncached prompt wants."""
    num_cached: int
    """Tokens of the prompt that the replica holds."""


def _about(slo: SLO | None) -> float:
    """Return a TBT objective, rounded down to a quarter of an octave so that there are few; inf for none."""
    return inf if slo is None or slo.tbt is None else 2 ** (floor(4 * log2(slo.tbt)) / 4)


class _Tiers:
    """Which replicas are to have no streams of a class, where work is short.

    The tightest TBT objective of a replica's streams makes all of its steps short, and prompts get less of
    the time. Where more prompts come than such steps can serve, each class whose objective binds goes to as
    few replicas as its prompts and those of tighter ones fill, in the order of their numbers.
    """

    def __init__(self) -> None:
        self.closed: dict[float, list[int]] = {}
        """About which TBT objective -> replicas that are to have no stream with it."""
        self._asked: defaultdict[float, float] = defaultdict(float)
        """About which TBT objective -> seconds of prefill work that came since the last look."""
        self._looked = inf

    def count(
        self, tbt: float, work: float, loads: Callable[[], Mapping[int, ReplicaLoad]], now: float
    ) -> None:
        """Count the prefill work of a request, and look at the classes again if it is time."""
        self._asked[tbt] += work
        self._looked = min(self._looked, now)
        if now - self._looked >= _TIER_SECONDS:
            self._look(loads(), now - self._looked)
            self._asked.clear()
            self._looked = now

    def _look(self, loads: Mapping[int, ReplicaLoad], seconds: float) -> None:
        self.closed = {}
        tightest = min(load.tightest_tbt for load in loads.values())
        share = fmean(load.prefill_share for load in loads.values() if load.tightest_tbt == tightest)
        is_short = sum(self._asked.values()) > _TIER_PAYS * share * len(loads) * seconds
        if not is_short or not any(load.best_effort_work for load in loads.values()):
            return
        bound = [
            each.tightest_tbt for each in loads.values() if each.full_seconds > _BINDS * each.tightest_tbt
        ]
        work = 0.0
        for tbt in sorted(self._asked)[:-1]:  # of the loosest nobody would gain
            work += self._asked[tbt] / seconds
            if tbt > max(bound, default=0.0):
                break
            kept = accumulate((load.prefill_share for load in loads.values()), initial=0.0)
            self.closed[tbt] = [each for each, held in zip(loads, kept, strict=False) if held >= work]


class SLORouter(routing.Router):
    """The replica where a request costs the fleet least: uncached prefill, and its wait at a price.

    The cost is that of its uncached prompt on one device for all, so that a slow replica does not look
    expensive, only slow; and `_PRICE` for each second until its first token, as predicted. Of more than 8
    replicas for each kind of device, those that hold the most of the prompt and those with the least to do
    are looked at, so a choice costs O(log replicas + blocks).
    """

    reads_reports = True

    def __init__(self) -> None:
        self._views: dict[int, LoadView] = {}
        self._members: dict[int, None] = {}
        self._by_work: defaultdict[str, routing.LeastLoaded] = defaultdict(routing.LeastLoaded)
        """Of each device."""
        self._num_choices = 0
        self._last_choices: dict[int, int] = {}
        self._prefixes = routing.PrefixMemory()
        self._tiers = _Tiers()

    def route(
        self, request: RoutingRequest, now: float = 0.0, excluded: Collection[int] = routing.NONE_EXCLUDED
    ) -> routing.RoutingChoice | None:
        """Return the cheapest replica."""
        tbt = _about(request.slo)
        closed = self._tiers.closed.get(tbt)
        best = self._best(request, now, {*excluded, *closed}) if closed else None
        best = best or self._best(request, now, excluded)
        if best is None:
            return None
        number, bid, first_token = best.number, best.bid, best.first_token
        self._last_choices[number] = self._num_choices = self._num_choices + 1
        self._views[number].send(request.ttft_deadline, bid.seconds, bid.num_blocks, request.request_id)
        self._weigh(number, now)
        self._tiers.count(
            tbt, bid.work, lambda: {each: self._views[each].load for each in self._members}, now
        )
        if request.block_hashes:
            self._prefixes.send(number, request.block_hashes)
        likely = None if first_token is None else first_token.likely
        return routing.RoutingChoice(number, "prefix" if bid.num_cached else "cost", likely)

    def take(self, replica: int, request: RoutingRequest) -> None:
        """Take it to hold the prompt; its next report counts the request."""
        if request.block_hashes:
            self._prefixes.send(replica, request.block_hashes)

    def num_held(self, request: RoutingRequest) -> Mapping[int, int]:
        """Return how many tokens of a prompt each replica is taken to hold, of those that hold some."""
        holders = self._prefixes.look_up(request.block_hashes)
        return {
            number: holders.num_held(number) * self._views[number].limits.block_size
            for number in holders.longest_first()
        }

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        """Count it no more."""
        view = self._views.get(replica)
        if view is not None:
            view.num_ended += 1
            if view.sent:
                view.take_back(request.request_id)

    def on_report(self, replica: int, load: ReplicaLoad, now: float) -> None:
        """Take a report."""
        view = self._views.get(replica)
        if view is not None:
            view.on_report(load, now)
            self._weigh(replica, now)

    def least_wait(self, request: RoutingRequest, now: float) -> float | None:
        """Return the predicted seconds until the first token where it is soonest."""
        offers = [self._offer(bid, request, now) for bid in self._bids(request, now, routing.NONE_EXCLUDED)]
        return min([each.first_token.seconds for each in offers if each.first_token], default=None)

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        """Let a replica be chosen."""
        looked_at_all = self._looks_at_all
        self._members[replica] = None
        if replica not in self._views:
            limits = limits or ReplicaLimits(
                max_model_len=0, max_num_seqs=256, num_blocks=1 << 16, block_size=16
            )
            self._views[replica] = LoadView(limits)
            self._prefixes.join(replica, limits.num_blocks)
        self._by_work[self._views[replica].limits.device].join(replica)
        if looked_at_all and not self._looks_at_all:
            for each in self._members:
                self._weigh(each, self._views[each].reported)

    def leave(self, replica: int) -> None:
        """Choose a replica no more; what it holds is forgotten."""
        self._members.pop(replica, None)
        if (view := self._views.pop(replica, None)) is not None:
            self._by_work[view.limits.device].leave(replica)
        self._last_choices.pop(replica, None)
        self._prefixes.forget(replica)

    @property
    def _looks_at_all(self) -> bool:
        """Whether a choice looks at all members."""
        return len(self._members) <= (_MOST_HOLDERS + _MOST_IDLE) * len(self._by_work)

    def _candidates(self, holders: routing.Holders, excluded: Collection[int]) -> list[int]:
        """Return the replicas to look at."""
        if self._looks_at_all:
            return [number for number in self._members if number not in excluded]
        # Of those that hold as much, others at each choice.
        longest_first = holders.longest_first(self._num_choices % (1 + next(reversed(self._members))))
        allowed = (number for number in longest_first if number in self._members and number not in excluded)
        looked_at = list(islice(allowed, _MOST_HOLDERS))
        others = {*excluded, *looked_at}
        for by_work in self._by_work.values():
            looked_at += by_work.least(_MOST_IDLE, others)
        return looked_at

    def _weigh(self, number: int, now: float) -> None:
        """Note how much a replica has to do, where not all are looked at."""
        if self._looks_at_all:
            return
        view = self._views[number]
        work = view.work_left(now) + _A_REQUEST * view.num_requests
        by_work = self._by_work[view.limits.device]
        if work != by_work.loads[number]:
            by_work.put(number, work)

    def _bids(self, request: RoutingRequest, now: float, excluded: Collection[int]) -> list[_Bid]:
        """Return what is known at once of the replicas to look at, those first that may be the cheapest."""
        if not self._members:
            return []
        first, holders = next(iter(self._members)), self._prefixes.look_up(request.block_hashes)
        # The costs by which the work of a choice is measured, wherever it is done.
        reference = self._views[first].load.costs or _UNKNOWN_COSTS
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        bids = []
        for number in self._candidates(holders, excluded):
            view = self._views[number]
            # One token at least is computed.
            num_cached = min(holders.num_held(number) * view.limits.block_size, max(0, num_tokens - 1))
            work = reference.seconds(num_tokens - num_cached, num_cached)
            num_blocks = view.limits.num_blocks_for(num_tokens - num_cached)
            seconds = (view.load.costs or _UNKNOWN_COSTS).seconds(num_tokens - num_cached, num_cached)
            least = work if view.load.costs is None else work + _PRICE * view.soonest(seconds, now)
            bids.append(_Bid(least, number, work, seconds, num_blocks, num_cached))
        bids.sort()
        return bids

    def _best(self, request: RoutingRequest, now: float, excluded: Collection[int]) -> _Offer | None:
        """Return the least offer; where even the least that it can be is more, none is asked for."""
        best: _Offer | None = None
        for bid in self._bids(request, now, excluded):
            if best is not None and bid.least > best.cost:
                break
            offer = self._offer(bid, request, now)
            if best is None or offer < best:
                best = offer
        return best

    def _offer(self, bid: _Bid, request: RoutingRequest, now: float) -> _Offer:
        """Return what a request would cost on a replica."""
        number = bid.number
        view = self._views[number]
        deadline = request.ttft_deadline
        first_token = view.first_token(deadline, request.ttft_objective, bid.seconds, bid.num_blocks, now)
        if first_token is not None:
            wait = first_token.seconds
        else:
            wait = view.num_requests / view.limits.max_num_seqs
            wait += view.capacity_wait(deadline, bid.num_blocks, now)
        last_choice = self._last_choices.get(number, -1)
        return _Offer(bid.work + _PRICE * wait, view.num_requests, last_choice, number, bid, first_token)
