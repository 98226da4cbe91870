"""Runs requests through scheduler, step loop and model runner, with and without drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from onbeat.core.request import FinishReason, Request, SamplingParams, TokenLogprobs
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import PendingStep, ThreadExecutor, done_step
from onbeat.engine.guided_draw import Guides
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.speculation.build import NgramProposer
from onbeat.engine.speculation.proposer import Proposer
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import DraftLength, SchedulerConfig, SpeculationConfig
from onbeat.speculative_config import read_speculative_config
from tests.cpu.engine.forwards import MakeForward
from tests.cpu.engine.tiny_models import random_prompt
from tests.fake_step_time import LinearStepTime

LIMITS: Mapping[str, Any] = {
    "num_blocks": 128,
    "block_size": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "max_model_len": 256,
    "policy": "sarathi",
}
"""A budget below the longest prompts, so that they come in chunks beside rows that verify."""


@dataclass
class Outcome:
    """What became of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass
class Run:
    """What became of all requests, and the steps that it took."""

    outcomes: dict[str, Outcome]
    steps: list[tuple[SchedulerOutput, ModelRunnerOutput]]

    @property
    def token_ids(self) -> dict[str, list[int]]:
        return {key: outcome.token_ids for key, outcome in self.outcomes.items()}

    @property
    def finish_reasons(self) -> dict[str, FinishReason | None]:
        return {key: outcome.finish_reason for key, outcome in self.outcomes.items()}

    @property
    def num_drafted(self) -> int:
        return sum(outcome.num_drafted for outcome in self.outcomes.values())

    @property
    def num_accepted(self) -> int:
        return sum(outcome.num_accepted for outcome in self.outcomes.values())

    @property
    def num_preemptions(self) -> int:
        return sum(outcome.num_preemptions for outcome in self.outcomes.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(outcome.num_cached_tokens for outcome in self.outcomes.values())


class NotingRunner:
    """A model runner whose steps are kept."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.steps: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        result = self.runner.execute(scheduled)
        self.steps.append((scheduled, result))
        return done_step(result)


def fixed(num_drafts: int, draft_length: DraftLength = "fixed") -> SpeculationConfig:
    return SpeculationConfig(num_speculative_tokens=num_drafts, draft_length=draft_length)


def ngram(num_drafts: int, **keys: int) -> NgramProposer:
    options = {"prompt_lookup_max": 3, "prompt_lookup_min": 1} | keys
    return NgramProposer(
        read_speculative_config({"method": "ngram", "num_speculative_tokens": num_drafts} | options)
    )


def run(
    make_forward: MakeForward,
    requests: Sequence[Request],
    *,
    speculation: SpeculationConfig | None = None,
    proposer: Proposer | None = None,
    overlapped: bool = False,
    later: Iterable[Request] = (),
    sampler: Any = None,
    guides: Guides | None = None,
    **limits: Any,
) -> Run:
    """Serve requests to their ends, `later` ones once all others have ended; check that nothing is left."""
    config = SchedulerConfig(**{**LIMITS, **limits}, speculation=speculation)
    forward = make_forward(num_blocks=config.num_blocks, block_size=config.block_size)
    runner = NotingRunner(
        ModelRunner(config, forward, sampler or Sampler(forward.config.vocab_size), proposer)
    )
    runner.runner.guides = guides
    ticks = itertools.count()
    core = EngineCore(
        Scheduler(config, LinearStepTime()),
        ThreadExecutor(runner),
        max_in_flight_steps=2 if overlapped else 1,
        clock=lambda: next(ticks) * 1e-3,
    )
    outcomes: dict[str, Outcome] = {}
    for batch in (requests, later):
        for request in batch:
            outcomes[request.request_id] = Outcome()
            core.add(request)
        while core.has_work:
            message = core.step()
            for output in message.outputs if message else ():
                _take(outcomes[output.request_id], output)
    core.scheduler.check_invariants()
    core.shutdown()
    return Run(outcomes, runner.steps)


def _take(outcome: Outcome, output: Any) -> None:
    assert outcome.finish_reason is None, "a delivery after the last"
    outcome.token_ids += output.new_token_ids
    outcome.logprobs += output.logprobs or []
    outcome.finish_reason, outcome.error = output.finish_reason, output.error
    outcome.num_cached_tokens = output.num_cached_tokens
    outcome.num_preemptions = output.num_preemptions
    outcome.num_drafted, outcome.num_accepted = output.num_drafted_tokens, output.num_accepted_tokens


def make_request(name: str, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Request:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | sampling))
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=params)


def make_requests(**sampling: Any) -> list[Request]:
    """Some prompts: short, long, two of them equal, one that repeats itself."""
    prompts = [random_prompt(length) for length in (5, 130, 40, 40, 17)] + [random_prompt(6) * 5]
    return [
        make_request(f"r{index}", prompt, 30 + 3 * index, **{"seed": index, **sampling})
        for index, prompt in enumerate(prompts)
    ]


class ScriptedProposer(Proposer):
    """Proposes what a run without drafts said, or something else.

    Parameters
    ----------
    answer : the tokens that follow a request's prompt.
    right : whether the draft for a position (of prompt and output) is to be the right one; by default all.
    shortfall : how many drafts fewer than asked, by position.
    """

    def __init__(
        self,
        answer: Callable[[SamplingRow], list[int]],
        right: Any = lambda position: True,
        shortfall: Any = lambda position: 0,
    ) -> None:
        self.answer = answer
        self.right = right
        self.shortfall = shortfall
        self.released: list[int] = []

    def release(self, slot: int) -> None:
        self.released.append(slot)

    def propose(self, batch: Any, rows: Any) -> list[list[int]]:
        return [self._drafts(batch, row) for row in rows]

    def _drafts(self, batch: Any, row: Any) -> list[int]:
        sampling_row = batch.sampling_rows[row.slot]
        known = [*sampling_row.prompt_token_ids, *sampling_row.output_token_ids]
        assert row.num_tokens == len(known)
        assert batch.token_ids_SP[row.slot, : row.num_tokens].tolist() == known
        assert batch.num_blocks_S[row.slot] * batch.block_size >= row.num_tokens + row.num_drafts
        everything = [*sampling_row.prompt_token_ids, *self.answer(sampling_row)]
        num_drafts = max(row.num_drafts - self.shortfall(row.num_tokens), 0)
        positions = range(row.num_tokens, min(row.num_tokens + num_drafts, len(everything)))
        return [everything[p] if self.right(p) else (everything[p] + 1) % 211 for p in positions]

    def num_available(self, batch: Any, slots: Sequence[int], num_tokens: Sequence[int]) -> list[int] | None:
        assert num_tokens == batch.num_tokens_S[slots].tolist()
        return None

    def close(self) -> None: ...


def answers(requests: Iterable[Request], reference: Run) -> Callable[[SamplingRow], list[int]]:
    """Return what a run answered; requests are told apart by prompt and seed."""
    known = {(r.prompt_token_ids, r.sampling.seed): reference.token_ids[r.request_id] for r in requests}
    return lambda row: known[row.prompt_token_ids, row.params.seed]


def assert_same(speculated: Run, plain: Run) -> None:
    assert speculated.token_ids == plain.token_ids
    assert speculated.finish_reasons == plain.finish_reasons
    for key, outcome in speculated.outcomes.items():
        expected = plain.outcomes[key].logprobs
        assert len(outcome.logprobs) == len(expected)
        for got, wanted in zip(outcome.logprobs, expected, strict=True):
            assert (got.token_id, got.top_token_ids) == (wanted.token_id, wanted.top_token_ids)
            values = (got.logprob, *got.top_logprobs)
            assert values == pytest.approx((wanted.logprob, *wanted.top_logprobs), abs=1e-4)
