"""Runs a scheduler that plans drafts, with a model runner in small that keeps tokens and KV slots itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from onbeat.core.request import FinishReason, Request, RequestOutput, TokenLogprobs
from onbeat.core.step import BatchShape, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.core.step_stats import DraftStats
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.speculation.drafting import Drafting, fit_blocks, most_drafts
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.scheduler_config import SchedulerConfig, SpeculationConfig
from tests.fake_step_time import LinearStepTime
from tests.pure.scheduler.driver import EngineLoop, hash_text
from tests.pure.scheduler.driver import make_config as make_plain_config
from tests.pure.scheduler.driver import make_request as make_plain_request
from tests.pure.scheduler.driver import token_of as slow_token_of

FIRST_LINK = 7
token_of = cache(slow_token_of)


@cache
def draw(request_id: str, position: int) -> float:
    """A number in [0, 1), the same in every run: whether a draft is right does not depend on who asks."""
    return hash_text(f"{position}/{request_id}") % 99_991 / 99_991


def make_config(policy: str = "sarathi", *, k: int = 4, draft_length="fixed", **changes) -> SchedulerConfig:
    runs_model = changes.pop("runs_model", False)
    speculation = SpeculationConfig(
        num_speculative_tokens=k, draft_length=draft_length, runs_model=runs_model
    )
    return make_plain_config(policy, speculation=speculation, **changes)


def make_request(
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int,
    *,
    stop_at: int | None = None,
    min_tokens: int = 0,
    **fields: Any,
) -> Request:
    """`stop_at`: the output token of this index, and any that is equal, ends the request."""
    stop_ids = () if stop_at is None else (token_of(request_id, num_prompt_tokens + stop_at),)
    min_tokens = min(min_tokens, max_tokens)
    return make_plain_request(
        request_id, num_prompt_tokens, max_tokens, stop_token_ids=stop_ids, min_tokens=min_tokens, **fields
    )


def expected_tokens(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What a request must get, however it is scheduled."""
    num_prompt = len(request.prompt_token_ids)
    num_tokens = min(request.sampling.max_tokens, max_model_len - num_prompt)
    tokens = []
    for index in range(num_tokens):
        tokens.append(token_of(request.request_id, num_prompt + index))
        if index >= request.sampling.min_tokens and tokens[-1] in request.sampling.stop_token_ids:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


class RandomDrafts(Drafting):
    """Plans any number of drafts that there may be for each row."""

    def __init__(self, limit: int, random: Random) -> None:
        self._limit = limit
        self._random = random

    def plan(self, plan: StepPlan) -> None:
        if self._random.random() < 0.2:
            return  # a step without drafts has no numbers at all
        for state in plan.decodes:
            most = max(0, min(most_drafts(state, self._limit), plan.num_tokens_left))
            num = fit_blocks(plan, state, self._random.randint(0, most))
            plan.num_tokens_left -= num
            plan.num_drafts.append(num)
        plan.expected_tokens = float(len(plan.decodes))

    def commit(self, plan: StepPlan) -> None: ...

    def observe(self, state: RequestState, **_: int | None) -> None: ...

    def finish(self, state: RequestState) -> None: ...


class KVRunner:
    """Computes rows as a model runner does: it knows tokens, and which tokens each KV slot was computed for.

    A slot holds a link: the hash of all tokens up to its own. What a row attends to must be its request's own
    tokens, so a wrong block, a wrong position or a rejected draft that was left behind shows at once.

    Parameters
    ----------
    acceptance : probability that a draft is what the target would have sampled.
    fewer : probability that fewer drafts than asked for can be proposed.
    available : what the proposer may say that it has for the next step; None where it makes any number.
    checks_all : whether to look at all slots that a row reads, not at the last ones alone.
    """

    def __init__(
        self,
        block_size: int,
        random: Random,
        *,
        acceptance: float,
        fewer: float,
        available: tuple[int, ...] | None,
        checks_all: bool,
    ) -> None:
        self._block_size = block_size
        self._random = random
        self.acceptance = acceptance
        self._fewer = fewer
        self._available = available
        self.checks_all = checks_all
        self._cache: dict[int, int] = {}
        self._links: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}
        self._num_prompt: dict[str, int] = {}
        self._has_logprobs: dict[str, bool] = {}

    def run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in scheduled.released_ids:
            del self._tokens[request_id], self._blocks[request_id]
        for admitted in scheduled.admitted:
            request_id = admitted.request.request_id
            assert request_id not in self._tokens
            self._tokens[request_id] = [*admitted.request.prompt_token_ids, *admitted.output_token_ids]
            self._links[request_id] = []
            self._blocks[request_id] = list(admitted.block_ids)
            self._num_prompt[request_id] = len(admitted.request.prompt_token_ids)
            self._has_logprobs[request_id] = admitted.request.sampling.num_logprobs is not None
        result = ModelRunnerOutput([], [], None, [], [])
        for row in scheduled.rows:
            self._run_row(row, result)
        num_drafted = result.num_drafted if scheduled.shape.num_draft_tokens else None
        num_available = result.num_available if self._available else None
        return result._replace(num_drafted=num_drafted, num_available=num_available)

    def _run_row(self, row: ScheduledRequest, result: ModelRunnerOutput) -> None:
        tokens = self._tokens[row.request_id]
        self._blocks[row.request_id] += row.new_block_ids
        own = row.num_new_tokens - row.num_draft_tokens
        is_decode = row.samples and own == 1
        start = len(tokens) - 1 if is_decode else row.num_computed_tokens
        assert start <= row.num_computed_tokens, "planned behind what is there"
        drafts = self._propose(row)
        self._write(row.request_id, start, [*tokens[start : start + own], *drafts])
        if not row.samples:
            assert not drafts
            return
        assert start + own == len(tokens), "a row that samples ends with the last token"
        sampled: list[int] = []
        for draft in [*drafts, None]:
            sampled.append(token_of(row.request_id, len(tokens)))
            tokens.append(sampled[-1])
            if draft != sampled[-1]:
                break
        assert result.num_drafted is not None
        assert result.num_available is not None
        assert result.logprobs is not None
        result.sampled_token_ids.append(sampled)
        result.num_drafted.append(len(drafts))
        result.num_available.append(self._random.choice(self._available or (0,)))
        logprobs = [TokenLogprobs(token_id, -1.0) for token_id in sampled]
        result.logprobs.append(logprobs if self._has_logprobs[row.request_id] else None)

    def _propose(self, row: ScheduledRequest) -> list[int]:
        request_id, num = row.request_id, row.num_draft_tokens
        if num and self._random.random() < self._fewer:
            num = self._random.randrange(num)
        start = len(self._tokens[request_id])
        right = [token_of(request_id, start + index) for index in range(num)]
        return [
            token if draw(request_id, position) < self.acceptance else token + 1
            for position, token in enumerate(right, start)
        ]

    def _write(self, request_id: str, start: int, new_tokens: list[int]) -> None:
        """Compute the KV of tokens behind what the cache holds, which must be this request's tokens."""
        links = self._links_of(request_id, start)
        for position in range(start) if self.checks_all else range(max(0, start - 2), start):
            assert self._cache[self._slot(request_id, position)] == links[position], "KV of other tokens"
        link = links[start - 1] if start else FIRST_LINK
        for position, token in enumerate(new_tokens, start):
            link = hash((link, token))
            self._cache[self._slot(request_id, position)] = link

    def _links_of(self, request_id: str, num_tokens: int) -> list[int]:
        """Return the links of a request's known tokens."""
        links, tokens = self._links[request_id], self._tokens[request_id]
        while len(links) < num_tokens:
            links.append(hash((links[-1] if links else FIRST_LINK, tokens[len(links)])))
        return links

    def _slot(self, request_id: str, position: int) -> int:
        blocks, size = self._blocks[request_id], self._block_size
        assert position < len(blocks) * size, "KV without a block"
        return blocks[position // size] * size + position % size


class SpeculatingDriver(EngineLoop):
    """Steps a scheduler by hand, with up to `depth` steps planned before the oldest is known.

    Attributes
    ----------
    outputs, finished : what each request got, and how it ended.
    stats : of each step with a decode row.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        depth: int = 1,
        seed: int = 0,
        acceptance: float = 0.6,
        fewer: float = 0.2,
        available: tuple[int, ...] | None = (0, 1, 3, 16),
        checks_all: bool = True,
        model: StepTimeModel | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        super().__init__(Scheduler(config, LinearStepTime() if model is None else model), depth)
        if drafting is not None:
            self.scheduler._drafting = self.scheduler.results.drafting = drafting
        self.runner = KVRunner(
            config.block_size,
            Random(seed),
            acceptance=acceptance,
            fewer=fewer,
            available=available,
            checks_all=checks_all,
        )
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.counts: dict[str, tuple[int, int]] = {}
        self.stats: list[DraftStats] = []

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        super().abort(request_id)

    def receive(self, outputs: Sequence[RequestOutput]) -> None:
        super().receive(outputs)
        for output in outputs:
            request_id = output.request_id
            if output.logprobs is not None:
                assert [entry.token_id for entry in output.logprobs] == output.new_token_ids
            drafted, accepted = output.num_drafted_tokens, output.num_accepted_tokens
            assert accepted <= drafted
            assert accepted <= len(self.outputs[request_id])
            assert (drafted, accepted) >= self.counts.get(request_id, (0, 0))
            self.counts[request_id] = (drafted, accepted)

    def collect(self) -> None:
        scheduled = self.in_flight.popleft()
        result = self.runner.run(scheduled)
        num_verified = sum(result.num_drafted or ())
        outputs = self.scheduler.update(scheduled, result, self.now)
        assert scheduled.shape.num_draft_tokens == num_verified, "the shape says what was computed"
        if self.scheduler.results.drafts is not None:
            self.stats.append(self.scheduler.results.drafts)
        self.receive(outputs)
        if self.runner.checks_all:
            self.check_states()

    def check_step(self, scheduled: SchedulerOutput) -> None:
        config, shape = self.scheduler.config, scheduled.shape
        assert 0 < shape.num_new_tokens <= config.max_num_batched_tokens
        assert shape.num_new_tokens == sum(row.num_new_tokens for row in scheduled.rows)
        assert shape.num_draft_tokens == sum(row.num_draft_tokens for row in scheduled.rows)
        assert shape.num_verify_rows == sum(row.num_draft_tokens > 0 for row in scheduled.rows)
        assert shape.num_lm_head_rows == sum(
            1 + row.num_draft_tokens for row in scheduled.rows if row.samples
        )
        decodes = [row for row in scheduled.rows if row.num_new_tokens - row.num_draft_tokens == 1]
        context = sum(row.num_computed_tokens + row.num_new_tokens for row in decodes)
        assert (shape.num_decodes, shape.decode_context_tokens) == (len(decodes), context)
        assert len({row.request_id for row in scheduled.rows}) == len(scheduled.rows) == shape.num_sequences
        if config.speculation is not None and config.speculation.runs_model:
            assert shape.num_draft_passes == max(row.num_draft_tokens for row in scheduled.rows)
        for row in scheduled.rows:
            request = self.requests[row.request_id]
            end = row.num_computed_tokens + row.num_new_tokens
            most = min(len(request.prompt_token_ids) + request.sampling.max_tokens, config.max_model_len)
            assert end < most or not row.num_draft_tokens, "a draft that could not be output"
            assert row.samples or not row.num_draft_tokens

    def check_states(self) -> None:
        """Counters of running requests agree with one another."""
        self.scheduler.check_invariants()
        for state in self.scheduler.running:
            if state.status is not RequestStatus.RUNNING:
                continue
            assert state.num_tokens == state.num_prompt_tokens + len(self.outputs[state.request_id])
            assert 0 <= state.num_in_flight_drafts <= state.num_in_flight_tokens
            assert state.num_wanted_tokens >= 1
            assert state.num_computed_tokens <= state.num_allocated_tokens
            if not self.in_flight:
                assert state.num_in_flight_tokens == 0

    def check_end(self) -> None:
        """All have ended, each with its own tokens, and nothing is left behind."""
        assert not self.in_flight
        self.scheduler.check_invariants()
        assert self.scheduler.kv.pool.num_used_blocks == 0, "blocks leaked"
        assert self.finished.keys() == self.requests.keys(), "a request never ended"
        for request_id, request in self.requests.items():
            tokens, reason = expected_tokens(request, self.scheduler.config.max_model_len)
            if request_id in self.aborted:
                assert self.outputs[request_id] == tokens[: len(self.outputs[request_id])]
            else:
                assert self.outputs[request_id] == tokens
                assert self.finished[request_id] is reason


@dataclass
class DraftStepTime(StepTimeModel):
    """A device in small: bound by reading weights, or by arithmetic, and a draft model if there is one."""

    weights: float = 10e-3
    """Seconds to read the weights once."""
    per_token: float = 0.1e-3
    """Seconds of arithmetic for a token."""
    per_context: float = 0.0
    when_drafting: float = 0.0
    """Seconds of a step with any draft, whatever their number."""
    per_pass: float = 0.0
    """Seconds of a pass of the draft model."""
    spread: float = 0.0
    """The q-quantile is the mean x (1 + spread x q)."""

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        if not shape.num_new_tokens:
            return 0.0
        # A smooth maximum, as measured steps have it.
        reading, arithmetic = self.weights, shape.num_new_tokens * self.per_token
        mean = float((reading**4 + arithmetic**4) ** 0.25)
        mean += (shape.decode_context_tokens + shape.chunk_cached_tokens) * self.per_context
        mean += self.when_drafting * (shape.num_draft_tokens > 0) + self.per_pass * shape.num_draft_passes
        return mean if q is None else mean * (1 + self.spread * q)

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        low, high = 0, 1 << 14
        while low < high:
            middle = (low + high + 1) // 2
            trial = replace(shape)
            trial.add(cached_tokens, middle, samples=True)
            if self.step_time(trial, q) <= budget:
                low = middle
            else:
                high = middle - 1
        return low

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


class TimedSpeculatingDriver(SpeculatingDriver):
    """A driver whose steps take as long as the model says."""

    def __init__(self, config: SchedulerConfig, model: DraftStepTime, **options) -> None:
        super().__init__(
            config, model=model, **({"fewer": 0.0, "available": None, "checks_all": False} | options)
        )
        self._model = model

    def step(self) -> bool:
        self.now -= 1.0
        return super().step()

    def collect(self) -> None:
        self.now += self._model.step_time(self.in_flight[0].shape)
        super().collect()

    def drafts_of(self, request_id: str, last: int) -> list[int]:
        """Drafts that were planned for a request in its last steps."""
        rows = [row for scheduled in self.log for row in scheduled.rows if row.request_id == request_id]
        return [row.num_draft_tokens for row in rows[-last:]]
