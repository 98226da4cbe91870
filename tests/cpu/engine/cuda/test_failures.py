"""What goes wrong on a GPU is said in words, and what can go on does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onbeat.core.errors import EngineDead, EngineError
from onbeat.core.request import Request
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.cuda.state import DeviceState
from onbeat.engine.cuda.stream import CpuStream
from onbeat.engine.forward import Mark
from onbeat.engine.memory import KVCacheSpec
from onbeat.engine.model_config.architecture import KVHeads
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.torch.kv import scrub
from tests.cpu.engine.cuda.test_overlap import (
    MAX_NUM_SEQS,
    SERIAL_SETTINGS,
    SETTINGS,
    decode,
    make_runner,
    on_fake_device,
    plant_nan,
)
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


def chunk(
    key: str, blocks: tuple[int, ...], released: tuple[str, ...] = (), *, length: int = 20, settings: int = 0
) -> SchedulerOutput:
    sampling = (*SETTINGS, *SERIAL_SETTINGS)[settings]
    request = Request(request_id=key, prompt_token_ids=tuple(random_prompt(length)), sampling=sampling)
    row = ScheduledRequest(key, 0, length, (), samples=True)
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
    with pytest.raises(EngineDead, match="CUDA error: an illegal memory access was encountered; "):
        runner.execute(chunk("a", (1, 2)))


def test_errors_of_the_program_stay_as_they_are() -> None:
    stream = BrokenStream()
    runner = make_runner(on_fake_device(stream))
    stream.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        runner.execute(chunk("a", (1, 2)))


def next_tokens(runner: ModelRunner, released: str, length: int) -> list[list[int]]:
    """Run a prompt in the blocks 3 and 4 in another one's place, and a decode, which reads tables."""
    first = runner.execute(chunk("c", (3, 4), (released,), length=length))
    second = SchedulerOutput(1, (decode("c", length),), (), (), BatchShape())
    return first.sampled_token_ids + runner.execute(second).sampled_token_ids


@pytest.mark.parametrize("error", [RuntimeError("Error in standard plan"), ValueError("a bug")], ids=str)
def test_after_a_step_that_was_not_queued_the_device_learns_tables_again(error: Exception) -> None:
    stream = BrokenStream()
    runner = make_runner(on_fake_device(stream))
    runner.execute(chunk("a", (1, 2)))
    runner.execute(SchedulerOutput(1, (decode("a", 20),), (), (), BatchShape()))
    stream.error = error
    with pytest.raises(type(error)):
        runner.execute(chunk("b", (3, 4), ("a",), length=25))
    expected = next_tokens(make_runner(on_fake_device(CpuStream())), "b", 25)
    assert next_tokens(runner, "b", 25) == expected


class DeadStream(CpuStream):
    """A device that fails, which every call says from then on; the first one that is to be told by name."""

    def __init__(self) -> None:
        self.told_by = ""

    def tell(self, name: str) -> None:
        if self.told_by in (name, "all"):
            self.told_by = "all"
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def run(self, work: Callable[[], object]) -> None:
        self.tell("run")
        super().run(work)

    def mark(self) -> Mark:
        self.tell("mark")
        return DeadMark(self)


class DeadMark:
    def __init__(self, stream: DeadStream) -> None:
        self._stream = stream

    def is_passed(self) -> bool:
        self._stream.tell("is_passed")
        return True

    def wait(self) -> None:
        self._stream.tell("wait")

    def seconds_since(self, earlier: Mark) -> float:
        raise NotImplementedError


@pytest.mark.parametrize("settings", [0, len(SETTINGS)])
@pytest.mark.parametrize("told_by", ["is_passed", "run", "mark", "wait"])
def test_whatever_tells_that_the_device_failed_ends_the_engine(told_by: str, settings: int) -> None:
    stream = DeadStream()
    runner = make_runner(on_fake_device(stream))
    for index in range(3):  # every entry of the ring is in use
        runner.execute(chunk(f"r{index}", (2 * index, 2 * index + 1), settings=settings))
    stream.told_by = told_by
    for key in ("a", "b"):
        with pytest.raises(EngineDead, match="GPU failed: CUDA error"):
            runner.execute(chunk(key, (7, 8), settings=settings))
    with pytest.raises(EngineDead):
        runner.forward.scrub(np.array([1]))


def test_a_request_is_forgotten_even_where_its_blocks_cannot_be_cleared_yet() -> None:
    stream = BrokenStream()
    forward = on_fake_device(stream)
    runner = make_runner(forward)
    runner.execute(chunk("bad", (1, 2)))
    plant_nan(forward, block=1)
    assert runner.execute(SchedulerOutput(1, (decode("bad", 20),), (), (), BatchShape())).failed
    stream.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(EngineError, match=r"clearing .*GPU"):
        runner.execute(chunk("lost", (3, 4), ("bad",)))
    for index in range(MAX_NUM_SEQS):
        blocks = (2 * index + 1, 2 * index + 2)
        assert not runner.execute(chunk(f"r{index}", blocks, ("lost",) * (index == 0))).failed


def test_many_blocks_are_cleared_a_few_at_a_time() -> None:
    class Largest(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if "index_select" in str(func):
                self.num_bytes = max(self.num_bytes, made.nbytes)
            return made

    forward = on_fake_device(CpuStream())
    spec = KVCacheSpec(heads=(KVHeads(1, 4),), dtype=np.dtype(np.float64), block_size=16)
    state = DeviceState(spec, replace(forward.options, num_blocks=3000), torch.device("cpu"))
    state.kv[0].k_BKSH[2999], state.kv[0].v_BKSH[5] = torch.nan, torch.inf
    with Largest() as largest:
        scrub(state.kv, torch.arange(3000))
    assert all(part.isfinite().all() for part in state.kv[0])
    assert 0 < largest.num_bytes <= 300 * spec.block_bytes
