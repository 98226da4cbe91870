"""As many replicas as carry the work that arrives within the objectives of the requests."""

from __future__ import annotations

from collections import deque
from math import ceil, inf

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.offered_work import LONGEST_WINDOW, Offered, OfferedWork
from onbeat.scheduler.cluster.scaling_policy import FleetLoad, ScalingPolicy, Wanted

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
        self._planned = PLANNED_SHARE
        self.planned_share = PLANNED_SHARE

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
        wanted = self._wanted(fleet, now)
        self.planned_share = self._planned
        return wanted

    def _wanted(self, fleet: FleetLoad, now: float) -> Wanted:
        self._forget(now)
        work, num = self._work, fleet.num_expected
        minute = work.of_last(self._minute, now)
        self.share = work.share(minute, max(1, num))
        self.late_share = minute.num_missed / minute.num_requests if minute.num_requests else 0.0
        needed = work.needed(minute, SPARE * self._planned, fleet.most)
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
            work.needed(each.scaled(1.0, backlog=backlog), self._planned, fleet.most) for each in loads
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
            if offered.surely_misses:
                num = fleet.num_expected
                if num < fleet.most:
                    share = self._work.share(offered, max(1, num))
                    self._planned = min(self._planned, max(share, _LEAST_SHARE))
                return min(fleet.most, num + ceil(num * min(1.0, offered.num_missed / offered.num_requests)))
        return 0

    def _trust(self, minute: Offered, fleet: FleetLoad) -> None:
        """Plan for what was carried for a minute without a late request."""
        is_clean = not minute.num_missed and fleet.settled >= self._minute + _BACKLOG_SECONDS
        if is_clean and fleet.num_ready:
            share = self._work.share(minute, fleet.num_ready)
            self._planned = max(self._planned, min(PLANNED_SHARE, share))

    def _forget(self, now: float) -> None:
        passed = max(0.0, now - self._time)
        self._time = now
        self._planned += (PLANNED_SHARE - self._planned) * min(1.0, passed / _FORGET_SECONDS)

    def _count_late(self, request: RoutingRequest, now: float) -> None:
        """Count a request once, if an idle replica could have been in time with it."""
        work, request_id = self._work, request.request_id
        if request_id not in self._late and work.costs is not None and not work.is_hopeless(request):
            self._late.add(request_id)
            work.on_miss(now)


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
