"""Runs planned steps: requests in arrays, one forward pass over the mixed batch, sampling."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import (
    AdmittedRequest,
    BatchShape,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from onbeat.engine.forward import ForwardPass
from onbeat.engine.input_batch import InputBatch, StepInputs
from onbeat.engine.sampler import BestTokens, SampledTokens, SamplingRow


class TokenSampler(Protocol):
    """Chooses one token per row of logits."""

    def needs_logits(self, rows: list[SamplingRow]) -> bool:
        """Whether more than each row's most likely token is needed to choose."""
        ...

    def sample(
        self, logits_RV: Tensor | None, rows: list[SamplingRow], best: BestTokens | None = None
    ) -> SampledTokens: ...


class ModelRunner:
    """Holds the tokens of live requests, and executes steps in the order they were planned.

    The tokens it samples are kept here, so that a step may be planned before the scheduler saw the tokens of
    the step before it.

    Parameters
    ----------
    forward : the model and its KV cache.
    num_blocks : KV blocks of `forward`, ids 0 to `num_blocks` - 1.
    block_size : tokens of each.
    max_num_seqs : most requests at once.
    max_model_len : most tokens of one request.
    sampler : chooses tokens.
    """

    def __init__(
        self,
        *,
        forward: ForwardPass,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        sampler: TokenSampler,
    ) -> None:
        self.forward = forward
        self.sampler = sampler
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
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
        rows = inputs.sampling_rows
        logits = self.forward.run(inputs, wants_logits=self.sampler.needs_logits(rows))
        if not rows:
            return ModelRunnerOutput([])
        sampled = self.sampler.sample(logits.values_RV, rows, logits.best)
        for index in sampled.errors:
            # Its blocks will be another request's.
            self.forward.scrub(self.batch.block_ids(int(inputs.sampling_slots[index])))
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
