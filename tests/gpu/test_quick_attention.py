"""Attention by FlashInfer inside of graphs and with steps in flight, against plain torch in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from onbeat.engine.backends.torch import fast_kernels
from onbeat.engine.cuda.flashinfer_attention import (
    FlashInfer,
    PlanBuffers,
    PlannedDecodes,
    allocate_workspace,
    unbuilt_kernel,
)
from onbeat.engine.cuda.graphs import GraphKey
from onbeat.engine.cuda.stream import stream_of
from onbeat.engine.cuda.toolkit import missing_tool
from onbeat.engine.torch.kernels import ChunkBackend, ChunkRows, DecodeRows, KernelSizes, LayerSpec
from onbeat.engine.torch.kv import LayerKVCache
from tests.cpu.engine.cuda.kernel_sizes import kernel_sizes
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.gpu.engines import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
]

CUDA = torch.device("cuda")
BLOCK_SIZE, NUM_BLOCKS = 16, 400
LARGEST_ERROR = 1e-2


def sizes(dtype: torch.dtype) -> KernelSizes:
    of_cpu = kernel_sizes(num_heads=8, num_kv_heads=2, head_dim=128, dtype=dtype)
    return replace(of_cpu, device=CUDA)


def layer() -> LayerSpec:
    return LayerSpec(
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        scale=0.07,
        window=None,
        frequencies_H=torch.ones(64, device=CUDA),
        factors_H=torch.ones(64, device=CUDA),
        sinks_N=None,
        query_norm=None,
        key_norm=None,
    )


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA).bfloat16()


def cache(dtype: torch.dtype = torch.bfloat16) -> LayerKVCache:
    return LayerKVCache(*(random(NUM_BLOCKS, 2, BLOCK_SIZE, 128).to(dtype) for _ in range(2)))


def decode_rows(lens: list[int], width: int, seed: int) -> DecodeRows:
    """Return rows of these lengths, or as long as what is new in them, whose blocks lie anywhere."""
    lens = [max(length, width) for length in lens]
    columns = sizes(torch.float32).max_row_blocks
    table = np.random.default_rng(seed).integers(0, NUM_BLOCKS, (len(lens), columns), dtype=np.int32)
    lens_R = torch.tensor(lens, dtype=torch.int32, device=CUDA)
    return DecodeRows(torch.from_numpy(table).to(CUDA), lens_R, width)


def expected_decodes(q_RNH: Tensor, kv: LayerKVCache, rows: DecodeRows) -> Tensor:
    out_RNH = torch.empty(q_RNH.shape, device=CUDA)
    wide = LayerKVCache(*(part.float() for part in kv))
    ReferenceKernels(sizes(torch.float32)).attend_decodes(q_RNH.float(), wide, rows, layer(), out_RNH)
    return out_RNH


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


STEPS = ([1, 1, 1, 1], [700, 1, 33, 16], [5, 900, 17, 1024])


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_graph_of_planned_decodes_follows_its_plans(kv_dtype: torch.dtype) -> None:
    """One size's plan lies where another's was: only one runs at a time. Rows may verify drafts."""
    of_device, kv = replace(sizes(torch.bfloat16), kv_dtype=kv_dtype), cache(kv_dtype)
    buffers = PlanBuffers(stream_of(CUDA), CUDA)
    problem = missing_tool()  # before FlashInfer is imported
    if unbuilt_kernel(of_device.config, kv_dtype=kv_dtype) is not None and problem is not None:
        pytest.skip(f"the kernel of {kv_dtype} cannot be had here: {problem}")
    workspace, library = allocate_workspace(of_device), FlashInfer.load()
    made = []
    for num_rows, width in ((4, 1), (2, 1), (4, 5), (3, 2)):
        key = GraphKey(num_rows, width=width)
        planned = PlannedDecodes(library, of_device, layer(), key, workspace=workspace, buffers=buffers)
        q_RNH, out_RNH = (random(num_rows * width, 8, 128) for _ in range(2))
        rows = decode_rows([1] * num_rows, width, 0)

        def work(planned=planned, q_RNH=q_RNH, rows=rows, out_RNH=out_RNH) -> None:
            planned.list_rows(rows)
            planned.attend(q_RNH, kv, out_RNH)

        made.append((planned, rows, q_RNH, out_RNH, captured(work)))
    for seed, lens in enumerate(STEPS):
        for planned, rows, q_RNH, out_RNH, graph in made:
            new = decode_rows(lens[: len(rows.lens_R)], rows.width, seed)
            rows.table_RW.copy_(new.table_RW)
            rows.lens_R.copy_(new.lens_R)
            out_RNH.fill_(torch.nan)
            planned.plan(new.lens_R.cpu().numpy())
            graph.replay()
            assert relative_error(out_RNH, expected_decodes(q_RNH, kv, rows)) <= LARGEST_ERROR


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_plans_of_chunks_that_are_made_while_others_run_leave_these_alone(backend: ChunkBackend) -> None:
    """Every second step's rows are long; with fa3 it takes these, and fa2 the others."""
    of_device = sizes(torch.bfloat16)
    problem = missing_tool()  # before FlashInfer is imported
    if unbuilt_kernel(of_device.config, backend) is not None and problem is not None:
        pytest.skip(f"the kernel of {backend} cannot be had here: {problem}")
    kernels, plain, kv = (
        fast_kernels(of_device, chunk_backend=backend),
        ReferenceKernels(sizes(torch.float32)),
        cache(),
    )
    wide = LayerKVCache(*(part.float() for part in kv))
    steps = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        query_lens = rng.integers(1, 90, 5).astype(np.int32) + 128 * (seed % 2)
        context_lens = query_lens + rng.integers(0, 600, 5).astype(np.int32)
        num_blocks = -(-context_lens // BLOCK_SIZE)
        blocks = rng.integers(0, NUM_BLOCKS, num_blocks.sum(), dtype=np.int32)
        q_TNH = random(int(query_lens.sum()), 8, 128)
        steps.append(
            (
                ChunkRows(query_lens, context_lens, num_blocks, blocks),
                q_TNH,
                torch.full_like(q_TNH, torch.nan),
            )
        )
    for rows, q_TNH, out_TNH in steps:  # nothing waits in between
        kernels.attend_chunks(q_TNH, kv, kernels.plan_chunks(rows, layer()), layer(), out_TNH)
    for rows, q_TNH, out_TNH in steps:
        expected_TNH = torch.empty(q_TNH.shape, device=CUDA)
        plain.attend_chunks(q_TNH.float(), wide, plain.plan_chunks(rows, layer()), layer(), expected_TNH)
        assert relative_error(out_TNH, expected_TNH) <= LARGEST_ERROR
