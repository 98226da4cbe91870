"""What a router knows of a replica's load: its last report, and what it was sent since."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import NamedTuple

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.scheduler.triage import (
    LEAST_SHARE,
    Demand,
    Ends,
    FreeCapacity,
    Job,
    PrefillShare,
    capacity_wait,
    finish_seconds,
    seconds_before,
    select_feasible,
)

_A_BIT_LESS = 1 - 1e-9
"""So that a sum that is rounded is no less than a bound of it."""
_SHORTEST_STEP = 1e-4
"""Seconds: of a replica that reports no time for a step."""


PromptJob = Job[bool]
"""Of a prompt no more is known than its work, its deadline, and whether it is protected."""


class FirstToken(NamedTuple):
    """When a request would have its first token, seconds from now."""

    turn: float
    """By the work that is done before."""
    capacity: float
    """By when it gets a slot and blocks; 0 where they are free."""
    is_lost_if_late: bool
    """Whether capacity that comes too late is of no use: the request is then served behind all others."""
    left: float
    """Until it is due."""

    @property
    def seconds(self) -> float:
        """Until the first token, late or not."""
        return max(self.turn, self.capacity)

    @property
    def likely(self) -> float:
        """Until the first token, if that comes in time: else it comes at a time that nothing here tells."""
        capacity = min(self.capacity, max(self.left, 0.0)) if self.is_lost_if_late else self.capacity
        return max(self.turn, capacity)


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
    ends: Ends = field(default_factory=Ends)

    def on_report(self, load: ReplicaLoad, now: float) -> None:
        """Take a report, and count no more what it counts."""
        if self.reported > -inf and load.num_running:
            self.ends.count(now - self.reported, self.load.num_running, self.num_ended)
        self.num_ended = 0
        self.load, self.reported = load, now
        self.num_sent = max(
            self.num_sent, load.num_taken
        )  # it was sent some that nobody asked a router about
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
        ahead = [Demand(self.reported + until, num, wanted) for until, _, num in load.backlog if num]
        if sent:
            ahead = sorted((*ahead, *(Demand(each.deadline, 1, each.num_blocks) for each in sent)))
        given_back = max(num_held / max(load.num_running + num_waiting, 1), 1.0)
        capacity = FreeCapacity(num_free, load.num_free_blocks, given_back, self.ends.gap(load.num_running))
        wait = capacity_wait(ahead, Demand(deadline, 1, num_blocks), capacity, self.reported)
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
        load = self.load
        start = max(now, self.reported + load.busy)
        return start - now + max(_A_BIT_LESS * seconds, load.decode_seconds)

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
        start = max(now, self.reported + self.load.busy)
        jobs, best_effort = self._jobs(now)
        total = sum([job.seconds for job in jobs])
        num_ahead = bisect_right(jobs, deadline, key=_deadline)
        prefill = self._prefill_share(costs, num_ahead, objective)
        before = None
        if deadline < inf:
            own: PromptJob = Job(deadline, seconds, state=False)
            due_before = sum([job.seconds for job in jobs[:num_ahead]])
            jobs.insert(num_ahead, own)
            late = select_feasible(
                jobs, start=start + prefill.fixed_seconds, share=prefill.share, cost=_cost
            )[1]
            before = seconds_before(own, late, by_deadline=due_before)
        if before is None:  # behind all
            before = total + best_effort
        shortest = self.load.decode_seconds
        turn = start - now + max(finish_seconds(prefill, before + seconds, seconds + total), shortest)
        wait = self.capacity_wait(deadline, num_blocks, now)
        if wait:  # capacity comes free at the end of a step
            wait += 0.5 * shortest + max(finish_seconds(prefill, seconds, seconds), shortest)
        return FirstToken(turn, wait, self.load.gives_up, deadline - now)

    def _jobs(self, now: float) -> tuple[list[PromptJob], float]:
        """Return the prompts with deadlines, by deadline, and the work of the others, seconds."""
        load = self.load
        done = max(0.0, now - self.reported - load.busy) * load.prefill_share
        jobs: list[PromptJob] = []
        for until, seconds, _ in load.backlog:
            if done >= seconds:
                done -= seconds
                continue
            jobs.append(Job(self.reported + until, seconds - done, state=until <= 0.0))
            done = 0.0
        best_effort = max(0.0, load.best_effort_work - done)
        if self.sent:
            best_effort += sum(each.seconds for each in self.sent if each.deadline == inf)
            jobs += [
                Job(each.deadline, each.seconds, state=False) for each in self.sent if each.deadline < inf
            ]
            jobs.sort(key=_deadline)
        return jobs, best_effort

    def _prefill_share(self, costs: PrefillCosts, num_more: int, objective: float) -> PrefillShare:
        """Return what prompts get of a step beside the streams and so many more decodes."""
        load = self.load
        fixed = load.full_seconds * (1 - load.prefill_share) + costs.decode * num_more
        length = load.full_seconds
        if objective < inf:
            length = max(length, sqrt(costs.step * objective))
        length = max(length, fixed, _SHORTEST_STEP)
        return PrefillShare(0, length, max(1 - fixed / length, LEAST_SHARE))


def _deadline(job: PromptJob) -> float:
    return job.deadline


def _cost(job: PromptJob) -> float | None:
    return None if job.state else job.seconds
