"""What decides how many replicas a fleet should have: what it hears, and what it answers.

The policy `objective` measures the work that arrives. It asks for as many replicas as carry that work within
the objectives of the requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf, log, sqrt
from typing import NamedTuple

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.scheduler.cluster.events import RoutingRequest


class FleetLoad(NamedTuple):
    """A fleet, as a scaling policy sees it."""

    num_ready: int
    num_expected: int
    """Replicas that serve, start or start again."""
    num_open: int
    """Requests that have not ended."""
    settled: float
    """Seconds for which the replicas that serve have been the same."""
    most: int
    """Replicas that there may be."""
    loads: Sequence[tuple[ReplicaLoad, ReplicaLimits]]
    """Last reports of those that are ready."""


class Wanted(NamedTuple):
    """How many replicas there should be."""

    num_replicas: int
    why: str = ""
    """One word, where that differs from what there is: `work`, `late` or `spare`."""


class ScalingPolicy:
    """Hears what comes to a fleet and what becomes of it; this one knows nothing and leaves all as it is.

    Times are seconds of the clock by which requests arrive.
    """

    needs_costs = False
    """Whether it works only where replicas predict steps."""
    cools_down = True
    """Whether a replica stays for a while after anything has changed; else the policy sees to that itself."""
    share: float | None = None
    """See `ScalingView`; so is the next."""
    planned_share: float | None = None
    late_share: float = 0.0
    """Of the requests of the last minute, those that were not in time, or predicted not to be."""

    def on_arrival(self, request: RoutingRequest, now: float) -> None:
        """Hear of a request."""

    def on_sent(self, request: RoutingRequest, predicted_ttft: float | None, now: float) -> None:
        """Hear in how many seconds its first token is expected; None where nobody predicts."""

    def on_first_token(self, request: RoutingRequest, num_cached_tokens: int, now: float) -> None:
        """Hear that it has begun, and what of its prompt was in a prefix cache."""

    def on_refusal(self, request: RoutingRequest, now: float) -> None:
        """Hear that nobody has capacity for it."""

    def on_end(self, request: RoutingRequest, num_output_tokens: int | None, now: float) -> None:
        """Hear that it has ended.

        Parameters
        ----------
        num_output_tokens : that it has had; None where its client has left, or it was refused.
        """

    def on_report(self, load: ReplicaLoad, limits: ReplicaLimits) -> None:
        """Hear how a replica stands."""

    def look(self, fleet: FleetLoad, now: float) -> Wanted:
        """Return how many replicas there should be; called about once a second."""
        del now
        return Wanted(fleet.num_expected)


LONGEST_WINDOW = 240
"""Seconds over which work is summed up at most."""
_SURE = 3.0
"""Standard deviations by which a sum of random requests has to pass a bound."""
LATE_SHARE = 0.01
"""Of the requests: if more are late, there are too few replicas; what fewer ask for decides nothing."""
_PACE_RATIO = 0.02
"""TBT objectives that differ by less than this, as a share, are counted as one."""
_MEAN_OF = 200
"""Requests over which the means of lengths and of prefix hits are taken."""
_GUESSED_OUTPUT = 200.0
"""Output tokens of a request before any has ended."""


@dataclass(slots=True)
class _Mean:
    """A mean that forgets: of all values at first, then of about the last `_MEAN_OF`."""

    value: float
    num: int = 0

    def add(self, value: float) -> None:
        self.num = min(self.num + 1, _MEAN_OF)
        self.value += (value - self.value) / self.num


@dataclass(slots=True)
class _Second:
    """What arrived within a second."""

    when: int
    num_requests: int = 0
    prefill: float = 0.0
    """Seconds of prompt work."""
    squares: float = 0.0
    """Sum of the squares of what each request takes, prompt and answer."""
    num_missed: int = 0
    """Requests of this second, or of an earlier one, that turned out not to be in time in this one."""
    paces: Counter[int] = field(default_factory=Counter)
    """Requests by their TBT objective, in units of `_PACE_RATIO` of its logarithm."""


class Offered(NamedTuple):
    """The load of some seconds, a second."""

    num_requests: float
    prefill: float
    """Seconds of prompt work."""
    num_tokens: float
    """Output tokens."""
    error: float
    """Of the work as a share of it, one standard deviation, as that of a sum of independent requests."""
    num_missed: float
    tbt: float
    """Objective, seconds, which more than a few requests have or a tighter one that a replica can keep;
    infinite where there is none."""

    def scaled(self, factor: float, *, backlog: float = 0.0) -> Offered:
        """Return so many times this load, and a backlog of prompt work for each second."""
        return self._replace(
            num_requests=self.num_requests * factor,
            prefill=self.prefill * factor + backlog,
            num_tokens=self.num_tokens * factor,
        )

    @property
    def surely(self) -> Offered:
        """The load that there is at least, but for chance."""
        return self.scaled(max(0.0, 1 - _SURE * self.error))


def _is_surely_many(num: float, num_requests: float) -> bool:
    """Return whether these are more than `LATE_SHARE` of the requests, whatever is chance in that."""
    return num - _SURE * sqrt(num) > LATE_SHARE * num_requests


class OfferedWork:
    """Sums up what arrives, in the seconds of work that it is for a replica of this fleet.

    The length of an answer is not known at arrival, and what a prefix cache will hold is not either: both are
    taken to be as they were in the requests before. Each call costs O(1), but for `of_last`, which looks at
    as many seconds.
    """

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=LONGEST_WINDOW + 1)
        self._output = _Mean(_GUESSED_OUTPUT)
        self._prompt = _Mean(0.0)
        self._cached = _Mean(0.0)
        """Share of a prompt that was found in a prefix cache."""
        self.costs: PrefillCosts | None = None
        """As a replica reported last."""
        self.limits: ReplicaLimits | None = None

    def on_arrival(self, request: RoutingRequest, now: float) -> None:
        """Count a request, unless every replica refuses it whatever it has to do."""
        if request.rather_refused and self.is_hopeless(request):
            return
        num_prompt = request.num_prompt_tokens
        self._prompt.add(num_prompt)
        second = self.second(now)
        second.num_requests += 1
        if request.slo is not None and request.slo.tbt is not None:
            second.paces[round(log(request.slo.tbt) / _PACE_RATIO)] += 1
        if self.costs is not None:
            prefill = self.prefill(num_prompt)
            second.prefill += prefill
            second.squares += (prefill + self._output.value * self.decode) ** 2

    def on_first_token(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Learn what the prefix cache held of a prompt."""
        self._cached.add(min(1.0, num_cached_tokens / max(1, num_prompt_tokens)))

    def on_end(self, num_output_tokens: int) -> None:
        """Learn how long an answer was."""
        self._output.add(num_output_tokens)

    def prefill(self, num_prompt_tokens: int) -> float:
        """Return the seconds of work of a prompt, as much of it cached as was of others."""
        assert self.costs is not None
        num_cached = int(self._cached.value * num_prompt_tokens)
        return self.costs.seconds(num_prompt_tokens - num_cached, num_cached)

    def is_hopeless(self, request: RoutingRequest) -> bool:
        """Return whether an idle replica would not be in time with a request: then no number of them is."""
        if self.costs is None:
            return False
        tbt = inf if request.slo is None or request.slo.tbt is None else request.slo.tbt
        idle = self.prefill(request.num_prompt_tokens) + self._least_step
        return idle >= request.ttft_objective or self._least_step >= tbt

    @property
    def _least_step(self) -> float:
        """Seconds of a step with next to nothing in it: it reads all weights."""
        return 0.0 if self.costs is None else max(self.costs.decode_base, self.costs.step)

    @property
    def decode(self) -> float:
        """Seconds that an output token adds to a step, at the mean context."""
        return 0.0 if self.costs is None else self.costs.decode_seconds(self._context)

    @property
    def _context(self) -> float:
        return self._prompt.value + self._output.value / 2

    def of_last(self, seconds: int, now: float) -> Offered:
        """Return the load of the last seconds, the present one left out."""
        end = int(now)
        num_requests = num_missed = 0
        prefill = squares = 0.0
        paces: Counter[int] = Counter()
        for each in reversed(self._seconds):
            if each.when >= end:
                continue
            if each.when < end - seconds:
                break
            num_requests += each.num_requests
            num_missed += each.num_missed
            prefill += each.prefill
            squares += each.squares
            for pace, num in each.paces.items():  # Counter.update takes three times as long
                paces[pace] += num
        num_tokens = num_requests * self._output.value
        work = prefill + num_tokens * self.decode
        return Offered(
            num_requests=num_requests / seconds,
            prefill=prefill / seconds,
            num_tokens=num_tokens / seconds,
            error=sqrt(squares) / work if work > 0 else 0.0,
            num_missed=num_missed / seconds,
            tbt=self._kept_tbt(paces, num_requests),
        )

    def _kept_tbt(self, paces: Counter[int], num_requests: int) -> float:
        """Return the objective that steps have to keep: see `Offered.tbt`."""
        num = 0
        for pace in sorted(paces):
            tbt = exp(pace * _PACE_RATIO)
            if tbt > self._least_step:
                num += paces[pace]
                if _is_surely_many(num, num_requests):
                    return tbt
        return inf

    def share(self, offered: Offered, num_replicas: int) -> float:
        """Return the share of its time that each of so many replicas would be busy with a load.

        A replica makes as many steps a second as the TBT objective asks for, and as its memory and its slots
        need to generate that many tokens. Each step has a fixed cost, which a prompt's work may hide: a step
        of decodes alone reads all weights. What the objective's steps cost by themselves, no number of
        replicas lowers: the share is that of the time which they leave.
        """
        costs, limits = self.costs, self.limits
        if costs is None or limits is None or not offered.num_requests:
            return 0.0
        num_tokens, prefill = offered.num_tokens / num_replicas, offered.prefill / num_replicas
        num_streams = max(1.0, min(limits.max_num_seqs, limits.num_streams(max(1.0, self._context))))
        num_steps = max(1 / offered.tbt, num_tokens / num_streams)
        fixed = max(num_steps * self._least_step, num_steps * costs.step + prefill)
        kept = self._least_step / offered.tbt
        return (num_tokens * self.decode + fixed - kept) / (1 - kept)

    def needed(self, offered: Offered, share: float, most: int) -> int:
        """Return the fewest replicas that a load keeps busy for at most this share of their time."""
        if not offered.num_requests:
            return 0
        num_replicas = max(1, min(most, ceil(self.share(offered, 1) / share)))
        # what each step costs does not shrink with the load, but for that it does
        while num_replicas > 1 and self.share(offered, num_replicas - 1) <= share:
            num_replicas -= 1
        while num_replicas < most and self.share(offered, num_replicas) > share:
            num_replicas += 1
        return num_replicas

    def second(self, now: float) -> _Second:
        """Return what is counted in the second of a time, which does not go back."""
        when = int(now)
        if not self._seconds or self._seconds[-1].when < when:
            self._seconds.append(_Second(when))
        return self._seconds[-1]


PLANNED_SHARE = 0.85
"""Of its time, up to which a replica is loaded, unless requests are late before."""
SPARE = 0.82
"""Of that share, below which those that stay have to be for one to go."""
_LEAST_SHARE = 0.2
"""To which late requests can bring the planned share down."""
_MINUTE = 60
_WINDOWS = (5, 15, _MINUTE, LONGEST_WINDOW)
"""Seconds over which a load is looked at: what is plain is seen soon, what is not later."""
_BACKLOG_SECONDS = 60.0
"""Within which prompts that wait are to be worked off, beside what arrives. For so long after a replica has
come or gone late requests say nothing: they may have waited for that."""
_FORGET_SECONDS = 86400.0
"""In which a planned share that late requests have brought down comes back."""


class ObjectiveScaling(ScalingPolicy):
    """Holds the work that arrives against what replicas can do, and looks for requests that are late.

    Up: where the load, as far as it is no chance, would keep the replicas that serve or start busy for more
    than the planned share of their time; or where requests are late, or predicted to be. Then that share was
    too much for this load, and a lower one is planned from then on. Down: where one replica less would have
    carried the worst minute of the last `down_seconds`, with something to spare.
    """

    needs_costs = True

    def __init__(self, down_seconds: float) -> None:
        self._work = OfferedWork()
        self._late: set[str] = set()
        """Open requests that have been counted as late."""
        self._needs = _RecentPeak(down_seconds)
        # What is no reason to keep a replica is none to start one.
        self._windows = [each for each in _WINDOWS if each <= max(down_seconds, _WINDOWS[0])]
        self._minute = min(_MINUTE, int(down_seconds))
        self._time = inf
        self.planned_share: float = PLANNED_SHARE

    def on_arrival(self, request: RoutingRequest, now: float) -> None:
        """Count its work."""
        self._work.on_arrival(request, now)

    def on_sent(self, request: RoutingRequest, predicted_ttft: float | None, now: float) -> None:
        """Count it as late if it is predicted to be."""
        if (
            predicted_ttft is not None
            and not request.num_output_tokens
            and now + predicted_ttft > request.ttft_deadline
        ):
            self._count_late(request, now)

    def on_first_token(self, request: RoutingRequest, num_cached_tokens: int, now: float) -> None:
        """Count it as late if it is; learn what was cached."""
        self._work.on_first_token(request.num_prompt_tokens, num_cached_tokens)
        if now > request.ttft_deadline and not request.num_output_tokens:
            self._count_late(request, now)

    def on_refusal(self, request: RoutingRequest, now: float) -> None:
        """Count it as late."""
        self._count_late(request, now)

    def on_end(self, request: RoutingRequest, num_output_tokens: int | None, now: float) -> None:
        """Learn how long its answer was; count it as late if it had none in time."""
        if num_output_tokens:
            self._work.on_end(num_output_tokens)
        elif num_output_tokens == 0 and now > request.ttft_deadline:
            self._count_late(request, now)
        self._late.discard(request.request_id)

    def on_report(self, load: ReplicaLoad, limits: ReplicaLimits) -> None:
        """Take what prompts and steps cost."""
        if load.costs is not None:
            self._work.costs, self._work.limits = load.costs, limits

    def look(self, fleet: FleetLoad, now: float) -> Wanted:
        """Return what the load needs."""
        self._forget(now)
        work, num = self._work, fleet.num_expected
        minute = work.of_last(self._minute, now)
        self.share = work.share(minute, max(1, num))
        self.late_share = minute.num_missed / minute.num_requests if minute.num_requests else 0.0
        needed = work.needed(minute, SPARE * self.planned_share, fleet.most)
        num_for_late = self._num_for_late(fleet, now)
        self._needs.add(max(needed, num_for_late, int(fleet.num_open > 0)), now)
        num_for_work = self._num_for_work(fleet, now)
        if num_for_work > num > 0:  # where there is none, the next request starts one
            return Wanted(num_for_work, "work")
        if num_for_late > num:
            return Wanted(num_for_late, "late")
        self._trust(minute, fleet)
        # One that is not ready carries nothing, and is the first to go.
        num_left = min(num - 1, fleet.num_ready)
        is_spare = self._needs.covers(now) and self._needs.peak <= num_left
        return Wanted(num - 1, "spare") if is_spare else Wanted(num)

    def _num_for_work(self, fleet: FleetLoad, now: float) -> int:
        """Return the replicas that the load of some window surely needs."""
        work = self._work
        waiting = sum(
            sum(seconds for _, seconds, _ in load.backlog) + load.best_effort_work for load, _ in fleet.loads
        )
        loads = [work.of_last(seconds, now).surely for seconds in self._windows]
        backlog = waiting / _BACKLOG_SECONDS
        return max(
            work.needed(each.scaled(1.0, backlog=backlog), self.planned_share, fleet.most) for each in loads
        )

    def _num_for_late(self, fleet: FleetLoad, now: float) -> int:
        """Return the replicas that late requests ask for, 0 if none are late; plan for less from then on.

        The more of them are late, the more come at once: twice as many if all are.
        """
        if fleet.num_ready != fleet.num_expected:
            return 0
        for seconds in self._windows:
            if fleet.settled < seconds + _BACKLOG_SECONDS:
                return 0
            offered = self._work.of_last(seconds, now)
            if _is_surely_many(offered.num_missed * seconds, offered.num_requests * seconds):
                num = fleet.num_expected
                if num < fleet.most:
                    share = self._work.share(offered, max(1, num))
                    self.planned_share = min(self.planned_share, max(share, _LEAST_SHARE))
                return min(fleet.most, num + ceil(num * min(1.0, offered.num_missed / offered.num_requests)))
        return 0

    def _trust(self, minute: Offered, fleet: FleetLoad) -> None:
        """Plan for what was carried for a minute without a late request."""
        is_clean = not minute.num_missed and fleet.settled >= self._minute + _BACKLOG_SECONDS
        if is_clean and fleet.num_ready:
            share = self._work.share(minute, fleet.num_ready)
            self.planned_share = max(self.planned_share, min(PLANNED_SHARE, share))

    def _forget(self, now: float) -> None:
        passed = max(0.0, now - self._time)
        self._time = now
        self.planned_share += (PLANNED_SHARE - self.planned_share) * min(1.0, passed / _FORGET_SECONDS)

    def _count_late(self, request: RoutingRequest, now: float) -> None:
        """Count a request once, if an idle replica could have been in time with it."""
        work, request_id = self._work, request.request_id
        if request_id not in self._late and work.costs is not None and not work.is_hopeless(request):
            self._late.add(request_id)
            work.second(now).num_missed += 1


class _RecentPeak:
    """The largest of the numbers of late, in O(1)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._numbers: deque[tuple[float, int]] = deque()
        """(when, number), by time: those that a later one is at least as large as are left out."""

    def add(self, number: int, now: float) -> None:
        numbers = self._numbers
        if self._since is None:
            self._since = now
        while numbers and numbers[-1][1] <= number:
            numbers.pop()
        numbers.append((now, number))
        while numbers[0][0] < now - self._seconds:
            numbers.popleft()

    def covers(self, now: float) -> bool:
        """Whether numbers have been added for long enough."""
        return self._since is not None and now - self._since >= self._seconds

    @property
    def peak(self) -> int:
        return self._numbers[0][1]
