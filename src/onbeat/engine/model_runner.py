"""Runs planned steps: requests in arrays, one forward pass over the mixed batch, sampling."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import (
    AdmittedRequest,
    BatchShape,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from onbeat.engine.attention.base import AttentionBackend, ForwardContext
from onbeat.engine.attention.registry import select_attention_backend
from onbeat.engine.input_batch import InputBatch, StepInputs
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.models.model import Model
from onbeat.engine.sampler import SampledTokens, SamplingRow


class TokenSampler(Protocol):
    """Chooses one token per row of logits."""

    def sample(self, logits_RV: Tensor, rows: list[SamplingRow]) -> SampledTokens: ...


class ModelRunner:
    """Holds the KV cache and the tokens of live requests, and executes steps in the order they were planned.

    The tokens it samples are kept here, so that a step may be planned before the scheduler saw the tokens of
    the step before it.

    Parameters
    ----------
    model : built model.
    num_blocks : KV blocks, ids 0 to `num_blocks` - 1.
    block_size : tokens of a block, a multiple of 16.
    max_num_seqs : most requests at once.
    max_model_len : most tokens of one request.
    sampler : chooses tokens.
    """

    def __init__(
        self,
        *,
        model: Model,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        sampler: TokenSampler,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        spec = KVCacheSpec.of_model(model.config, dtype=model.dtype, block_size=block_size)
        backend = select_attention_backend(model.device)
        with torch.inference_mode():
            self.attention: AttentionBackend = backend(model.config, spec.allocate(num_blocks, model.device))
        self.batch = InputBatch(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        for request_id in scheduled.released_ids:
            self.batch.release(request_id)
        for admitted in scheduled.admitted:
            self.batch.admit(admitted)
        if not scheduled.rows:
            return ModelRunnerOutput([])
        inputs = self.batch.prepare(scheduled.rows)
        with torch.inference_mode():
            hidden_TD = self._forward(inputs)
            if not inputs.sampling_rows:
                return ModelRunnerOutput([])
            sampling_tokens = torch.from_numpy(inputs.sampling_tokens).to(self.model.device)
            logits_RV = self.model.logits(hidden_TD.index_select(0, sampling_tokens))
            sampled = self.sampler.sample(logits_RV, inputs.sampling_rows)
            for index in sampled.errors:
                # Its blocks will be another request's.
                self.attention.scrub(self.batch.block_ids(int(inputs.sampling_slots[index])))
        self.batch.append(inputs, sampled)
        return _to_output(inputs, sampled)

    def warm_up(self, num_tokens: int = 64) -> None:
        """Run a chunk and a decode, so that the first request finds kernels and memory prepared.

        Call before the first step: it writes to the first KV blocks.

        Parameters
        ----------
        num_tokens : length of the chunk; less where the KV cache or `max_model_len` is smaller.
        """
        block_size = self.batch.block_size
        num_tokens = min(num_tokens, self.max_model_len - 1, self.num_blocks * block_size - 1)
        request = Request(
            request_id="warm-up",
            prompt_token_ids=(0,) * max(num_tokens, 1),
            sampling=SamplingParams(temperature=0.0),
        )
        num_prompt_tokens = len(request.prompt_token_ids)
        admitted = AdmittedRequest(request, (), tuple(range(num_prompt_tokens // block_size + 1)))
        chunk = ScheduledRequest(request.request_id, 0, num_prompt_tokens, (), samples=True)
        decode = ScheduledRequest(request.request_id, num_prompt_tokens, 1, (), samples=True)
        self.execute(SchedulerOutput(-2, (chunk,), (admitted,), (), BatchShape()))
        if num_prompt_tokens < self.max_model_len:
            self.execute(SchedulerOutput(-1, (decode,), (), (), BatchShape()))
        self.batch.release(request.request_id)

    def _forward(self, inputs: StepInputs) -> Tensor:
        context = ForwardContext(self.attention, self.attention.plan(inputs.attention))
        return self.model.forward(
            torch.from_numpy(inputs.token_ids_T).to(self.model.device),
            torch.from_numpy(inputs.positions_T).to(self.model.device),
            context,
        )


def _to_output(inputs: StepInputs, sampled: SampledTokens) -> ModelRunnerOutput:
    token_ids = [[token_id] for token_id in sampled.token_ids]
    logprobs = None
    if any(entry is not None for entry in sampled.logprobs):
        logprobs = [None if entry is None else [entry] for entry in sampled.logprobs]
    if not sampled.errors:
        return ModelRunnerOutput(token_ids, logprobs)
    for index in sampled.errors:
        token_ids[index] = []
    failed = {inputs.sampling_request_ids[index]: message for index, message in sampled.errors.items()}
    return ModelRunnerOutput(token_ids, logprobs, failed)
