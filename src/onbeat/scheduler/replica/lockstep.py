"""Streams in lockstep: who gets a plain token in each step with decodes is counted once for all of them.

For a simulation of one replica. Its steps carry prompts too, and a few rows that are more than plain; those
of the others cost nothing then. A policy that follows deadlines counts streams with one time between tokens
together: while none is late, who of them is due first stays so. Where it has to look at single ones, all go
on in rows of their own. `tests/pure/simulator/test_steady.py` holds such steps against those of single rows.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from onbeat.core.step import BatchShape, ScheduledRequest, SchedulerOutput, new_tuple
from onbeat.scheduler.replica.kv import KVCacheManager
from onbeat.scheduler.replica.planner import Planner, StepInFlight
from onbeat.scheduler.replica.request_state import TOLERANCE, RequestState, SLOState
from onbeat.scheduler.replica.slo.view import RunningView, is_expendable
from onbeat.scheduler.replica.step_plan import StepPlan, sort_key

DECODE = ScheduledRequest("", 0, 1, (), samples=True)
"""The row of each plain decode of a step whose rows nobody reads."""
LEAST = 16
"""Requests that run, below which a policy that follows deadlines has no gain by this."""
_REST_STEPS = 16
"""In which all go on in rows of their own once somebody has looked at single ones: they may do so again."""


class _Peers:
    """Streams with one time between tokens, and when the next one of each is due: ascending, ever."""

    def __init__(self) -> None:
        self.states: list[RequestState] = []
        self.deadlines: list[float] = []

    def add(self, state: RequestState) -> None:
        """Take one in."""
        due = state.slo.next_deadline
        place = bisect_right(self.deadlines, due)
        self.deadlines.insert(place, due)
        self.states.insert(place, state)

    def remove(self, state: RequestState) -> float:
        """Let one go; return when it is due."""
        place = self.states.index(state)
        del self.states[place]
        return self.deadlines.pop(place)

    def late(self, ends: Sequence[float], tbt: float, *, is_gap_mode: bool) -> list[RequestState]:
        """Return those for whom one of some steps ends too late: if anybody, then who is due first."""
        num_late = 0
        for due in self.deadlines:
            if ends[-1] <= due:
                break
            for end in ends:
                if end > due + TOLERANCE:
                    break
                due = (end if is_gap_mode else due) + tbt
            else:
                break
            num_late += 1
        return self.states[:num_late]


class Lockstep:
    """Running requests that are out of the running list as long as each of their tokens is a plain one.

    What is known of one stands as of the step at which it has joined, its blocks left out, until it leaves:
    ahead of a token that may end it, fill a block or come late, or with all others, where somebody looks at
    them.

    Parameters
    ----------
    planner : plans the steps of a batch that has no request yet, one after the other.
    kv : where blocks come from; of a single table.
    token_id : what every row samples; it ends no request.

    Attributes
    ----------
    max_steps : as of `SteadyRun`, for which it stands where no deadlines are followed.
    num_rows : how many they are.
    context : tokens that their next step reads.
    num_begun, num_steps : steps of theirs that were planned, and those of them that have come back.
    """

    def __init__(self, planner: Planner, kv: KVCacheManager, token_id: int) -> None:
        self._planner, self._kv, self._tokens = planner, kv, [token_id]
        make = planner.new_plan
        self._nothing = make(0.0)
        self._running, self._waiting = self._nothing.running, self._nothing.waiting
        make_plan: Callable[..., StepPlan] = LockstepPlan
        planner.new_plan = partial(make_plan, *make.args, lockstep=self, **make.keywords)
        slo = planner.policy.slo
        self._tracker = None if slo is None else slo.tracker
        self._is_gap_mode = planner.config.slo_mode == "gap"
        self.num_rows = self.context = self.num_begun = self.num_steps = self._rests_until = 0
        self._ends: array[float] = array("d")
        """Of all steps that have come back, seconds."""
        self._due: list[tuple[int, tuple[float, ...], RequestState, int]] = []
        """A heap: ahead of which step each leaves, its place, and ahead of which it has joined."""
        self._growing: list[list[RequestState]] = [[] for _ in range(kv.block_size)]
        """Who needs a block in which steps: every so many, one."""
        self.peers: defaultdict[float, _Peers] = defaultdict(_Peers)
        """Where the policy follows deadlines: by the seconds between them, infinite for those without."""
        self._left: list[RequestState] = []
        """Who has left while a step is under way that gives each a token."""

    def plan(self, now: float) -> SchedulerOutput | None:
        """Return the next step where it has a row of each of these and no other; else None.

        As `Scheduler.schedule`, to which it comes where nobody waits, and nobody is to leave. None under a
        policy that follows deadlines: it weighs each step.
        """
        planner, pool = self._planner, self._kv.pool
        if self._tracker is not None:
            return None
        if self._running:
            self.gather()
        has_others = self._running or self._waiting.length or pool.kept.ends
        if has_others or not 0 < self.num_rows <= pool.num_free_blocks:
            return None
        in_flight, shape = planner.in_flight, BatchShape()
        step_id, in_flight.last_plan = in_flight.num_planned, now
        planner.policy.composer.commit(self._nothing)
        self.begin_step(shape)
        in_flight.append(new_tuple(StepInFlight, (step_id, [], (), now, 0.0, 0.0)))
        in_flight.num_planned += 1
        return new_tuple(SchedulerOutput, (step_id, (), (), (), shape, None, None, (), (), (), ()))

    def run(self) -> Lockstep | None:
        """Return what runs the step under way again, of these alone; None where its last run is the first."""
        most = (self._kv.pool.num_free_blocks // self.num_rows - 1) * self._kv.block_size + 1
        self.max_steps = min(self.num_plain_steps, most)
        return self if self.max_steps > 1 else None

    def advance(self, ends: Sequence[float]) -> None:
        """See `SteadyRun.advance`."""
        planner, num_steps = self._planner, len(ends)
        self._begin(num_steps)
        self.num_steps += num_steps
        self._ends.extend(ends)
        self._shape.decode_context_tokens += num_steps * self.num_rows
        planner.in_flight.num_planned += num_steps
        planner.in_flight.last_plan = planner.last_end = ends[-1]

    @property
    def num_plain_steps(self) -> int:
        """How often the step under way may run; with the last somebody leaves."""
        return self._due[0][0] - self.num_steps + 1

    def gather(self) -> int:
        """Take in who runs and is known to get a plain token next; return the blocks that this needs of all.

        Where blocks are so few that somebody may be preempted, all go on in rows of their own.
        """
        tracker, in_flight = self._tracker, self._planner.in_flight
        are_few = tracker is not None and len(self._running) + self.num_rows < LEAST
        if in_flight or (are_few and not self.num_rows):
            return 0
        if tracker is None or (
            not are_few and in_flight.num_planned >= self._rests_until and not tracker.tenants.are_several
        ):
            for state in self._running.copy():
                if state.plain_until and not state.is_guided and (tracker is None or _is_even(state.slo)):
                    self._join(state)
        num_growing = len(self._growing[self.num_begun % len(self._growing)])
        if num_growing + len(self._running) <= self._kv.pool.num_free_blocks:
            return num_growing
        self._leave_all()
        return 0

    def tell_apart(self) -> None:
        """Let all go on in rows of their own for a while."""
        self._rests_until = self._planner.in_flight.num_planned + _REST_STEPS
        self._leave_all()

    def _join(self, state: RequestState) -> None:
        num_steps = self.num_steps
        due = num_steps + state.plain_until - state.num_tokens
        grows = num_steps + state.num_allocated_tokens - state.num_computed_tokens
        heappush(self._due, (due, state.sort_key, state, num_steps))
        if grows <= due:
            self._growing[grows % len(self._growing)].append(state)
        if self._tracker is not None:
            self.peers[_tbt(state.slo)].add(state)
        self.num_rows += 1
        self.context += state.num_computed_tokens + 1
        self._running.remove(state)

    def _leave(self, state: RequestState, joined: int) -> None:
        """Let a request go on in a row of its own, with what it has got."""
        num_tokens, num_begun = self.num_steps - joined, self.num_begun
        state.num_computed_tokens += num_begun - joined
        state.num_in_flight_tokens = num_begun - self.num_steps
        state.num_tokens += num_tokens
        state.output_token_ids += self._tokens * num_tokens
        if state.times is not None:
            state.times.extend(self._ends[joined:])
        if self._tracker is not None:
            slo = state.slo
            due = self.peers[_tbt(slo)].remove(state)
            if num_tokens:
                slo.last_delivery = self._ends[-1]
                slo.next_deadline = slo.objective_deadline = due
        place = (num_begun + state.num_allocated_tokens - state.num_computed_tokens) % len(self._growing)
        self._growing[place] = [each for each in self._growing[place] if each is not state]
        self.num_rows -= 1
        self.context -= state.num_computed_tokens + 1
        insort(self._running, state, key=sort_key)
        if state.num_in_flight_tokens:
            self._left.append(state)

    def _leave_all(self) -> None:
        for _, _, state, joined in self._due:
            self._leave(state, joined)
        self._due.clear()

    def _move_on(self, ends: Sequence[float]) -> list[RequestState]:
        """Let each be due as after a token in time with each of some steps.

        Those go for whom one of these steps ends too late; they are returned.
        """
        late: list[RequestState] = []
        for tbt, peers in self.peers.items():
            if peers.states and peers.deadlines[0] < ends[-1]:
                late += peers.late(ends, tbt, is_gap_mode=self._is_gap_mode)
        if late:
            gone = {id(state) for state in late}
            for _, _, state, joined in self._due:
                if id(state) in gone:
                    self._leave(state, joined)
            self._due = [each for each in self._due if id(each[2]) not in gone]
            heapify(self._due)
        for tbt, peers in self.peers.items():
            if self._is_gap_mode:
                peers.deadlines = [ends[-1] + tbt] * len(peers.states)
            elif tbt < inf:
                for _ in ends:  # one after the other, as rounding has it
                    peers.deadlines = [due + tbt for due in peers.deadlines]
        return late

    def count(self, shape: BatchShape) -> None:
        """Let a step have a row of each."""
        num_rows = self.num_rows
        shape.num_decodes += num_rows
        shape.num_new_tokens += num_rows
        shape.num_sequences += num_rows
        shape.num_lm_head_rows += num_rows
        shape.decode_context_tokens += self.context

    def begin_step(self, shape: BatchShape) -> None:
        """Let a step that is carried out have a row of each."""
        self._shape = shape
        self.count(shape)
        self._begin(1)

    def end_step(
        self, states: list[RequestState], rows: tuple[ScheduledRequest, ...], now: float
    ) -> tuple[list[RequestState], tuple[ScheduledRequest, ...]]:
        """Give each a token, if the step has a row of each.

        Parameters
        ----------
        states, rows : of the step, beside theirs.
        now : when it has ended, seconds.

        Returns
        -------
        The states and rows that are more than plain, with those who leave ahead of their tokens.
        """
        if self.num_begun == self.num_steps:
            return states, rows
        due, num_steps, tracker = self._due, self.num_steps, self._tracker
        while due and due[0][0] <= num_steps:
            _, _, state, joined = heappop(due)
            self._leave(state, joined)
        if tracker is not None:
            if tracker.tenants.are_several:  # each token is charged
                self._leave_all()
            self._move_on((now,))
        self.num_steps = num_steps + 1
        self._ends.append(now)
        leaving, self._left = self._left, []
        if leaving:
            num_decodes = rows.count(DECODE)
            decodes = sorted([*states[:num_decodes], *leaving], key=sort_key)
            states, rows = decodes + states[num_decodes:], (DECODE,) * len(leaving) + rows
        return states, rows

    def go_on(self, ends: Sequence[float]) -> list[RequestState]:
        """Give each a token, and a slot for the next one, for each step of a run but the last.

        Parameters
        ----------
        ends : when each of these steps ended, seconds.

        Returns
        -------
        Those who have left instead: one of these steps ends too late for them.
        """
        late = self._move_on(ends)
        self._begin(len(ends))
        self.num_steps += len(ends)
        self._ends.extend(ends)
        return late

    def _begin(self, num_steps: int) -> None:
        """Take the blocks of steps that begin."""
        growing, states = self._growing, []
        for step in range(self.num_begun, self.num_begun + num_steps):
            states += growing[step % len(growing)]
        if states:
            for state, block_id in zip(states, self._kv.pool.allocate(len(states)), strict=True):
                state.block_ids.append(block_id)
                state.num_allocated_tokens += len(growing)
        self.num_begun += num_steps
        self.context += num_steps * self.num_rows


def _tbt(slo: SLOState) -> float:
    """Return the seconds between the deadlines of a stream's tokens; infinite where none is ever due."""
    return slo.tbt if slo.next_deadline < inf else inf


def _is_even(slo: SLOState) -> bool:
    """Whether the deadlines of a stream follow its TBT objective alone, and its last token was in time."""
    if slo.end < inf:
        return False
    due = slo.next_deadline
    return due == inf or slo.is_gap_mode or (slo.is_regular and due >= slo.last_delivery + slo.tbt)


class LockstepPlan(StepPlan):
    """A plan in which streams in lockstep stand beside the others, one row each."""

    def __init__(self, *args: Any, lockstep: Lockstep, **kwargs: Any) -> None:
        self._lockstep, self._num_growing, self._shortest = lockstep, lockstep.gather(), 0.0
        super().__init__(*args, **kwargs)
        self.num_running += lockstep.num_rows
        self.max_num_seqs -= lockstep.num_rows

    def look_beside(self, view: RunningView, shortest: float) -> None:
        """Let a view hold those in lockstep, too: how many, and who is due first."""
        if not self._lockstep.num_rows:
            return
        self._shortest = shortest
        self._lockstep.count(view.shape)
        for tbt, peers in self._lockstep.peers.items():
            if peers.states and shortest <= tbt < inf:
                due = peers.deadlines[0]
                view.deadline, view.tightest = min(view.deadline, due), min(view.tightest, tbt)
                view.urgent = view.urgent or peers.states[0]  # one of those; nobody reads which

    def tell_apart(self, view: RunningView | None = None) -> None:
        """Let those in lockstep run as all others do, and a view see them so."""
        if num_rows := self._lockstep.num_rows:
            self._lockstep.tell_apart()
            self.num_kept = len(self.running)
            self.max_num_seqs += num_rows
            if view is not None:
                vars(view).update(vars(RunningView(self.running, self.now, self._shortest)))

    def look_for_slack(self, view: RunningView, end: float, num_tokens: int) -> None:
        """Tell those in lockstep apart if anybody may have the slack of so many tokens at a time."""
        dues = [(state.slo.tbt, due) for state, due in zip(view.streams, view.deadlines, strict=True)]
        dues += [(tbt, each.deadlines[-1]) for tbt, each in self._lockstep.peers.items() if each.states]
        if any(tbt <= view.tightest and due - end > num_tokens * tbt for tbt, due in dues):
            self.tell_apart(view)

    def has_expendable(self) -> bool:
        """Whether one of those in lockstep has no objective, and was never preempted."""
        return any(map(is_expendable, self._lockstep.peers[inf].states))

    def decode_beside(self) -> None:
        """Give one token to those in lockstep, too."""
        self.num_beside = num_rows = self._lockstep.num_rows
        self.num_blocks_left -= self._num_growing
        self.num_tokens_left -= num_rows
        self.max_rows -= num_rows
