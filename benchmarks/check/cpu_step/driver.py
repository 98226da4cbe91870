"""Makes a model runner execute steps of chosen shapes, one after another, and times them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.forward import ForwardPass, StepLogits
from onbeat.engine.input_batch import StepInputs
from onbeat.engine.model_runner import ModelRunner

from .floor import Case

FILL_CHUNK = 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=2**20)


class StepSeconds(NamedTuple):
    """Of one step."""

    whole: float
    """Of `ModelRunner.execute`: input, forward pass, sampling."""
    forward: float
    """Of the forward pass: as it says itself, else around its call."""
    cpu: float
    """Of all threads of this process, meanwhile: `whole` as processor time."""


class ForwardClock:
    """Notes how long each step takes in a forward pass, until it is stopped."""

    def __init__(self, forward: ForwardPass) -> None:
        self.seconds: list[float] = []
        run = forward.run

        def timed(inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
            start = time.perf_counter()
            logits = run(inputs, wants_logits=wants_logits)
            around = time.perf_counter() - start
            self.seconds.append(around if logits.seconds is None else logits.seconds)
            return logits

        self._patch = patch.object(forward, "run", timed)
        self._patch.start()

    def stop(self) -> None:
        self._patch.stop()


class StepDriver:
    """Holds requests with a filled KV cache, and runs steps on them.

    Parameters
    ----------
    runner : idle; it is left empty by `close`.
    num_requests, num_tokens : requests for decodes, and the longest context of each.
    """

    def __init__(self, runner: ModelRunner, *, num_requests: int, num_tokens: int, seed: int = 0) -> None:
        self._runner = runner
        self._clock = ForwardClock(runner.forward)
        self._rng = np.random.default_rng(seed)
        # Blocks lie scattered, as in a cache that has been in use.
        self._free_blocks: list[int] = self._rng.permutation(runner.num_blocks).tolist()
        self._ids = [f"decode-{index}" for index in range(num_requests)]
        self._execute((), admitted=[self._admit(request_id, num_tokens) for request_id in self._ids])
        self._fill(num_tokens)

    def close(self) -> None:
        """Release all requests, and leave the runner as it was."""
        self._execute((), released=self._ids)
        self._clock.stop()

    def run(self, case: Case, num_steps: int) -> list[StepSeconds]:
        """Run a case several times; decodes go on by a token a step, around the case's context."""
        with no_collection():
            if case.new_tokens == 1:
                first = case.context - num_steps // 2
                return [self._decode(case.batch, first + step) for step in range(num_steps)]
            return [self._prefill(case.new_tokens) for _ in range(num_steps)]

    def _decode(self, batch: int, context: int) -> StepSeconds:
        rows = [
            ScheduledRequest(request_id, context - 1, 1, (), samples=True) for request_id in self._ids[:batch]
        ]
        return self._execute(rows)

    def _prefill(self, num_tokens: int) -> StepSeconds:
        admitted = self._admit("prefill", num_tokens)
        self._execute((), admitted=[admitted])
        seconds = self._execute([ScheduledRequest("prefill", 0, num_tokens, (), samples=True)])
        self._execute((), released=["prefill"])
        self._free_blocks += admitted.block_ids
        return seconds

    def _fill(self, num_tokens: int) -> None:
        """Compute every request's keys and values, so that no read finds untouched memory."""
        for request_id in self._ids:
            for start in range(0, num_tokens, FILL_CHUNK):
                length = min(FILL_CHUNK, num_tokens - start)
                self._execute([ScheduledRequest(request_id, start, length, (), samples=False)])

    def _admit(self, request_id: str, num_tokens: int) -> AdmittedRequest:
        vocab_size = self._runner.forward.config.vocab_size
        token_ids: list[int] = self._rng.integers(0, vocab_size, num_tokens).tolist()
        num_blocks = -(-num_tokens // self._runner.batch.block_size)
        block_ids = tuple(self._free_blocks.pop() for _ in range(num_blocks))
        request = Request(request_id=request_id, prompt_token_ids=tuple(token_ids), sampling=GREEDY)
        return AdmittedRequest(request, (), block_ids)

    def _execute(
        self,
        rows: Sequence[ScheduledRequest],
        *,
        admitted: Sequence[AdmittedRequest] = (),
        released: Sequence[str] = (),
    ) -> StepSeconds:
        shape = BatchShape()
        for row in rows:
            shape.add(row.num_computed_tokens, row.num_new_tokens, samples=row.samples)
        scheduled = SchedulerOutput(0, tuple(rows), tuple(admitted), tuple(released), shape)
        self._clock.seconds.clear()
        start, cpu = time.perf_counter(), time.process_time()
        self._runner.execute(scheduled)
        whole = time.perf_counter() - start
        return StepSeconds(whole, sum(self._clock.seconds), time.process_time() - cpu)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
