"""Drives a model runner with plans made up by the test: a stand-in for the scheduler; blocks are shuffled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.engine.draw import Logits
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampled import BestTokens, SampledTokens
from onbeat.engine.sampling_row import SamplingRow
from tests.cpu.engine.forwards import MakeForward
from tests.cpu.engine.seeing_sampler import SeesLogits
from tests.pure.scheduler.driver import make_config

GREEDY = SamplingParams(temperature=0.0, num_logprobs=0)
"""Its logits come to the host even where a device could choose."""


class RecordingSampler(SeesLogits):
    """Greedy; keeps the logits it saw, and looks whether the best of them are those that it is told."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def sample(
        self, logits_RV: Logits | None, rows: list[SamplingRow], best: BestTokens | None = None
    ) -> SampledTokens:
        assert logits_RV is not None
        assert logits_RV.shape[0] == len(rows)
        self.logits.append(torch.from_numpy(logits_RV.copy()))
        token_ids = logits_RV.argmax(axis=-1)
        if best is not None:
            np.testing.assert_array_equal(best.ids_R, token_ids)
            np.testing.assert_array_equal(best.logits_R, logits_RV.max(axis=-1).astype(np.float32))
        return SampledTokens(token_ids.tolist(), [None] * len(rows))


@dataclass
class LiveRequest:
    request: Request
    max_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_running: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return len(self.output_token_ids) >= self.max_tokens


class StepDriver:
    """Plans steps for a runner and checks what comes back.

    Parameters
    ----------
    make_forward : makes what runs.
    block_size, num_blocks, max_model_len : of the runner's KV cache.
    seed : of the order in which blocks are handed out.
    """

    def __init__(
        self,
        make_forward: MakeForward,
        *,
        block_size: int = 16,
        num_blocks: int = 128,
        max_model_len: int = 320,
        max_num_seqs: int = 32,
        seed: int = 0,
    ) -> None:
        self.sampler = RecordingSampler()
        limits = make_config(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs,
            max_model_len=min(max_model_len, num_blocks * block_size),
        )
        forward = make_forward(num_blocks=num_blocks, block_size=block_size)
        self.runner = ModelRunner(limits, forward, self.sampler)
        self.block_size = block_size
        self.random = random.Random(seed)
        self.free_blocks = list(range(num_blocks))
        self.random.shuffle(self.free_blocks)
        self.requests: dict[str, LiveRequest] = {}
        self.released: list[str] = []
        self.step_id = 0

    def add(self, prompt: list[int], max_tokens: int) -> str:
        request_id = f"request-{len(self.requests)}"
        request = Request(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=GREEDY)
        self.requests[request_id] = LiveRequest(request, max_tokens)
        return request_id

    def release(self, request_id: str) -> None:
        """Finish or preempt: blocks are free for the next step, computed tokens are lost."""
        live = self.requests[request_id]
        self.free_blocks += live.block_ids
        self.random.shuffle(self.free_blocks)
        live.block_ids, live.num_computed_tokens, live.is_running = [], 0, False
        self.released.append(request_id)

    def step(self, chunks: dict[str, int], padding: Sequence[str] = ()) -> ModelRunnerOutput:
        """Run up to so many tokens of each request in one step; dict order is row order.

        Requests in `padding` come first and run their last computed token again.
        """
        rows = [
            ScheduledRequest(key, self.requests[key].num_computed_tokens - 1, 1, (), samples=False)
            for key in padding
        ]
        admitted = []
        for request_id, limit in chunks.items():
            live = self.requests[request_id]
            num_new_tokens = min(live.num_tokens - live.num_computed_tokens, limit)
            new_block_ids = self._grow(live, live.num_computed_tokens + num_new_tokens)
            if not live.is_running:
                admitted.append(AdmittedRequest(live.request, tuple(live.output_token_ids), new_block_ids))
                live.is_running, new_block_ids = True, ()
            samples = live.num_computed_tokens + num_new_tokens == live.num_tokens
            rows.append(
                ScheduledRequest(request_id, live.num_computed_tokens, num_new_tokens, new_block_ids, samples)
            )
            live.num_computed_tokens += num_new_tokens
        scheduled = SchedulerOutput(
            self.step_id, tuple(rows), tuple(admitted), tuple(self.released), BatchShape()
        )
        self.step_id += 1
        self.released = []
        output = self.runner.execute(scheduled)
        self._take(rows, output)
        return output

    def run(self, chunk: int) -> None:
        """Run everything to its end, all requests in every step."""
        while unfinished := [key for key, live in self.requests.items() if not live.is_finished]:
            self.step(dict.fromkeys(unfinished, chunk))

    def _grow(self, live: LiveRequest, num_tokens: int) -> tuple[int, ...]:
        missing = -(-num_tokens // self.block_size) - len(live.block_ids)
        new_block_ids = tuple(self.free_blocks.pop() for _ in range(missing))
        live.block_ids += new_block_ids
        return new_block_ids

    def _take(self, rows: list[ScheduledRequest], output: ModelRunnerOutput) -> None:
        sampling = [row for row in rows if row.samples]
        assert len(output.sampled_token_ids) == len(sampling)
        for index, row in enumerate(sampling):
            live = self.requests[row.request_id]
            live.output_token_ids += output.sampled_token_ids[index]
            live.logits.append(self.sampler.logits[-1][index])
            if live.is_finished:
                self.release(row.request_id)
