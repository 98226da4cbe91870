"""Runs a scheduler without an engine: tokens are a function of (request, position) alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import fields as fields_of
from typing import Any

from onbeat.core.request import FinishReason, Request, RequestOutput, SamplingParams
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.fake_step_time import LinearStepTime

POLICY_NAMES = tuple(POLICIES)
_SAMPLING_FIELDS = {field.name for field in fields_of(SamplingParams)}


def make_config(policy: str = "sarathi", **changes) -> SchedulerConfig:
    # unknown names get here too: refusing them is Scheduler's part
    whole_prompts = policy in POLICIES and POLICIES[policy].whole_prompts
    values = {
        "num_blocks": 64,
        "block_size": 16,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256 if whole_prompts else 32,
        "policy": policy,
    }
    return SchedulerConfig(**(values | changes))


def make_request(
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int,
    *,
    arrival=0.0,
    priority=0,
    salt=None,
    prompt=None,
    **fields,
) -> Request:
    """`fields`: of the request, and of its sampling where that has them."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in _SAMPLING_FIELDS}
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt if prompt is not None else range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival=arrival,
        priority=priority,
        cache_salt=salt if salt is not None else request_id,
        **fields,
    )


class EngineLoop:
    """Steps a scheduler by hand, with up to `depth` steps planned before the oldest is known.

    Who derives from it says what a step gives (`collect`), and checks what the scheduler says.
    """

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.now = 0.0
        self.log: list[SchedulerOutput] = []
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.in_flight: deque[SchedulerOutput] = deque()

    def check_step(self, scheduled: SchedulerOutput) -> None:
        raise NotImplementedError

    def collect(self) -> None:
        raise NotImplementedError

    def receive(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finished, "a delivery after the end"
            self.outputs[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason

    def abort(self, request_id: str) -> None:
        self.receive(self.scheduler.abort([request_id]))

    def step(self) -> bool:
        """One turn of the engine loop; False once there is nothing to do."""
        self.now += 1.0
        scheduled = self.scheduler.schedule(self.now)
        if scheduled is not None:
            self.check_step(scheduled)
            self.log.append(scheduled)
            self.in_flight.append(scheduled)
            if len(self.in_flight) < self.depth:
                return True
        if self.in_flight:
            self.collect()
            return True
        return self.scheduler.num_unfinished > 0

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError("the scheduler does not come to an end")


class Driver(EngineLoop):
    """Steps a scheduler by hand and remembers all that it said.

    A small model of the runner: it keeps each request's tokens and block table, and checks that every row
    continues exactly where the last one ended, inside the blocks that the request holds.
    """

    def __init__(self, config: SchedulerConfig, *, depth: int = 1) -> None:
        super().__init__(Scheduler(config, LinearStepTime()), depth)
        self.first_scheduled: list[str] = []
        self.blocks: dict[str, list[int]] = {}
        self.pages = Pages(config)
        self.known_tokens: dict[str, int] = {}
        self.breaking: set[str] = set()
        """Requests whose next token is no number."""

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.outputs[request.request_id] = list(request.resumed_token_ids)

    @property
    def finish_order(self) -> list[str]:
        return list(self.finished)

    def collect(self) -> None:
        scheduled = self.in_flight.popleft()
        sampled: list[list[int]] = []
        failed = {}
        for row in scheduled.rows:
            position = row.num_computed_tokens + row.num_new_tokens
            if row.samples and row.request_id in self.breaking:
                failed[row.request_id] = "no number"
                sampled.append([])
            elif row.samples:
                sampled.append([token_of(row.request_id, position)])
        result = ModelRunnerOutput(sampled, failed=failed or None)
        self.receive(self.scheduler.update(scheduled, result, self.now))

    def check_step(self, scheduled: SchedulerOutput) -> None:
        config = self.scheduler.config
        assert 0 < sum(row.num_new_tokens for row in scheduled.rows) <= config.max_num_batched_tokens
        assert scheduled.shape.num_new_tokens == sum(row.num_new_tokens for row in scheduled.rows)
        assert scheduled.shape.num_sequences == len(scheduled.rows) <= config.max_num_seqs
        assert scheduled.shape.num_lm_head_rows == sum(row.samples for row in scheduled.rows)
        ids = [row.request_id for row in scheduled.rows]
        assert len(set(ids)) == len(ids), "a request has two rows"
        if config.num_micro_batches > 1:
            assert len(ids) <= -(-config.max_num_seqs // config.num_micro_batches)
            for other in self.in_flight:
                assert not {row.request_id for row in other.rows} & set(ids), "a request in two micro-batches"
        for request_id in scheduled.released_ids:
            del self.blocks[request_id]
        self.pages.take(scheduled)
        for admitted in scheduled.admitted:
            request_id = admitted.request.request_id
            assert request_id not in self.blocks
            assert list(admitted.output_token_ids) == self.outputs[request_id]
            self.blocks[request_id] = list(admitted.block_ids)
            self.known_tokens[request_id] = len(admitted.request.prompt_token_ids) + len(
                admitted.output_token_ids
            )
            if request_id not in self.first_scheduled:
                self.first_scheduled.append(request_id)
        for row in scheduled.rows:
            self.blocks[row.request_id] += row.new_block_ids
            end = row.num_computed_tokens + row.num_new_tokens
            assert end <= len(self.blocks[row.request_id]) * config.block_size, "KV without a block"
            assert end <= self.known_tokens[row.request_id], "a token that nobody knows"
            if row.samples:
                assert end == self.known_tokens[row.request_id]
                self.known_tokens[row.request_id] += 1
        self.pages.check_owners(scheduled, self.blocks)


class Pages:
    """The blocks of tables beyond the first, as a runner knows them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.size, self.window, self.num_tables = config.block_size, config.window_length, config.num_tables
        self.pages: dict[str, dict[int, tuple[int, ...]]] = {}
        """Of each request, for each of its blocks that a window reaches, one of each further table."""

    def take(self, scheduled: SchedulerOutput) -> None:
        for admitted in scheduled.admitted:
            self.pages[admitted.request.request_id] = {}
        for request_id, num_passed, first, ids in scheduled.new_pages:
            known = self.pages.setdefault(request_id, {})
            for place in range(0, len(ids), self.num_tables - 1):
                known[first + place // (self.num_tables - 1)] = ids[place : place + self.num_tables - 1]
            for index in [index for index in known if index < num_passed]:
                del known[index]

    def check_owners(self, scheduled: SchedulerOutput, blocks: dict[str, list[int]]) -> None:
        """A row has all that its windows reach, and nobody else reads or writes what it writes."""
        read: list[set[int]] = []
        written: list[set[int]] = []
        for row in scheduled.rows:
            start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_new_tokens
            own = blocks[row.request_id][: -(-end // self.size)]
            new = own[start // self.size :]
            if self.num_tables > 1:
                # Of drafts in flight some may be rejected: then it starts earlier than it was planned to.
                pages = self.pages[row.request_id]
                first = max(start + 1 - self.window, 0) // self.size
                seen = [pages[index] for index in range(first, -(-end // self.size))]
                own = [*own, *(each for ids in seen for each in ids)]
                new = [*new, *(each for ids in seen[start // self.size - first :] for each in ids)]
            assert len(set(own)) == len(own), "a request has a block twice"
            read.append(set(own))
            written.append(set(new))
        for index, mine in enumerate(written):
            for other in (*read[:index], *read[index + 1 :]):
                assert not mine & other, "a block has two owners"


def sent_tokens(request_id: str, num_prompt_tokens: int, num_tokens: int) -> dict[str, Any]:
    """Return fields of a request that goes on behind so many tokens, which another driver has delivered."""
    positions = range(num_prompt_tokens, num_prompt_tokens + num_tokens)
    return {"resumed_token_ids": tuple(token_of(request_id, position) for position in positions)}


def token_of(request_id: str, position: int) -> int:
    return hash_text(f"{request_id}/{position}") % 1000


def hash_text(text: str) -> int:
    value = 1469598103934665603
    for byte in text.encode():
        value = (value ^ byte) * 1099511628211 % 2**64
    return value
