"""Two schedulers between which requests move, and memory that knows what each KV slot holds."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.core.handover import Detached
from onbeat.core.request import Request
from onbeat.core.step import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.fake_step_time import LinearStepTime
from tests.pure.scheduler.driver import EngineLoop, Pages, token_of

LEASE = 40.0
MOST_ACCEPTED = 3


class Replica(EngineLoop):
    """A scheduler, and a memory in which a slot holds the hash of all tokens up to its own.

    With snapshots the model has a state, too: the hash of all tokens that a request's rows have had.

    A step runs when it is collected: it checks that the whole context of each row is there, then writes.
    """

    def __init__(self, name: str, config: SchedulerConfig, *, depth: int) -> None:
        super().__init__(Scheduler(config, LinearStepTime()), depth)
        self.name = name
        self.block_size = config.block_size
        self.holds_batches = POLICIES[config.policy].holds_finished
        self.memory: dict[int, int] = {}
        self.blocks: dict[str, list[int]] = {}
        """Of those that the model runner knows."""
        self.pages = Pages(config)
        self.tokens: dict[str, list[int]] = {}
        """What the model runner has of them."""
        self.states: dict[str | int, int | None] = {}
        """Request, or number of a snapshot -> its state."""
        self.requests: dict[str, Request] = {}
        self.reservations: dict[str, tuple[int, ...]] = {}
        self.may_be_written: dict[str, list[SchedulerOutput]] = {}
        """Reservation -> steps that were in flight when its last block was given."""

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = list(request.resumed_token_ids)

    def check_step(self, scheduled: SchedulerOutput) -> None:
        ids = [row.request_id for row in scheduled.rows]
        assert len(set(ids)) == len(ids) <= self.scheduler.config.max_num_seqs

    def collect(self) -> None:
        scheduled = self.in_flight.popleft()
        self.change_requests(scheduled)
        self.pages.take(scheduled)
        assert len(self.blocks) <= self.scheduler.config.max_num_seqs, "more than the runner has slots for"
        sampled, num_drafted = [], []
        for row in scheduled.rows:
            tokens, blocks = self.tokens[row.request_id], self.blocks[row.request_id]
            blocks += row.new_block_ids
            num_drafts = min(row.num_draft_tokens, 2)
            end = len(tokens) if row.samples else row.num_computed_tokens + row.num_new_tokens
            start = (
                end + row.num_draft_tokens - row.num_new_tokens if row.samples else row.num_computed_tokens
            )
            wanted = prefixes(tokens)
            for table in range(self.pages.num_tables):
                first = max(start + 1 - self.pages.window, 0) if table else 0
                for position in range(first, start):
                    assert self.memory.get(self.place(row, table, position)) == wanted[position], (
                        f"{self.name}: KV of token {position} of {row.request_id} is not there"
                    )
                for position in range(start, end):
                    self.memory[self.place(row, table, position)] = wanted[position]
            if self.scheduler.config.num_snapshots and row.request_id not in self.finished:
                self.fold(scheduled, row.request_id, range(start, end), wanted)
            if row.samples:
                num_accepted = min(num_drafts, len(tokens) % MOST_ACCEPTED)
                new = [token_of(row.request_id, len(tokens) + i) for i in range(1 + num_accepted)]
                drafted = range(len(tokens), len(tokens) + num_drafts)  # drafts, some of them rejected
                tokens += new
                after = prefixes(tokens)
                for table in range(self.pages.num_tables):
                    for place in drafted:
                        is_kept = place < len(tokens) - 1
                        self.memory[self.place(row, table, place)] = after[place] if is_kept else -1
                sampled.append(new)
                num_drafted.append(num_drafts)
        result = ModelRunnerOutput(sampled)
        if self.scheduler.config.speculation is not None:
            result = result._replace(num_drafted=num_drafted)
        self.receive(self.scheduler.update(scheduled, result, self.now))

    def change_requests(self, scheduled: SchedulerOutput) -> None:
        """Hear who has left, and who has come."""
        for request_id in scheduled.released_ids:
            del self.blocks[request_id], self.tokens[request_id], self.states[request_id]
        for admitted in scheduled.admitted:
            request_id = admitted.request.request_id
            assert request_id not in self.blocks
            self.blocks[request_id] = list(admitted.block_ids)
            self.states[request_id] = None if admitted.snapshot is None else self.states[admitted.snapshot]
            self.tokens[request_id] = [*admitted.request.prompt_token_ids, *admitted.output_token_ids]

    def fold(self, scheduled: SchedulerOutput, request_id: str, places: range, wanted: Sequence[int]) -> None:
        """Change the state of a row's request by its tokens, and keep what the step keeps of it."""
        assert not places.start or self.states[request_id] == wanted[places.start - 1], "another state"
        self.states[request_id] = wanted[places.stop - 1]
        for row, num_tokens, snapshot in scheduled.kept_states:
            if scheduled.rows[row].request_id == request_id:
                assert 0 < num_tokens <= len(places)
                self.states[snapshot] = wanted[places.start + num_tokens - 1]

    def place(self, row: ScheduledRequest, table: int, position: int) -> int:
        """Where a row has the KV of a token, of the layers of a table."""
        block, offset = divmod(position, self.block_size)
        own = self.blocks[row.request_id][block]
        if table:
            own = self.pages.pages[row.request_id][block][table - 1]
        return own * self.block_size + offset

    # --- moving ---------------------------------------------------------------------------------------

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        before = self.reservations.get(request_id, ())
        reserved = self.scheduler.handover.reserve(request_id, num_tokens, self.now + LEASE)
        if reserved is None:
            return False
        assert reserved[: len(before)] == before
        if reserved != before or request_id not in self.reservations:
            self.may_be_written[request_id] = list(self.in_flight)
        self.reservations[request_id] = reserved
        return True

    def release(self, request_id: str) -> None:
        self.scheduler.handover.release_reservation(request_id)
        self.reservations.pop(request_id, None)

    def pull(self, source: Replica, request_id: str, block_ids: Sequence[int], first: int) -> None:
        """Copy blocks, counted from `first`, into the reservation, once no step may write there."""
        while any(step in self.in_flight for step in self.may_be_written.get(request_id, ())):
            self.collect()
        size = self.block_size
        for theirs, ours in zip(block_ids, self.reservations[request_id][first:], strict=False):
            for offset in range(size):
                value = source.memory.get(theirs * size + offset, -2)
                self.memory[ours * size + offset] = value

    def pull_state(self, source: Replica, request_id: str) -> None:
        """Copy the state of a request that stands still, of a model that has one; after its blocks."""
        config = self.scheduler.config
        if config.num_snapshots:
            slot = self.scheduler.handover.state_slot(request_id)
            self.states[slot - config.max_num_seqs] = source.states[request_id]

    def adopt(self, request: Request, detached: Detached) -> None:
        request_id = request.request_id
        moved = detached.moved(request)
        self.scheduler.handover.adopt(request_id, moved, detached, self.now)
        del self.reservations[request_id]
        self.requests[request_id] = request
        self.outputs[request_id] = list(detached.output_token_ids)
        self.finished.pop(request_id, None)

    def expire(self) -> list[str]:
        handover = self.scheduler.handover
        for request_id in handover.overdue_holds(self.now):
            handover.release_hold(request_id)
        overdue = handover.overdue_reservations(self.now)
        for handover_id in overdue:
            self.release(handover_id)
        return overdue


def prefixes(tokens: Sequence[int]) -> list[int]:
    """Return for each position a hash of the tokens up to it."""
    values, value = [], 17
    for token in tokens:
        value = (value * 1000003 + token + 1) % (1 << 61)
        values.append(value)
    return values


def expected(request: Request, num_tokens: int) -> list[int]:
    start = len(request.prompt_token_ids)
    return [token_of(request.request_id, start + index) for index in range(num_tokens)]
