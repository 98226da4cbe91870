"""What goes wrong on a GPU is said in words, and what can go on does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from onbeat.core.errors import EngineDead, EngineError
from onbeat.core.request import Request
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.cuda.stream import CpuStream
from tests.cpu.engine.cuda.test_overlap import SETTINGS, make_runner, on_fake_device
from tests.cpu.engine.tiny_models import random_prompt


class BrokenStream(CpuStream):
    """Fails once, when it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, work: Callable[[], object]) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        super().run(work)


def chunk(key: str, blocks: tuple[int, ...], released: tuple[str, ...] = ()) -> SchedulerOutput:
    request = Request(request_id=key, prompt_token_ids=tuple(random_prompt(20)), sampling=SETTINGS[0])
    row = ScheduledRequest(key, 0, 20, (), samples=True)
    return SchedulerOutput(0, (row,), (AdmittedRequest(request, (), blocks),), released, BatchShape())


def test_after_a_step_that_did_not_fit_the_next_one_runs() -> None:
    stream = BrokenStream()
    runner = make_runner(on_fake_device(stream))
    expected = runner.execute(chunk("a", (1, 2)))
    stream.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    message = "a step of 20 tokens in 1 rows does not fit in the GPU's memory; lower --max-num-batched-tokens"
    with pytest.raises(EngineError, match=message):
        runner.execute(chunk("b", (3, 4), ("a",)))
    assert runner.execute(chunk("c", (3, 4), ("b",))).sampled_token_ids == expected.sampled_token_ids


def test_other_errors_of_the_device_end_the_engine() -> None:
    stream = BrokenStream()
    runner = make_runner(on_fake_device(stream))
    stream.error = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors")
    with pytest.raises(
        EngineDead, match="the GPU failed: CUDA error: an illegal memory access was encountered; the engine"
    ):
        runner.execute(chunk("a", (1, 2)))


def test_errors_of_the_program_stay_as_they_are() -> None:
    stream = BrokenStream()
    runner = make_runner(on_fake_device(stream))
    stream.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        runner.execute(chunk("a", (1, 2)))
