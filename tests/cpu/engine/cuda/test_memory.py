"""The KV cache gets what is left of a GPU's memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from onbeat.core.errors import ConfigError
from onbeat.engine.backends.base import Room
from onbeat.engine.backends.torch import CudaBackend, MeasuredMemory, TorchBackend, largest_steps
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import EagerGraphs, GraphKey
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.dtypes import FLOAT32
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.scheduler_config import DraftLength, SchedulerConfig, SpeculationConfig
from tests.cpu.engine.cuda.test_backend import MODEL as TINY
from tests.cpu.engine.reference_kernels import ReferenceKernels

GIB = 2**30
MEASURED = MeasuredMemory(total=80 * GIB, used=16 * GIB, step=GIB, num_graphs=13)
BLOCK_BYTES = 2 << 20


def num_blocks(measured: MeasuredMemory = MEASURED, other_bytes: int = 0, wanted: int | None = None) -> int:
    return measured.num_blocks(0.9, block_bytes=BLOCK_BYTES, other_bytes=other_bytes, wanted=wanted)


def test_the_kv_cache_takes_the_share_that_nothing_else_needs() -> None:
    rest = 0.9 * 80 * GIB - 17 * GIB
    assert rest - GIB < num_blocks() * BLOCK_BYTES < rest - 256 * 2**20
    assert num_blocks() - num_blocks(other_bytes=GIB) == 512
    assert num_blocks(wanted=100) == 100


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    full = MeasuredMemory(total=80 * GIB, used=71 * GIB, step=GIB, num_graphs=0)
    with pytest.raises(ConfigError, match=r"80.0.*GiB.*71.0"):
        num_blocks(full)
    with pytest.raises(ConfigError, match=r"54\.\d.*GiB.*78.1") as caught:
        num_blocks(wanted=40_000)
    fitting = int(str(caught.value).rsplit(" ", 1)[1].removesuffix("M"))
    assert num_blocks(wanted=(fitting << 20) // BLOCK_BYTES) > 0


@pytest.mark.parametrize("block_bytes", [100 << 10, 1536 << 10])
def test_a_size_that_would_fit_holds_a_block(block_bytes: int) -> None:
    left = 2 * block_bytes + (64 << 20)  # a block, and the one for padding
    small = MeasuredMemory(total=GIB, used=GIB - left, step=0, num_graphs=0)
    with pytest.raises(ConfigError, match=f"--kv-cache-memory-bytes {block_bytes}$"):
        small.num_blocks(1.0, block_bytes=block_bytes, other_bytes=0, wanted=7)


@pytest.mark.parametrize(("max_model_len", "lens"), [(400, [400, 400, 200]), (4000, [1000])])
def test_the_largest_steps_are_a_full_chunk_and_all_rows(max_model_len: int, lens: list[int]) -> None:
    limits = SchedulerConfig(
        policy="sarathi",
        num_blocks=4096,
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=1000,
    )
    chunks, decodes = largest_steps(limits)
    assert chunks.attention.query_lens_R.tolist() == lens
    assert len(np.unique(chunks.attention.slot_mapping_T)) == 1000
    assert decodes.attention.query_lens_R.tolist() == [1] * 8
    assert len(np.unique(decodes.attention.slot_mapping_T)) == 8


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1000, 8), (12, 2)])
def test_with_drafts_a_step_that_draws_behind_all_of_them_is_measured(num_tokens: int, num_rows: int) -> None:
    limits = SchedulerConfig(
        policy="sarathi",
        num_blocks=4096,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=num_tokens,
        speculation=SpeculationConfig(num_speculative_tokens=4),
    )
    verifying = largest_steps(limits)[2]
    assert verifying.attention.query_lens_R.tolist() == [5] * num_rows
    assert sorted(verifying.sampling_tokens.tolist()) == [*range(5 * num_rows)]
    weights = load_weights(DummyCheckpoint(TINY), torch.float32, torch.device("cpu"))
    options = CudaOptions(
        num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=400, max_num_batched_tokens=num_tokens
    )
    kernels = ReferenceKernels(kernel_sizes(weights, options))
    logits = CudaForward(weights, kernels, EagerGraphs(), options).run(verifying, wants_logits=True)
    assert logits.best is not None
    assert len(logits.best.ids_R) == 5 * num_rows


class Memory:
    """What torch says of a GPU's memory, where there is none."""

    total, free, reserved, peak = 80 * GIB, 60 * GIB, 18 * GIB, 20 * GIB

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers = {
            "mem_get_info": lambda _: (self.free, self.total),
            "memory_reserved": lambda _: self.reserved,
            "max_memory_reserved": lambda _: self.peak,
            "reset_peak_memory_stats": lambda _: None,
            "synchronize": lambda _: None,
            "empty_cache": lambda: None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)


def test_a_backend_measures_then_builds_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    config = EngineConfig(model=ModelFiles(kind="hf", path=Path("/nowhere"), name="tiny"), enforce_eager=True)
    device = DeviceConfig(CPU, FLOAT32, num_threads=1)
    backend = CudaBackend(DummyCheckpoint(TINY), device, config, ReferenceKernels)
    limits = SchedulerConfig(
        policy="sarathi", num_blocks=64, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=300
    )
    asked: list[int] = []
    said: list[str] = []

    def settle(num_blocks: int) -> SchedulerConfig:
        asked.append(num_blocks)
        return replace(limits, num_blocks=40)

    fitting = backend.fit_measured(limits, Room(settle, None), said.append)
    assert fitting.num_blocks == 40
    block_bytes = backend.needs(16).block_bytes
    rest = 0.9 * memory.total - (memory.total - memory.free) - (memory.peak - memory.reserved)
    assert asked[0] * block_bytes == pytest.approx(rest, rel=0.01)
    assert said == [
        "the largest steps take 2.0 GiB beside 20.0 GiB of 80.0 GiB of the GPU's memory, as measured"
    ]
    forward, _ = backend.build(fitting, said.append)
    assert isinstance(forward, CudaForward)
    assert forward.options.num_blocks == 40
    assert len(said) == 1
    memory.free = 7 * GIB
    backend.tell_excess(said.append)
    assert "1024 MiB more" in said[1]


def test_steps_captured_in_pieces_count_as_graphs_and_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch)
    monkeypatch.setattr("onbeat.engine.backends.torch.CudaGraphs", lambda _: EagerGraphs())
    limits = SchedulerConfig(
        policy="sarathi", num_blocks=64, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=200
    )
    model = ModelFiles(kind="hf", path=Path("/nowhere"), name="tiny")
    asked: list[int] = []

    def settle(num_blocks: int) -> SchedulerConfig:
        asked.append(num_blocks)
        return limits

    for pieces in (False, True):
        config = EngineConfig(model=model, cuda_graph_pieces=pieces)
        device = DeviceConfig(CPU, FLOAT32, num_threads=1)
        backend = CudaBackend(DummyCheckpoint(TINY), device, config, ReferenceKernels)
        forward, _ = backend.build(limits, lambda _: None, Room(settle, None))
        assert isinstance(forward, CudaForward)
    # 16, 32, 64, 128 and 192 tokens
    taken = (asked[0] - asked[1]) * backend.needs(16).block_bytes
    assert taken == pytest.approx(5 * (24 << 20), rel=0.01)
    assert re.search("pieces, .* 8 rows", str(forward.settings["graphs"]))
    replayed: list[GraphKey] = []
    monkeypatch.setattr(cast(Any, forward)._graphs, "replay", replayed.append)
    forward.run(largest_steps(replace(limits, max_num_batched_tokens=20))[0], wants_logits=True)
    assert replayed == [GraphKey(32, piece) for piece in range(TINY.num_layers + 1)]


@pytest.mark.parametrize(
    ("pieces", "draft_length", "widths"),
    [(False, "fixed", ()), (True, "fixed", (4,)), (True, "adaptive", (2, 3, 4))],
)
def test_steps_that_verify_drafts_count_as_graphs(
    monkeypatch: pytest.MonkeyPatch, pieces: bool, draft_length: DraftLength, widths: tuple[int, ...]
) -> None:
    Memory(monkeypatch)
    monkeypatch.setattr("onbeat.engine.backends.torch.CudaGraphs", lambda _: EagerGraphs())
    speculation = SpeculationConfig(num_speculative_tokens=3, draft_length=draft_length)
    limits = SchedulerConfig(
        policy="sarathi",
        num_blocks=64,
        max_model_len=200,
        max_num_seqs=8,
        max_num_batched_tokens=15,
        speculation=speculation,
    )
    model = ModelFiles(kind="hf", path=Path("/nowhere"), name="tiny")
    config = EngineConfig(model=model, cuda_graph_pieces=pieces)
    device = DeviceConfig(CPU, FLOAT32, num_threads=1)
    backend = CudaBackend(DummyCheckpoint(TINY), device, config, ReferenceKernels)
    # Of 1, 2, 4 and 8 rows, as far as 15 tokens go
    num_rows = {2: 3, 3: 3, 4: 2}
    assert backend._measured(limits).num_graphs == 4 + sum(num_rows[width] for width in widths)
    forward, _ = backend.build(limits, lambda _: None, Room(lambda _: limits, None))
    assert isinstance(forward, CudaForward)
    assert forward.options.verify_widths == widths
    assert ("4 tokens" in forward.settings["graphs"]) == bool(widths)
    draft, _ = backend.build(limits, lambda _: None)
    assert isinstance(draft, CudaForward)
    assert not draft.options.verify_widths


@pytest.mark.parametrize("is_same", [True, False])
def test_the_steps_of_a_draft_model_are_measured_too(monkeypatch: pytest.MonkeyPatch, is_same: bool) -> None:
    Memory(monkeypatch)
    config = EngineConfig(model=ModelFiles(kind="hf", path=Path("/nowhere"), name="tiny"), enforce_eager=True)
    device, checkpoint = DeviceConfig(CPU, FLOAT32, num_threads=1), DummyCheckpoint(TINY)
    backend, other = (CudaBackend(checkpoint, device, config, ReferenceKernels) for _ in range(2))
    draft = other if is_same else TorchBackend("tiny", checkpoint, device, "as asked for")
    limits = SchedulerConfig(
        policy="sarathi", num_blocks=64, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=300
    )
    asked: list[int] = []

    def settle(num_blocks: int) -> SchedulerConfig:
        asked.append(num_blocks)
        return limits

    for each in (None, draft):
        backend.fit_measured(limits, Room(settle, each), lambda _: None)
    taken = (asked[0] - 2 * asked[1]) * backend.needs(16).block_bytes  # a block of each model
    # The weights of the one count as used by then; of the other nothing is measured.
    assert taken == pytest.approx(
        2 * GIB + (64 << 20) if is_same else draft.needs(16).weight_bytes, abs=1 << 20
    )
