"""Runs requests through the real scheduler and the real model runner."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from onbeat.core.request import Request, SamplingParams, TokenLogprobs
from onbeat.core.slo import SLO, Fate
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampler import Sampler
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.cpu.engine.engines import TinyEngine
from tests.cpu.engine.forwards import MakeForward
from tests.cpu.engine.tiny_models import tiny_model
from tests.fake_step_time import LinearStepTime


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to serve the same requests. `arrivals`: a new request every so many steps; 0 is all at once."""

    policy: str = "sarathi"
    budget: int | None = None
    num_blocks: int = 400
    depth: int = 1
    arrivals: int = 0
    repeats: int = 1
    """How often the whole set is sent; from the second time on the prefix cache holds it."""
    max_num_seqs: int = 8
    objectives: Sequence[SLO | None] = (None,)
    """What requests are promised, in turn."""
    num_prompt_logprobs: int | None = None
    is_cached: bool = True
    num_snapshots: int | None = None
    windows: tuple[int, int] = (1, 0)
    """Block tables of a request, and tokens that a window reads; `num_blocks` are of each table."""

    def __str__(self) -> str:
        return "-".join(str(value) for value in (self.policy, self.budget, self.num_blocks, self.depth))


@dataclass
class Outcome:
    tokens: list[list[int]]
    """Of each prompt, for each repeat."""
    num_preemptions: int
    num_prefix_hits: int
    num_mixed_steps: int
    num_relegated: int
    """Requests that ended as best effort."""
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    """Of each request that has some, in the order of `tokens`."""


class PredictedTime(ThreadExecutor):
    """One that moves a clock by each step's predicted time, so that runs repeat exactly."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        super().__init__(runner)
        self.now = 0.0
        self._scheduler = scheduler

    def submit(self, scheduled: SchedulerOutput) -> Future[ModelRunnerOutput]:
        assert self._scheduler.step_time_model is not None
        self.now += self._scheduler.step_time_model.step_time(scheduled.shape)
        return super().submit(scheduled)


def run_and_check(
    engine: TinyEngine,
    name: str,
    prompts: list[list[int]],
    max_tokens: int,
    setting: Setting,
    max_model_len: int = 256,
) -> Outcome:
    """Serve all prompts greedily with a tiny model; checks the tokens against the reference's."""
    outcome = run_engine(engine.make_forward(name), prompts, max_tokens, setting, max_model_len=max_model_len)
    for tokens, prompt in zip(outcome.tokens, prompts * setting.repeats, strict=True):
        engine.check(tokens, *tiny_model(name).reference(tuple(prompt), max_tokens, tokens))
    return outcome


def run_engine(
    make_forward: MakeForward,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    setting: Setting,
    *,
    max_model_len: int,
) -> Outcome:
    """Serve all prompts greedily, in predicted time; checks that no block is left behind."""
    config = SchedulerConfig(
        num_blocks=setting.num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.budget or max_model_len,
        policy=setting.policy,
        enable_prefix_caching=setting.is_cached,
        num_snapshots=setting.num_snapshots,
        num_tables=setting.windows[0],
        window_length=setting.windows[1],
    )
    more: dict[str, Any] = {"num_tables": config.num_tables} if config.num_tables > 1 else {}
    forward = make_forward(num_blocks=config.num_pages, block_size=config.block_size, **more)
    runner = ModelRunner(config, forward, Sampler(forward.config.vocab_size))
    scheduler = Scheduler(config, LinearStepTime())
    executor = PredictedTime(runner, scheduler)
    core = EngineCore(scheduler, executor, max_in_flight_steps=setting.depth, clock=lambda: executor.now)
    relegated_ids: set[str] = set()
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[TokenLogprobs]] = {}
    num_mixed_steps = 0
    for repeat in range(setting.repeats):
        pending = list(enumerate(prompts))
        tokens |= {f"{repeat}-{index}": [] for index, _ in pending}
        num_steps = 0
        while pending or core.has_work:
            while pending and (not setting.arrivals or num_steps % setting.arrivals == 0):
                index, prompt = pending.pop(0)
                core.add(
                    Request(
                        request_id=f"{repeat}-{index}",
                        prompt_token_ids=tuple(prompt),
                        sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
                        arrival=executor.now,
                        slo=setting.objectives[index % len(setting.objectives)],
                        num_prompt_logprobs=setting.num_prompt_logprobs,
                    )
                )
                if setting.arrivals:
                    break
            num_steps += 1
            message = core.step()
            if message is None:
                continue
            assert message.stats is not None
            num_mixed_steps += bool(message.stats.shape.num_chunks and message.stats.shape.num_decodes)
            for output in message.outputs:
                assert output.error is None, output.error
                if output.prompt_logprobs is not None:
                    assert not tokens[output.request_id], "they come with the first token, once"
                    scores[output.request_id] = output.prompt_logprobs
                tokens[output.request_id] += output.new_token_ids
                if output.fate is Fate.RELEGATED:
                    relegated_ids.add(output.request_id)
    scheduler.check_invariants()
    assert scheduler.kv.pool.num_used_blocks == 0
    core.shutdown()
    return Outcome(
        list(tokens.values()),
        scheduler.table.num_preemptions,
        scheduler.table.num_prefix_hits,
        num_mixed_steps,
        len(relegated_ids),
        [scores[request_id] for request_id in tokens if request_id in scores],
    )
