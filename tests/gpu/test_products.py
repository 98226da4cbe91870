"""Products of few rows on a GPU: each tiling is close to an exact product and always the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from onbeat.engine.cuda.weights import load_weights
from onbeat.engine.weights.dummy import DummyCheckpoint
from tests.cpu.engine.tiny_models import random_prompt
from tests.gpu.engines import on_gpu_engine, relative_error, run_fixed
from tests.gpu.test_cuda_engine import PROMPT_LENGTHS, needs_flashinfer, quick_config

pytest.importorskip("triton", reason="triton is not installed")

from onbeat.engine.cuda import triton_products
from onbeat.engine.cuda.chosen_products import ChosenProducts, Timed, choose_products
from onbeat.engine.cuda.triton_products import TILINGS, SplitMemory, Tiling

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("num_rows", [1, 16, 24, 64, 128])
def test_a_tiling_computes_the_product_each_time_in_a_graph(tiling: Tiling, num_rows: int) -> None:
    if not tiling.fits(4096, 4096, num_rows):
        pytest.skip("not for so many rows")
    torch.manual_seed(0)
    options: Any = {"dtype": torch.bfloat16, "device": CUDA}
    x_TD, matrix_FD = torch.randn(num_rows, 4096, **options), torch.randn(4096, 4096, **options)
    bias_F = torch.randn(4096, **options)
    memory = SplitMemory.allocate(triton_products.num_parts(tiling, num_rows, 4096), CUDA)
    memory.parts.fill_(torch.nan)
    first_TF = triton_products.multiply(x_TD, matrix_FD, bias_F, tiling, memory)
    expected_TF = functional.linear(x_TD.double(), matrix_FD.double(), bias_F.double())
    assert relative_error(first_TF, expected_TF) <= 5e-3
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [triton_products.multiply(x_TD, matrix_FD, bias_F, tiling, memory) for _ in range(20)]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(each, first_TF) for each in again)
    assert not memory.arrived.any()


def test_products_are_chosen_for_a_model(tmp_path: Path) -> None:
    weights = load_weights(DummyCheckpoint(quick_config("llama-128")), torch.bfloat16, CUDA)
    said: list[str] = []
    chosen = choose_products(weights, 16, directory=tmp_path, on_progress=said.append)
    assert chosen.timed, said
    again = choose_products(weights, 16, directory=tmp_path, on_progress=said.append)
    assert again.timed == chosen.timed
    layer = weights.layers[0]
    for matrix_FD in (layer.qkv_XD, layer.o_DX, layer.gate_up_FD, layer.down_DF):
        for num_rows in (1, 5, 16, 40):
            x_TD = torch.randn(num_rows, matrix_FD.shape[1], dtype=torch.bfloat16, device=CUDA)
            assert relative_error(chosen(x_TD, matrix_FD), functional.linear(x_TD, matrix_FD)) <= 1e-2


@needs_flashinfer
def test_an_engine_with_tilings_comes_close_to_plain_operators() -> None:
    weights = load_weights(DummyCheckpoint(quick_config("llama-128")), torch.bfloat16, CUDA)
    split = Tiling(64, 128, 2, 4, 5)
    layer = weights.layers[0]
    matrices = (layer.qkv_XD, layer.o_DX, layer.gate_up_FD, layer.down_DF)
    assert all(split.fits(len(matrix), matrix.shape[1], 32) for matrix in matrices)
    chosen = ChosenProducts(
        [Timed(len(matrix), matrix.shape[1], 32, split, 1.0, 2.0) for matrix in matrices], CUDA
    )
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    quick, _ = run_fixed(
        on_gpu_engine(weights, fast=True, multiply=chosen), prompts, num_tokens=10, chunk=1000
    )
    plain, _ = run_fixed(on_gpu_engine(weights), prompts, num_tokens=10, chunk=1000)
    for actual, expected in zip(quick, plain, strict=True):
        assert relative_error(actual, expected) <= 3e-2
