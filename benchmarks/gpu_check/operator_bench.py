"""Both sets of the GPU engine's operators for one shape, inputs for them, and how checks are run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.gpu_check.models import CONFIGS
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, expect, note, seconds_left
from onbeat.engine.backends.torch import fast_kernels
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.model_config.rope import inverse_frequencies
from onbeat.engine.torch.kernels import GraphKernels, KernelSizes, LayerSpec, Norm
from onbeat.engine.torch.kv import LayerKVCache
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.gpu.engines import relative_error

Shape = tuple[int, int, int, int | None]
SHAPES: tuple[Shape, ...] = (
    (32, 8, 128, None),
    (9, 3, 64, None),
    (4, 2, 64, None),
    (4, 2, 64, 100),
    (4, 2, 256, 100),
)
"""Query heads, KV heads, head width, window."""
LARGEST_ERROR = 1e-2
BLOCK_SIZE = 64
MAX_TOKENS = 64 if IS_REHEARSAL else 8192
MAX_LEN = 100 if IS_REHEARSAL else 8192
BF16 = torch.bfloat16


def config_of(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> ModelConfig:
    """Return a model with such heads."""
    own = {
        **CONFIGS["8b"],
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": num_heads * head_dim,
    }
    if window is not None:
        own |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        own.pop("rope_scaling")
    return model_config_from_hf(own)


class Bench:
    """Both sets of operators for one shape, and inputs."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> None:
        self.config = config_of(num_heads, num_kv_heads, head_dim, window)
        self.name = f"{head_dim}/{num_heads // num_kv_heads}{'' if window is None else ' window'}"
        self.device = torch.device(DEVICE)
        self.quick = self._kernels(BF16)
        self.plain = ReferenceKernels(self.sizes(torch.float32))
        self.generator = torch.Generator(DEVICE).manual_seed(1)
        self.layer = self.layer_spec()

    def layer_spec(self, *, norms: bool = False) -> LayerSpec:
        config = self.config
        query_norm, key_norm = (self.norm(config.head_dim) if norms else None for _ in range(2))
        return LayerSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.layer_window(0),
            frequencies_H=torch.from_numpy(inverse_frequencies(config.layer_rope(0), config.head_dim)).to(
                self.device
            ),
            factors_H=torch.ones(config.head_dim // 2, device=self.device),
            sinks_N=None,
            query_norm=query_norm,
            key_norm=key_norm,
        )

    def norm(self, width: int, *, scales_rounded: bool = True) -> Norm:
        scale = 1 + 0.1 * self.random(width, dtype=torch.float32)
        return Norm(scale.to(BF16) if scales_rounded else scale, 1e-5, scales_rounded)

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def poisoned(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=BF16, device=self.device)

    def cache(self, num_blocks: int) -> LayerKVCache:
        config = self.config
        shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        return LayerKVCache(self.random(*shape), self.random(*shape))

    def sizes(self, dtype: torch.dtype) -> KernelSizes:
        return KernelSizes(
            config=self.config,
            dtype=dtype,
            kv_dtype=dtype,
            device=self.device,
            block_size=BLOCK_SIZE,
            max_rows=256,
            max_tokens=MAX_TOKENS,
            max_row_blocks=-(-MAX_LEN // BLOCK_SIZE),
        )

    def _kernels(self, dtype: torch.dtype) -> GraphKernels:
        return ReferenceKernels(self.sizes(dtype)) if IS_REHEARSAL else fast_kernels(self.sizes(dtype))


def wide(norm: Norm) -> Norm:
    """Return a norm for float32, with the same scale."""
    return Norm(norm.scale_D.float(), norm.eps, norm.scales_rounded)


def compare(name: str, actual: Tensor, expected: Tensor) -> None:
    """Note the error."""
    note(name, relative_error(actual, expected), at_most=LARGEST_ERROR)


@torch.inference_mode()
def check_all(checks: Sequence[Callable[[Bench], None]], shapes: Sequence[Shape]) -> int:
    """Run checks for shapes; returns the exit code."""
    problems = 0
    for shape in shapes:
        try:
            bench = Bench(*shape)
        except Exception as error:
            traceback.print_exc()
            expect(f"operators for {shape}", passed=False, text=f"{type(error).__name__}: {error}")
            problems += 1
            continue
        note(f"operators for {bench.name}", bench.quick.name)
        for check in checks:
            if seconds_left() < 4:
                note("not checked, for want of time", f"{check.__name__} {bench.name}")
            elif not _passes(check, bench):
                problems += 1
        if not IS_REHEARSAL:
            torch.cuda.empty_cache()
    return 1 if problems else 0


def _passes(check: Callable[[Bench], None], bench: Bench) -> bool:
    """Run a check; a device that has failed ends the process, for nothing can run on it any more."""
    try:
        check(bench)
        if not IS_REHEARSAL:
            torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        first = str(error).partition("\n")[0]
        expect(f"{check.__name__} {bench.name}", passed=False, text=f"{type(error).__name__}: {first}")
        if not IS_REHEARSAL:
            torch.cuda.synchronize()
        return False
    return True
