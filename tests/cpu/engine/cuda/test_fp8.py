"""Weights in 8 bits, whose products are those of numbers that were rounded one by one; on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from onbeat.core.errors import ConfigError
from onbeat.engine.backends import torch as cuda_backend
from onbeat.engine.backends.table import choose_backend, vllm_backend
from onbeat.engine.backends.torch import CudaBackend
from onbeat.engine.cuda.forward import CudaForward
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.dtypes import BFLOAT16, FLOAT8
from onbeat.engine.memory import KVCacheSpec
from onbeat.engine.profiling.profiler import gpu_limits
from onbeat.engine.torch.kernels import LayerSpec, StepTensors
from onbeat.engine.torch.kv import LayerKVCache, allocate_kv, scrub
from onbeat.engine.torch.layer import multiply_by
from onbeat.engine.torch.types import Fp8Matrix, Matrix, stored
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.perfmodel.precision import Precision
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.cpu.engine.cuda.kernel_sizes import kernel_sizes
from tests.cpu.engine.cuda.test_backend import CUDA, LLAMA_8B, MODEL, config
from tests.cpu.engine.forwards import on_kernels
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, random_prompt
from tests.gpu.engines import relative_error, run_fixed

KERNELS = ReferenceKernels(kernel_sizes())
ON_CPU = DeviceConfig(CPU, BFLOAT16, num_threads=1)
SIZES = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}


def wide(matrix: Fp8Matrix) -> Tensor:
    return matrix.values_FD.float() * matrix.scales_F1


def test_each_row_has_a_scale_that_its_largest_number_needs() -> None:
    torch.manual_seed(1)
    rows_FD = torch.randn(6, 64) * torch.tensor([1e-6, 1e-2, 1.0, 30.0, 1e4, 0.0])[:, None]
    matrix = Fp8Matrix.of(rows_FD)
    assert matrix.values_FD.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(wide(matrix).abs().amax(1), rows_FD.abs().amax(1))
    # Three bits behind the point; below 2**-6 of the 448, the last of them is 2**-9.
    bound_FD = torch.maximum(rows_FD.abs() / 16, matrix.scales_F1 * 2**-10) * 1.001
    assert ((wide(matrix) - rows_FD).abs() <= bound_FD).all()
    rows_FD[2, 5] = torch.nan
    assert wide(Fp8Matrix.of(rows_FD)).isnan().any(1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_products_are_those_of_the_rounded_numbers(dtype: torch.dtype, error: float, has_bias: bool) -> None:
    torch.manual_seed(2)
    x_TD, rows_FD, bias_F = (torch.randn(*shape).to(dtype) for shape in ((5, 96), (48, 96), (48,)))
    matrix = Fp8Matrix.of(rows_FD)
    product_TF = multiply_by(KERNELS, x_TD, matrix, bias_F if has_bias else None)
    expected_TF = wide(Fp8Matrix.of(x_TD)) @ wide(matrix).t() + (bias_F.float() if has_bias else 0.0)
    assert product_TF.dtype == dtype
    assert relative_error(product_TF, expected_TF) < error
    plain_TF = multiply_by(KERNELS, x_TD, rows_FD, bias_F)
    torch.testing.assert_close(plain_TF, functional.linear(x_TD, rows_FD, bias_F))


@pytest.mark.parametrize("piece_sizes", [(), (8, 64)])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3-moe"])
def test_a_model_in_8_bits_computes_with_rounded_numbers(name: str, piece_sizes: tuple[int, ...]) -> None:
    if name == "qwen3-moe" and piece_sizes:
        return  # experts have no graphs

    def emulated(x_TD: Tensor, matrix: Matrix, bias_F: Tensor | None) -> Tensor:
        if isinstance(matrix, Fp8Matrix):
            x_TD, matrix = wide(Fp8Matrix.of(x_TD)), wide(matrix)
        return functional.linear(x_TD, matrix, bias_F)

    checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float32))
    device = torch.device("cpu")
    in_fp8, plain = (load_weights(checkpoint, torch.float32, device, in_fp8=each) for each in (True, False))
    layer = in_fp8.layers[0]
    assert isinstance(layer.qkv_XD, Fp8Matrix)
    assert isinstance(layer.o_DX, Fp8Matrix)
    assert in_fp8.lm_head_VD.dtype == torch.float32
    forwards = [
        on_kernels(each, ReferenceKernels, **SIZES, piece_sizes=piece_sizes) for each in (in_fp8, plain)
    ]

    def make_emulated(*, num_blocks: int, block_size: int) -> CudaForward:
        forward = forwards[0](num_blocks=num_blocks, block_size=block_size)
        options, kernels = forward.options, forward.kernels
        return CudaForward(in_fp8, kernels, forward._graphs, options, multiply=emulated)

    prompts = [random_prompt(length) for length in (20, 3, 41)]
    found = [
        run_fixed(make, prompts, num_tokens=4, chunk=16, max_model_len=128, max_num_seqs=8)[0]
        for make in (*forwards, make_emulated)
    ]
    for by_fp8, by_plain, by_emulation in zip(*found, strict=True):
        assert relative_error(by_fp8, by_emulation) < 1e-3
        assert 1e-3 < relative_error(by_fp8, by_plain) < 0.3


class RoundingKernels(ReferenceKernels):
    """Rounds what is in the cache to 8 bits, and keeps it as it was."""

    def rope_store(
        self, qkv_TX: Tensor, step: StepTensors, layer: LayerSpec, kv: LayerKVCache, q_TNH: Tensor
    ) -> None:
        super().rope_store(qkv_TX, step, layer, kv, q_TNH)
        for part in kv:
            part.copy_(part.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("piece_sizes", [(), (8, 64)])
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_keys_and_values_of_8_bits_are_those_that_were_rounded(
    name: str, piece_sizes: tuple[int, ...]
) -> None:
    """Chunks, decodes and both in one step."""
    checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float32))
    weights = load_weights(checkpoint, torch.float32, torch.device("cpu"))
    sizes = SIZES | {"piece_sizes": piece_sizes}
    prompts = [random_prompt(length) for length in (20, 3, 41)]
    found = [
        run_fixed(
            on_kernels(weights, kernels, **sizes, has_fp8_kv=in_fp8),
            prompts,
            num_tokens=4,
            chunk=16,
            max_model_len=128,
            max_num_seqs=8,
        )[0]
        for kernels, in_fp8 in ((ReferenceKernels, True), (RoundingKernels, False), (ReferenceKernels, False))
    ]
    for in_fp8, rounded, plain in zip(*found, strict=True):
        torch.testing.assert_close(in_fp8, rounded, rtol=1e-4, atol=1e-4)
        assert 1e-3 < relative_error(in_fp8, plain) < 0.3


def test_the_cache_holds_no_more_than_its_numbers_reach_and_is_scrubbed() -> None:
    numbers = torch.tensor([1e6, -1e6, 448.0, 0.1, torch.nan])
    assert stored(numbers, torch.float32) is numbers
    codes = stored(numbers, torch.float8_e4m3fn)
    torch.testing.assert_close(
        codes.float(), torch.tensor([448.0, -448.0, 448.0, 0.1015625, torch.nan]), equal_nan=True
    )
    spec = KVCacheSpec.of_model(MODEL, dtype=FLOAT8, block_size=16)
    kv = allocate_kv(spec, 4, torch.device("cpu"))
    assert sum(part.nbytes for layer in kv for part in layer) == 4 * spec.block_bytes
    for part in kv[0]:
        part.copy_(torch.full(part.shape, 3.0))
        part[1, 0, :4] = torch.tensor(torch.nan)
        part[2, 0, 5] = torch.tensor(torch.nan)
    scrub(kv, torch.tensor([0, 1]))
    for part in kv[0]:
        assert part[1, 0, :4].float().abs().max() == 0.0
        assert (part[[0, 3]].float() == 3.0).all()
        assert (part[1, 1].float() == 3.0).all()
        assert part[2, 0, 5].isnan().all()


def test_memory_and_step_times_know_the_bytes_of_the_kv_cache(hopper: None) -> None:
    checkpoint = DummyCheckpoint(LLAMA_8B)
    plain, in_fp8 = (
        choose_backend(config(kv_cache_dtype=each), checkpoint, CUDA) for each in ("auto", "fp8")
    )
    assert isinstance(in_fp8, CudaBackend)
    assert "fp8 KV" in in_fp8.description
    assert 2 * in_fp8.needs(16).block_bytes == plain.needs(16).block_bytes
    assert in_fp8.needs(16).weight_bytes == plain.needs(16).weight_bytes
    assert in_fp8.precision() == Precision(kv="fp8")


def test_memory_and_step_times_know_the_bytes_of_weights(hopper: None) -> None:
    checkpoint = DummyCheckpoint(LLAMA_8B)
    plain, in_fp8 = (choose_backend(config(quantization=each), checkpoint, CUDA) for each in ("auto", "fp8"))
    assert isinstance(in_fp8, CudaBackend)
    assert "fp8 weights" in in_fp8.description
    num_in_layers = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14_336)
    num_rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14_336 + 4096)
    saved = plain.needs(16).weight_bytes - in_fp8.needs(16).weight_bytes
    assert saved == num_in_layers - 4 * num_rows
    assert in_fp8.precision() == Precision(weights="fp8", kv="bf16", compute="fp8")
    assert plain.precision() == Precision()


def test_a_backend_loads_them() -> None:
    files = config(quantization="fp8", kv_cache_dtype="fp8", enforce_eager=True)
    backend = CudaBackend(DummyCheckpoint(MODEL), ON_CPU, files, ReferenceKernels)
    limits = SchedulerConfig(
        policy="sarathi", num_blocks=8, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32
    )
    forward, _ = backend.build(limits, lambda _: None)
    assert isinstance(forward, CudaForward)
    assert isinstance(forward.weights.layers[0].qkv_XD, Fp8Matrix)
    assert forward._state.kv[0].k_BKSH.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("setting", ["quantization", "kv_cache_dtype"])
def test_they_are_refused_where_nothing_computes_with_them(
    hopper: None, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    checkpoint, asked = DummyCheckpoint(MODEL), config(**{setting: "fp8"})
    for device in (ON_CPU, CUDA):
        with pytest.raises(ConfigError, match=r"fp8.*GPU engine"):
            choose_backend(replace(asked, backend="torch"), checkpoint, device)
    with pytest.raises(ConfigError, match=r"fp8.*GPU engine"):
        choose_backend(asked, checkpoint, ON_CPU)
    monkeypatch.setattr("onbeat.engine.backends.table.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"fp8.*GPU engine"):
        vllm_backend(asked, CUDA, "as asked for")
    monkeypatch.setattr(cuda_backend, "compute_capability", lambda _: (8, 6))
    with pytest.raises(ConfigError, match=r"8\.9.*8\.6"):
        choose_backend(asked, checkpoint, CUDA)
    assert isinstance(choose_backend(config(), checkpoint, CUDA), CudaBackend)


def test_the_rate_of_an_unknown_gpu_is_that_of_such_products() -> None:
    limits = gpu_limits(ON_CPU, "fp8", read_bytes=2**20, matrix_size=64)
    assert limits.peak_flops["fp8"] > 0
