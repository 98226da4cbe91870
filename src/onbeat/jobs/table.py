"""The table of open jobs: it gives each call its share of the time that its job has left.

A call of a job arrives. D is the job's deadline, n the number of calls that follow it, h the time between two
calls, w the call's work and u that of a later one, and p what a unit of work takes of late. The call may take

    D - now - n h - n u p

seconds: all but what later calls usually take. Where that is less than w p, the time is too short for all of
them, and they share it by their work: the call may take (D - now - n h) w / (w + n u). That is its end-to-end
objective, so that nothing behind the front door knows of jobs. What nobody states is learnt from ended calls
and jobs of the same kind. JITServe (NSDI 2026) gives deadlines to stages of compound requests likewise; it
knows their graphs, here a caller says at most how many calls follow.

What ended calls and jobs teach of those to come.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from onbeat.core.errors import InvalidRequest, Overloaded, SLOUnattainable
from onbeat.core.request import Placement
from onbeat.core.slo import LONGEST_OBJECTIVE
from onbeat.jobs.call import CallShare, JobCall, JobEnd, JobReport, call_seconds

MOST_TENANTS = 1024
MOST_KINDS = 64
"""Of jobs of one tenant, of which something is learnt."""
_MOST_STAGES = 64
"""Of a job, beyond which nothing more is learnt of how many follow."""
_MEMORY = 64
"""Ended calls that an average is taken over, at most: the newest count most."""
PROMPT_TOKENS = 128
"""Prompt tokens that take as long as an output token: what it takes to generate one, many are computed in."""
CALL_WORK = 4.0
"""Output tokens that take as long as a call without any: to arrive, to be planned, to be heard of."""
_USUAL_LEFT = 3.0
"""Calls that are expected to follow where nothing is known."""
_USUAL_OUTPUT = 256.0
"""Output tokens of a call where nothing is known."""
_QUICK_SHRINK = 1.01
"""By how much the quickest pace is let go at each ended call: one lucky call does not count for ever."""


_T = TypeVar("_T")


def work_of(num_prompt_tokens: float, num_output_tokens: float) -> float:
    """Return how long a call takes, in output tokens."""
    return CALL_WORK + num_prompt_tokens / PROMPT_TOKENS + num_output_tokens


@dataclass(slots=True)
class Mean:
    """A running mean in which new values count for a `1 / _MEMORY` at least."""

    value: float
    count: int = 0

    def add(self, value: float) -> None:
        """Take in one more value."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, _MEMORY)


@dataclass(slots=True)
class KindOfJob:
    """What is known of jobs of one kind."""

    work: Mean = field(default_factory=lambda: Mean(work_of(0, _USUAL_OUTPUT)))
    """Of a call."""
    output: Mean = field(default_factory=lambda: Mean(_USUAL_OUTPUT))
    """Output tokens of a call."""
    between: Mean = field(default_factory=lambda: Mean(0.0))
    """Seconds between calls that follow one another."""
    left: list[Mean] = field(default_factory=list)
    """How many calls followed the first, the second and so on."""

    def calls_left(self, stage: int) -> float:
        """Return how many calls are expected to follow a call that `stage` others came before."""
        if not self.left:
            return _USUAL_LEFT
        return self.left[min(stage, len(self.left) - 1)].value

    def as_prior(self) -> KindOfJob:
        """Return what others of the kind are taken to be like, up to their first own call or end."""
        work, output, between, *left = (
            Mean(each.value) for each in (self.work, self.output, self.between, *self.left)
        )
        return KindOfJob(work, output, between, left)

    def end(self, num_stages: int) -> None:
        """Learn from a job that came to its end."""
        for stage in range(min(num_stages, _MOST_STAGES)):
            if stage == len(self.left):
                self.left.append(Mean(0.0))
            self.left[stage].add(num_stages - 1 - stage)


@dataclass(slots=True)
class Pace:
    """How long a unit of work takes."""

    usual: Mean = field(default_factory=lambda: Mean(0.0))
    """Of late, seconds."""
    quickest: float = 0.0
    """That was seen, seconds: a call takes no less, whatever it is promised."""

    def add(self, seconds: float, work: float) -> None:
        """Learn from a call that ended."""
        pace = seconds / work
        self.usual.add(pace)
        self.quickest = min(pace, self.quickest * _QUICK_SHRINK) if self.quickest else pace


class Lessons:
    """What calls have taught, by tenant and kind of job; of too many, the least recently used are forgotten.

    Nobody's calls bear on what another tenant's get, but for the guess that a tenant, or a kind of it, begins
    with: what was known of the last one.
    """

    def __init__(self) -> None:
        self._tenants = OrderedDict[str, tuple[Pace, OrderedDict[str, KindOfJob]]]()

    def of(self, tenant: str, kind: str) -> tuple[Pace, KindOfJob]:
        """Return what is known of a tenant's calls, and of its jobs of a kind."""
        pace, kinds = _recent(self._tenants, tenant, self._new_tenant, MOST_TENANTS)
        return pace, _recent(kinds, kind, lambda: self._new_kind(kind), MOST_KINDS)

    def _new_tenant(self) -> tuple[Pace, OrderedDict[str, KindOfJob]]:
        last, _ = next(reversed(self._tenants.values()), (Pace(), None))
        return Pace(Mean(last.usual.value), last.quickest), OrderedDict()

    def _new_kind(self, kind: str) -> KindOfJob:
        known = (kinds[kind] for _, kinds in reversed(self._tenants.values()) if kind in kinds)
        return next(known, KindOfJob()).as_prior()


def _recent(known: OrderedDict[str, _T], key: str, make: Callable[[], _T], most: int) -> _T:
    """Return what is known by a key, anew if it is not, and count it as used."""
    if key not in known:
        known[key] = make()
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
    return known[key]


MOST_JOBS = 65_536
"""Open at once; for a further one, that goes which has been without a call for longest."""
MOST_OF_TENANT = 4_096
"""Of them, one tenant's, where callers name tenants."""
FORGOTTEN_AFTER = 60.0
"""Seconds after its deadline at which an open job is forgotten, and after its last call, if that is later."""
LONGEST_KEPT = 60.0
"""Seconds for which the KV of a call is kept behind its end at most, and not beyond the job's deadline."""
_MOST_LOOKED_AT = 16
"""Jobs of which it is looked at each call whether they are to be forgotten: nobody waits for all of them."""
_SAME = 2e-3
"""Seconds by which two statements of one deadline may differ, as clocks are rounded."""
_DOUBT = 1.25
"""A job is refused if it is predicted to take this many times the time that it has: predictions of what
nobody has asked for yet are rough."""


@dataclass(slots=True)
class _Job:
    """A job that is open."""

    key: tuple[str, str]
    first: float
    deadline: float
    stated: JobCall
    """By its first call."""
    pace: Pace
    kind: KindOfJob
    forgotten: float
    num_open: int = 0
    """Calls under way."""
    num_stages: int = 0
    """Times that a call began while none was open: calls one after another."""
    num_ended: int = 0
    work: Mean = field(default_factory=lambda: Mean(0.0))
    """Of a call that came to its end."""
    since: float = 0.0
    """When `num_open` became 0, or ceased to be."""
    in_calls: float = 0.0
    context: int = 0
    """Tokens of prompt and answer of the longest call so far."""
    calls_left: int | None = None
    """As the newest call says."""
    replica: str | None = None
    """That had the call before; None where nobody says."""
    failed: JobEnd | None = None
    """Why the last call to end did not come to its end; None if it did."""

    def is_over(self, now: float) -> bool:
        """Return whether nothing more is expected of it."""
        return not self.num_open and self.forgotten <= now


@dataclass(slots=True)
class OpenCall:
    """A call under way, which its opener closes once."""

    share: CallShare
    job: _Job
    call: JobCall
    arrival: float
    new_tokens: int
    """Of its prompt, those that no call of the job had before."""
    num_prompt_tokens: int


@dataclass(slots=True)
class JobTable:
    """All open jobs. Bounded in number, and in time: those that nobody ends are forgotten.

    Parameters
    ----------
    on_end : hears how each job ended, its seconds in calls, and those between them.
    """

    on_end: Callable[[JobEnd, float, float], None] = lambda _end, _in_calls, _between: None
    _jobs: OrderedDict[tuple[str, str], _Job] = field(default_factory=OrderedDict)
    """In the order in which their last calls ended."""
    _per_tenant: Counter[str] = field(default_factory=Counter)
    _turns: deque[_Job] = field(default_factory=deque)
    """The order in which it is looked whether jobs are to be forgotten; some have ended."""
    _lessons: Lessons = field(default_factory=Lessons)

    def __len__(self) -> int:
        return len(self._jobs)

    def open(
        self, call: JobCall, now: float, *, num_prompt_tokens: int, max_tokens: int, refuses: bool = False
    ) -> OpenCall:
        """Take a call that arrives, and say what it gets of its job's time.

        Parameters
        ----------
        now : seconds.
        num_prompt_tokens, max_tokens : of all its choices together, and of the longest.
        refuses : whether a first call is refused if its job is predicted to be late.

        Raises
        ------
        InvalidRequest : the job has another deadline than the call says, none, or one that has passed.
        Overloaded : too many jobs are open.
        SLOUnattainable : the job is predicted to be late, and its caller prefers to hear so now.
        """
        self._forget(now)
        key = (call.tenant or "", call.job_id)
        job = self._jobs.get(key)
        if job is not None and job.is_over(now):
            self._give_up(job)
            job = None
        is_first = job is None
        if job is None:
            job = self._new(key, call, now)
        else:
            _check_same(job, call)
        new_tokens = num_prompt_tokens - (job.context if num_prompt_tokens > job.context else 0)
        share = self._share(job, call, new_tokens, max_tokens, now)
        if is_first:
            if refuses and share.predicted_job is not None:
                self._check_attainable(job, share.predicted_job, now)
            self._enter(job)
        if not job.num_open:
            if not is_first and job.failed is None:  # else it is sent again
                job.kind.between.add(now - job.since)
            job.since, job.num_stages = now, job.num_stages + 1
        job.num_open += 1
        job.calls_left = call.calls_left
        return OpenCall(share, job, call, now, new_tokens, num_prompt_tokens)

    def close(
        self,
        opened: OpenCall,
        now: float,
        *,
        num_output_tokens: int,
        why: JobEnd | None,
        placement: Placement | None = None,
    ) -> JobReport:
        """Hear that a call ended; return how its job stands.

        Parameters
        ----------
        why : `REFUSED` or `ABANDONED` of a call that did not come to its end. Its caller may send it again,
            so that the job stays open.
        placement : where the call was served; None where nobody says.
        """
        job, num_tokens = opened.job, opened.num_prompt_tokens + num_output_tokens
        job.num_open -= 1
        job.num_ended += 1
        if not job.num_open:
            job.in_calls += now - job.since
            job.since = now
            job.num_stages -= why is not None
        if why is None:
            job.context = max(job.context, num_tokens)
            work = work_of(opened.new_tokens, num_output_tokens)
            job.work.add(work)
            job.kind.work.add(work)
            job.kind.output.add(num_output_tokens)
            job.pace.add(max(now - opened.arrival, 1e-9), work)
        moved = None
        if placement is not None:
            moved = placement.why if job.replica not in (None, placement.replica) else None
            job.replica = placement.replica
        job.failed, end = why, None
        if why is None and job.calls_left == 0 and not job.num_open:
            end = JobEnd.KEPT if now <= job.deadline else JobEnd.LATE
        job.forgotten = max(job.deadline, now) + FORGOTTEN_AFTER
        if end is not None:
            self._end(job, end, now)
        elif self._jobs.get(job.key) is job:
            self._jobs.move_to_end(job.key)
        return JobReport(
            job_id=opened.call.job_id,
            num_calls=job.num_ended,
            elapsed=now - job.first,
            remaining=job.deadline - now,
            share=opened.share.e2e,
            in_calls=job.in_calls,
            replica=job.replica,
            moved=moved,
            end=end,
        )

    # ---- shares ----

    def _share(self, job: _Job, call: JobCall, new_tokens: int, max_tokens: int, now: float) -> CallShare:
        kind = job.kind
        own = work_of(new_tokens, min(max_tokens, kind.output.value))
        known = (job.work if job.work.count else kind.work).value
        num_later = kind.calls_left(job.num_stages) if call.calls_left is None else float(call.calls_left)
        between = num_later * kind.between.value
        usual = job.pace.usual
        later = num_later * known
        least = own * job.pace.quickest
        predicted = None
        knows_left = call.calls_left is not None or (kind.left and kind.left[0].count)
        if kind.work.count and knows_left:  # else it is a guess
            predicted = (own + later) * usual.value + between
        left = job.deadline - now
        if left <= 0:
            return CallShare(e2e=None, predicted_job=predicted)
        seconds = call_seconds(left - between, own, later, usual.value)
        return CallShare(
            e2e=min(max(seconds, least, 1e-3), left),
            predicted_job=predicted,
            kept_for=min(left, LONGEST_KEPT) if num_later else 0.0,
        )

    def _check_attainable(self, job: _Job, predicted: float, now: float) -> None:
        has = job.deadline - now
        if predicted <= has * _DOUBT:
            return
        self.on_end(JobEnd.REFUSED, 0.0, 0.0)
        raise SLOUnattainable(
            f"the job would end {predicted:.3g} s after its first call; its deadline is {has:.3g} s. Give it "
            "more time or fewer calls, or set slo.shed to false to have it served late",
            predicted_ttft=predicted,
            retry_after=predicted - has,
            code="job_unattainable",
        )

    # ---- opening, ending, forgetting ----

    def _new(self, key: tuple[str, str], call: JobCall, now: float) -> _Job:
        """Return a job that begins; it is not in the table yet.

        Raises
        ------
        InvalidRequest : it has no deadline, or one that has passed.
        Overloaded : too many are open.
        """
        if call.deadline is None and call.e2e is None:
            raise InvalidRequest(
                f"job {call.job_id[:40]!r} is not open, and this call states no deadline; state "
                "slo.job.e2e_ms or slo.job.deadline_ms in its first call. A job is forgotten "
                f"{FORGOTTEN_AFTER:.0f} s after its deadline",
                param="slo.job",
            )
        deadline = min(inf if call.deadline is None else call.deadline, now + (call.e2e or inf))
        if deadline <= now:
            raise InvalidRequest(
                f"slo.job.deadline_ms of job {call.job_id[:40]!r} was {now - deadline:.3g} s ago; state a "
                "time to come, in milliseconds since 1970",
                param="slo.job.deadline_ms",
            )
        if deadline > now + LONGEST_OBJECTIVE:  # a difference may be rounded above the limit that was stated
            raise InvalidRequest(
                f"slo.job.deadline_ms of job {call.job_id[:40]!r} is {(deadline - now) / 3600:.3g} h away; "
                "at most 24 h are allowed. It is in milliseconds since 1970",
                param="slo.job.deadline_ms",
            )
        if call.tenant is not None and self._per_tenant[call.tenant] >= MOST_OF_TENANT:
            raise _too_many(f"{MOST_OF_TENANT} jobs of this caller are open")
        if len(self._jobs) >= MOST_JOBS:
            self._make_room()
        pace, kind = self._lessons.of(key[0], call.kind)
        return _Job(key, now, deadline, call, pace, kind, deadline + FORGOTTEN_AFTER, since=now)

    def _make_room(self) -> None:
        """End the job that has been without a call for longest: else a few could hold the table for a day."""
        idle = next((job for job in self._jobs.values() if not job.num_open), None)
        if idle is None:
            raise _too_many(f"{MOST_JOBS} jobs have calls under way")
        self._give_up(idle)

    def _enter(self, job: _Job) -> None:
        self._jobs[job.key] = job
        if job.key[0]:
            self._per_tenant[job.key[0]] += 1
        self._turns.append(job)

    def _end(self, job: _Job, end: JobEnd, now: float) -> None:
        """Take a job out of the table, and learn from it. Calls of it that are open end by themselves."""
        if self._jobs.get(job.key) is not job:
            return  # another call has ended it
        del self._jobs[job.key]
        if tenant := job.key[0]:
            self._per_tenant[tenant] -= 1
            if not self._per_tenant[tenant]:
                del self._per_tenant[tenant]
        if end in (JobEnd.KEPT, JobEnd.LATE):
            job.kind.end(job.num_stages)
        self.on_end(end, job.in_calls, max(now - job.first - job.in_calls, 0.0))

    def _forget(self, now: float) -> None:
        """End jobs of which nothing more has come, of those whose turn it is."""
        for _ in range(min(len(self._turns), _MOST_LOOKED_AT)):
            job = self._turns.popleft()
            if job.is_over(now):
                self._give_up(job)
            elif self._jobs.get(job.key) is job:
                self._turns.append(job)

    def _give_up(self, job: _Job) -> None:
        if job.failed is not None or job.calls_left:
            self._end(job, job.failed or JobEnd.ABANDONED, job.since)
        else:  # nobody said which call was the last
            self._end(job, JobEnd.KEPT if job.since <= job.deadline else JobEnd.LATE, job.since)


def _too_many(what: str) -> Overloaded:
    return Overloaded(
        f"{what}, and no more are taken; end some by a last call with calls_left 0, or wait: a job is "
        f"forgotten {FORGOTTEN_AFTER:.0f} s after its deadline",
        param="slo.job",
        code="too_many_jobs",
    )


def _check_same(job: _Job, call: JobCall) -> None:
    """Check that a later call states no other deadline.

    Raises
    ------
    InvalidRequest : it does.
    """
    for name in ("deadline", "e2e"):
        said, before = getattr(call, name), getattr(job.stated, name)
        if said is not None and (before is None or abs(said - before) > _SAME):
            field_name = f"slo.job.{name}_ms"
            raise InvalidRequest(
                f"{field_name} of job {call.job_id[:40]!r} is another than that of its first call; state the "
                "same in each call, or leave it out of later ones",
                param=field_name,
            )
