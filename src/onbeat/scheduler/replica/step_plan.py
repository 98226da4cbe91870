"""Who waits and runs, and the plan of one step: decided in a local object, committed once by the scheduler.

Queue and list are sorted, at a cost that does not grow with the number that wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from operator import attrgetter
from typing import Any, Protocol

from onbeat.scheduler.replica.kv import KVCacheManager
from onbeat.scheduler.replica.request_state import BEST_EFFORT_RANK, RequestState
from onbeat.scheduler.scheduler_config import SchedulerConfig

_MOST_IN_BUCKET = 512
"""Requests of a bucket. Finding one's place costs the number of buckets, moving it in the length of one: with
100,000 waiting some 300 of each."""


sort_key = attrgetter("sort_key")
"""Of a request. The rank alone, as `(rank,)`, stands before all keys that begin with it."""
_last_key, _items = attrgetter("last_key"), attrgetter("items")
"""Of a bucket."""


class QueuedWork:
    """How many requests some are, and the sums of their `RequestState.queued_work`."""

    __slots__ = ("num_pairs", "num_requests", "num_tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.num_pairs = 0.0

    def count(self, state: RequestState, sign: int) -> None:
        """Count a request's work in (1) or out (-1)."""
        num_tokens, num_pairs = state.queued_work
        self.num_requests += sign
        self.num_tokens += sign * num_tokens
        self.num_pairs += sign * num_pairs

    def add(self, other: QueuedWork, sign: int) -> None:
        """Count the work of several in (1) or out (-1)."""
        self.num_requests += sign * other.num_requests
        self.num_tokens += sign * other.num_tokens
        self.num_pairs += sign * other.num_pairs


class _Bucket(QueuedWork):
    """Some requests in a row, and the sums of their work."""

    __slots__ = ("items", "last_key")

    def __init__(self, items: list[RequestState]) -> None:
        super().__init__()
        self.items = items
        self.last_key: tuple[float, ...] = items[-1].sort_key if items else ()
        for state in items:
            self.count(state, 1)


class RankedQueue(QueuedWork):
    """Requests by ascending `sort_key`, in buckets of some hundred, and the sums of their work.

    No operation looks at all of them: those at the head cost O(1), others the number of buckets and the
    length of one.
    """

    __slots__ = ("buckets",)

    def __init__(self) -> None:
        super().__init__()
        self.buckets = [_Bucket([])]
        """None of them is empty, unless it is the only one."""

    def first(self, most: int) -> list[RequestState]:
        """Return the first requests, at most so many."""
        return list(islice(chain.from_iterable(map(_items, self.buckets)), most))

    def below(self, rank: float) -> QueuedWork:
        """Return the work of the requests of a lower rank, counted from the nearer end."""
        below, buckets = QueuedWork(), self.buckets
        index = bisect_left(buckets, (rank,), key=_last_key)
        if 2 * index <= len(buckets):
            for bucket in buckets[:index]:
                below.add(bucket, 1)
        else:
            below.add(self, 1)
            for bucket in buckets[index:]:
                below.add(bucket, -1)
        if index < len(buckets):
            items = buckets[index].items
            for state in items[: bisect_left(items, (rank,), key=sort_key)]:
                below.count(state, 1)
        return below

    def push(self, state: RequestState) -> None:
        """Put a request at its place."""
        self.count(state, 1)
        buckets, key = self.buckets, state.sort_key
        index = min(bisect_left(buckets, key, key=_last_key), len(buckets) - 1)
        bucket = buckets[index]
        insort(bucket.items, state, key=sort_key)
        bucket.count(state, 1)
        bucket.last_key = max(bucket.last_key, key)
        if len(bucket.items) > _MOST_IN_BUCKET:
            middle = len(bucket.items) // 2
            buckets[index : index + 1] = [_Bucket(bucket.items[:middle]), _Bucket(bucket.items[middle:])]

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it is."""
        self.count(state, -1)
        buckets = self.buckets
        index = bisect_left(buckets, state.sort_key, key=_last_key)
        bucket = buckets[index]
        place = bisect_left(bucket.items, state.sort_key, key=sort_key)
        assert bucket.items.pop(place) is state, "sort keys are unique"
        bucket.count(state, -1)
        if bucket.items:
            bucket.last_key = bucket.items[-1].sort_key
        elif len(buckets) > 1:
            del buckets[index]


class WaitingQueue:
    """Requests that wait, by ascending `sort_key`, the first part of which is a rank.

    Attributes
    ----------
    length : how many they are.
    num_prompt_tokens : of all of them.
    ranked : those before best effort.
    best_effort : those from `BEST_EFFORT_RANK` on.
    """

    def __init__(self) -> None:
        self.ranked, self.best_effort = RankedQueue(), RankedQueue()
        self.length = self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[RequestState]:
        return chain.from_iterable(map(_items, chain(self.ranked.buckets, self.best_effort.buckets)))

    def peek(self, offset: int = 0) -> RequestState | None:
        """Return the request `offset` places behind the head, or None."""
        return next(islice(self, offset, None), None)

    def push(self, state: RequestState) -> None:
        """Let a request wait at its place."""
        num_cached = state.num_hit_tokens
        num_tokens = state.num_tokens - num_cached
        state.queued_work = (num_tokens, num_tokens * (num_cached + 0.5 * num_tokens))
        self.length += 1
        self.num_prompt_tokens += state.num_prompt_tokens
        (self.ranked if state.sort_key[0] < BEST_EFFORT_RANK else self.best_effort).push(state)

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it is."""
        self.length -= 1
        self.num_prompt_tokens -= state.num_prompt_tokens
        (self.ranked if state.sort_key[0] < BEST_EFFORT_RANK else self.best_effort).remove(state)


RunningList = list[RequestState]
"""Requests in the batch, by ascending `sort_key`; the last one is the first to be preempted."""

SPARE_SHARE = 100
"""One block in so many is left for running requests to grow into."""


@dataclass(slots=True)
class PlannedAdmission:
    """A waiting request that enters the batch."""

    state: RequestState
    cached_block_ids: list[int]
    num_reserved_tokens: int
    num_new_tokens: int


class Table(Protocol):
    """Where the requests are: `RequestTable`, or what follows the queues of another engine."""

    @property
    def running(self) -> RunningList: ...

    @property
    def waiting(self) -> WaitingQueue: ...

    @property
    def states(self) -> Mapping[str, RequestState]:
        """Requests that wait or run and will deliver more, by id."""

    @property
    def kv(self) -> KVCacheManager:
        """KV memory, or what stands for it; a plan changes nothing there.

        It uses `num_tables`, `block_size`, `match` and `num_blocks_for`, and of the `pool` `num_blocks`,
        `num_free_blocks`, `num_idle` and `exclusive_ids`.
        """

    @property
    def num_slots_kept(self) -> int:
        """Places of the batch that are kept for others than these requests."""

    def add(self, state: RequestState) -> None:
        """Let a new request wait."""

    def requeue(self, state: RequestState) -> None:
        """Give a waiting request the place that its deadline, or the loss of it, asks for."""

    def drop(self, state: RequestState) -> None:
        """Forget a request."""


class StepPlan:
    """What the next step will do, and what is left to plan with. Nothing outside changes while it is made.

    Composers (`policies.py`) call the verbs `decode_running`, `continue_prefills`, `admit_waiting` and
    `preempt_for_waiting` in the order of their policy.
    """

    budget: float | None = None
    """Time that the step may take, seconds; None where nothing binds it."""
    slack: float | None = None
    """Seconds until the earliest deadline of a running stream that can be kept, at least the budget; infinite
    where all are late, None where nobody looked. Drafts may take it; prompts leave what is above the budget
    to the streams."""
    tightest = inf
    """The shortest TBT objective of the streams, seconds; infinite without any, or if nobody looked."""
    budget_request_id: str | None = None
    """The request whose deadline set the budget."""
    predicted_wait = 0.0
    """Seconds until a prompt that arrived now would be begun; 0 where nobody predicts."""
    num_draft_passes = 0
    """Forward passes, one after another, in which a proposer's model makes drafts."""
    seconds_without_drafts = 0.0
    """Predicted, of the steps since the last drafts that could have had some, this one included."""
    expected_tokens = 0.0
    """Output tokens that `decodes` should deliver; kept where drafts are planned."""
    ran_out_of_blocks = False
    num_beside = 0
    """Rows of streams in lockstep, which the step has beside `decodes`; see `LockstepPlan`."""

    def __init__(
        self,
        config: SchedulerConfig,
        table: Table,
        now: float,
        *,
        whole_prompts: bool,
        reserves_maximum: bool,
    ) -> None:
        self.now = now
        """When the step is planned, seconds."""
        self.kv, self.waiting, self.running = table.kv, table.waiting, table.running
        self._whole_prompts, self._reserves_maximum = whole_prompts, reserves_maximum
        self._num_reserved = attrgetter("max_total_tokens" if reserves_maximum else "num_tokens")
        """Of a waiting request, the tokens whose KV slots it is given with its admission."""
        self._by_priority = config.scheduling_policy == "priority"
        self.num_kept = self.num_running = len(self.running)
        """Requests of `running` that stay, those behind are preempted; and all in the batch, those in
        lockstep included, which are not in `running`."""
        self.victims: list[RequestState] = []
        """Requests from anywhere in `running` that are preempted, too."""
        self.infeasible: list[RequestState] = []
        """Requests, waiting or running, that are `Fate.INFEASIBLE`."""
        self.overdue: list[RequestState] = []
        """Waiting requests that are `Fate.OVERDUE`."""
        self.num_hit_tokens: dict[str, int] = {}
        """Waiting request -> tokens that the prefix cache was found to hold for it."""
        self.decodes: list[RequestState] = []
        """Running requests that get one token."""
        self.num_drafts: list[int] = []
        """Drafts of each of `decodes` beside its token; empty where none are planned."""
        self.catch_ups: list[tuple[RequestState, int, int]] = []
        """What a proposer's model reads before: a request, its tokens read so far, and those it reads now."""
        self.chunks: list[tuple[RequestState, int]] = []
        """(running request, new tokens); their rows come after the decodes."""
        self.admissions: list[PlannedAdmission] = []
        self.num_tokens_left = config.max_num_batched_tokens
        self.num_blocks_left = self.kv.pool.num_free_blocks
        self.max_num_seqs = config.max_num_seqs - table.num_slots_kept
        """Requests that may be in the batch: slots that are kept for others left out."""
        self.max_rows = -(-config.max_num_seqs // config.num_micro_batches)
        """Rows that the step may have."""
        self._freed_block_ids: set[int] = set()
        """Blocks that the preemptions of this plan give back."""

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.chunks or self.admissions or self.num_beside)

    @property
    def num_slots_left(self) -> int:
        """Waiting requests that may still join the batch in this step, tokens and blocks aside."""
        num_running = self.num_kept - len(self.victims) + len(self.admissions)
        return min(self.max_num_seqs - num_running, self.num_rows_left)

    def has_blocks_for(self, state: RequestState, without: Sequence[RequestState] = ()) -> bool:
        """Whether a waiting request finds its blocks, as `admit` asks.

        Parameters
        ----------
        without : running requests, taken as preempted.
        """
        exclusive_ids = self.kv.pool.exclusive_ids
        freed_ids = {block_id for other in without for block_id in exclusive_ids(other.held_ids)}
        num_left = self.num_blocks_left + len(freed_ids) - self._num_spare_blocks(len(without))
        num_reserved = self._num_reserved(state)
        if self.kv.num_blocks_for(num_reserved) <= num_left:
            return True  # whatever the prefix cache holds
        cached_block_ids = self.kv.match(state)
        num_needed = self._num_new_blocks(cached_block_ids, num_reserved)
        return num_needed + len(freed_ids.intersection(cached_block_ids)) <= num_left

    def num_blocks_wanted(self, state: RequestState) -> int:
        """Return the free space that admitting a waiting request takes, the watermark left out."""
        return self._num_new_blocks(self.kv.match(state), self._num_reserved(state))

    @property
    def num_rows_left(self) -> int:
        """Rows that the step may still take."""
        return self.max_rows - len(self.decodes) - len(self.chunks) - len(self.admissions)

    @property
    def preempted(self) -> list[RequestState]:
        return [*self.running[self.num_kept :], *self.victims]

    def decode_running(self) -> None:
        """Give one token to every running request that wants just one, first come first.

        Where no block is left for a token, the last request of the batch is preempted, so the first always
        goes on.
        """
        if self.num_running > len(self.running):
            self.decode_beside()
        decodes, num_kept, num_tables = self.decodes, self.num_kept, self.kv.num_tables
        num_rows_left = self.max_rows - len(self.chunks)
        for index, state in enumerate(self.running):
            if index >= num_kept or not num_rows_left:
                break
            num_computed, num_in_flight = state.num_computed_tokens, state.num_in_flight_tokens
            num_tokens = state.num_tokens + num_in_flight
            if (
                num_tokens - num_computed == 1
                and num_tokens < state.pause_at
                and not (state.is_in_flight or state.sits_out)
                and not (num_in_flight and num_tokens >= state.max_total_tokens)
            ):
                if num_computed >= state.num_allocated_tokens:
                    if self.num_blocks_left < num_tables and not self._make_room(index):
                        break
                    self.num_blocks_left -= num_tables
                    num_kept = self.num_kept
                decodes.append(state)
                num_rows_left -= 1
        self.num_tokens_left -= len(decodes)

    # Of streams in lockstep, which stand beside `running`; see `LockstepPlan`. Here there are none. A view
    # is a `RunningView`, which builds on this module.

    def look_beside(self, view: Any, shortest: float) -> None:
        """Let a view hold those in lockstep, too."""

    def tell_apart(self, view: Any = None) -> None:
        """Let those in lockstep run as all others do, and a view see them so: single ones matter."""

    def look_for_slack(self, view: Any, end: float, num_tokens: int) -> None:
        """Tell those in lockstep apart if anybody may have the slack of so many tokens at a time."""

    def has_expendable(self) -> bool:
        """Whether one of those in lockstep has no objective, and was never preempted."""
        return False

    def decode_beside(self) -> None:
        """Give one token to those in lockstep, too."""

    def continue_prefills(self) -> None:
        """Give running requests that want more than one token a chunk each, first come first."""
        num_decodes, whole_prompts = len(self.decodes), self._whole_prompts
        if num_decodes == self.num_kept:
            return
        for state in self.running[: self.num_kept]:
            num_wanted = state.num_tokens + state.num_in_flight_tokens - state.num_computed_tokens
            if num_wanted <= 1 or state.is_in_flight or state.num_tokens >= state.pause_at:
                continue
            if num_decodes + len(self.chunks) == self.max_rows:
                break
            num_new = min(num_wanted, self.num_tokens_left)
            if num_new == 0 or (whole_prompts and num_new < num_wanted):
                break
            self.chunks.append((state, num_new))
            self.num_tokens_left -= num_new

    def admit_waiting(self) -> None:
        """Take requests from the head of the queue while they fit; never skip one (no starvation)."""
        if self.ran_out_of_blocks or not self.waiting.length:
            return
        num_kept = self.num_kept
        most = min(self.max_rows - len(self.decodes) - len(self.chunks), self.max_num_seqs - num_kept)
        while self.num_tokens_left > 0 and len(self.admissions) < most:
            state = self.waiting.peek(len(self.admissions))
            # A preempted request may still be in a step in flight; its turn comes when that is back.
            if state is None or state.num_in_flight_tokens or state.is_in_flight:
                break
            if num_kept < len(self.running) and self.running[num_kept].sort_key < state.sort_key:
                break  # one that this plan preempts comes before it
            cached_block_ids = self.kv.match(state)
            num_wanted = state.num_tokens - len(cached_block_ids) * self.kv.block_size
            num_new = min(num_wanted, self.num_tokens_left)
            if self._whole_prompts and num_new < num_wanted:
                break
            if not self.admit(state, cached_block_ids, num_new):
                break

    def admit(self, state: RequestState, cached_block_ids: list[int], num_new: int) -> bool:
        """Plan to take a waiting request in with `num_new` tokens; False where its blocks do not fit."""
        num_reserved = self._num_reserved(state)
        num_needed = self._num_new_blocks(cached_block_ids, num_reserved)
        if num_needed + self._num_spare_blocks() > self.num_blocks_left:
            return False
        self.admissions.append(PlannedAdmission(state, cached_block_ids, num_reserved, num_new))
        self.num_blocks_left -= num_needed
        self.num_tokens_left -= num_new
        return True

    def num_growing(self, states: Iterable[RequestState]) -> int:
        """Return the blocks that those of these need whose next token has no slot yet."""
        return sum(map(needs_block, states)) * self.kv.num_tables

    def take_block(self) -> bool:
        """Set a block aside for a request that grows; False where none is left."""
        if self.num_blocks_left < self.kv.num_tables:
            return False
        self.num_blocks_left -= self.kv.num_tables
        return True

    def preempt(self, state: RequestState) -> None:
        """Plan to take a running request out of the batch, wherever it stands; it may have no row."""
        self.victims.append(state)
        self._give_back_blocks(state)

    def _give_back_blocks(self, state: RequestState) -> None:
        """Count what a preempted request frees."""
        freed_ids = self.kv.pool.exclusive_ids(state.held_ids)
        self._freed_block_ids.update(freed_ids)
        self.num_blocks_left += len(freed_ids)

    def preempt_for_waiting(self) -> None:
        """Preempt running requests of strictly lower priority for the head of the queue, if it fits then.

        Equal ones never push one another out, so two requests cannot take turns. Must come before the rows
        of this step are planned.
        """
        head = self.waiting.peek() if self._by_priority else None
        if head is None or head.num_in_flight_tokens:
            return
        cached_block_ids, num_reserved = self.kv.match(head), self._num_reserved(head)
        before = (self.num_kept, self.num_blocks_left)
        while self.num_kept >= self.max_num_seqs or (
            self._num_new_blocks(cached_block_ids, num_reserved) + self._num_spare_blocks()
            > self.num_blocks_left
        ):
            last = self.running[self.num_kept - 1].request if self.num_kept else None
            if last is None or last.priority <= head.request.priority:
                self.num_kept, self.num_blocks_left = before  # it would not fit all the same
                self._freed_block_ids.clear()
                return
            self._preempt_last()

    def _make_room(self, index: int) -> bool:
        """Free a block for the request at `index`, preempting from the end; False if it fell itself."""
        while self.num_blocks_left < self.kv.num_tables:
            self.ran_out_of_blocks = True
            self._preempt_last()
            if self.num_kept == index:
                return False
        return True

    def _preempt_last(self) -> None:
        """Plan to take the last request out of the batch."""
        self.num_kept -= 1
        self._give_back_blocks(self.running[self.num_kept])

    def _num_new_blocks(self, cached_block_ids: list[int], num_reserved_tokens: int) -> int:
        """Return the free space that an admission takes: new blocks, and cached ones that lie idle.

        Cached blocks of a request that this plan preempts lie idle by then, too.
        """
        num_new = self.kv.num_blocks_for(num_reserved_tokens)
        if not cached_block_ids:
            return num_new
        num_freed = len(self._freed_block_ids.intersection(cached_block_ids))
        return num_new - len(cached_block_ids) + self.kv.pool.num_idle(cached_block_ids) + num_freed

    def _num_spare_blocks(self, num_gone: int = 0) -> int:
        """Return the watermark; an empty batch waives it, or a large request could never start.

        Parameters
        ----------
        num_gone : running requests that are taken as preempted.
        """
        num_gone += len(self.running) - self.num_kept + len(self.victims)
        is_empty = self.num_running == num_gone and not self.admissions
        return 0 if is_empty or self._reserves_maximum else self.kv.pool.num_blocks // SPARE_SHARE


def needs_block(state: RequestState) -> bool:
    """Whether the next token of a request has no slot in the blocks that it holds."""
    return state.num_computed_tokens >= state.num_allocated_tokens


class Composer:
    """Fills the plan of each step by calling its verbs."""

    def compose(self, plan: StepPlan) -> None:
        """Fill a plan; nothing else may change, since a plan may never be carried out."""
        raise NotImplementedError

    def commit(self, plan: StepPlan) -> None:
        """Remember what the composer needs of a plan that is carried out: here, nothing."""

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:  # noqa: ARG002
        """Return up to which predicted time a step is planned again as it is, seconds; 0 for not at all.

        Asked after `commit` of a step of decodes alone, one for each request that runs, none of which is its
        first token: as long as nobody comes, ends, or lacks a block, and the queue looks the same.
        """
        return 0.0
