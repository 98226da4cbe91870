"""The native engine against torch over a grid of shapes: heads, widths, blocks, contexts, batches, types."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch

from onbeat.engine.model_config.architecture import ModelConfig, RopeConfig
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.dummy import DummyCheckpoint
from tests.cpu.engine.engines import in_parts
from tests.cpu.engine.forwards import MakeForward, on_native, on_torch
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import random_prompt
from tests.many_cases import each_case

CPU = torch.device("cpu")
HEADS = ((4, 4), (4, 2), (6, 2), (9, 3), (8, 1), (5, 1))
HEAD_DIMS = (16, 24, 32, 64, 80, 128)
BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "one": ((300, 1),),
    "few": ((1, 1), (17, 1), (130, 1)),
    "eight": tuple((20 + 9 * i, 1) for i in range(8)),
    "many": tuple((1 + 5 * i, 1) for i in range(40)),
    "chunk": ((0, 100),),
    "later chunk": ((130, 70),),
    "chunks": ((0, 33), (40, 16), (16, 2), (3, 65)),
    "mixed": ((64, 1), (0, 90), (15, 1), (16, 1), (31, 40), (200, 1)),
}
"""Rows as (tokens in the cache, new tokens)."""
WINDOWS = (None, 20)


@dataclass(frozen=True)
class Shape:
    heads: tuple[int, int]
    head_dim: int
    block_size: int
    window: int | None
    hidden_size: int
    intermediate_size: int

    def config(self) -> ModelConfig:
        num_heads, num_kv_heads = self.heads
        return ModelConfig(
            family="llama",
            architecture="MistralForCausalLM",
            vocab_size=131,
            hidden_size=self.hidden_size,
            num_layers=2,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=1024,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=10000.0),
            sliding_window=self.window,
            sliding_layers=(self.window is not None, False),
        )


def shapes() -> list[Shape]:
    """Every head layout with every width; the other sizes take turns."""
    turns = itertools.cycle(itertools.product((16, 32, 64), WINDOWS, ((48, 80), (64, 90), (200, 33))))
    return [
        Shape(heads, head_dim, block_size, window, *sizes)
        for (heads, head_dim), (block_size, window, sizes) in zip(
            itertools.product(HEADS, HEAD_DIMS), turns, strict=False
        )
    ]


def logits_of(make_forward: MakeForward, rows: tuple[tuple[int, int], ...], block_size: int) -> torch.Tensor:
    """Fill the cache, then run one step of all rows: [rows, vocabulary]."""
    driver = StepDriver(make_forward, block_size=block_size, num_blocks=400, max_num_seqs=64)
    keys = [driver.add(random_prompt(cached + new, 131), 1) for cached, new in rows]
    filling = {key: cached for key, (cached, _) in zip(keys, rows, strict=True) if cached}
    if filling:
        driver.step(filling)
    driver.step({key: new for key, (_, new) in zip(keys, rows, strict=True)})
    return torch.stack([driver.requests[key].logits[0] for key in keys])


@functools.lru_cache(maxsize=4)
def torch_forward(shape: Shape, dtype: torch.dtype) -> MakeForward:
    return on_torch(load_weights(DummyCheckpoint(shape.config()), dtype=dtype, device=CPU))


@functools.cache
def exact_logits(shape: Shape, batch: str) -> torch.Tensor:
    return logits_of(torch_forward(shape, torch.float32), BATCHES[batch], shape.block_size)


def errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return each row's relative error."""
    found: torch.Tensor = (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    return found


@in_parts(2)
@each_case(("number", "shape"), enumerate(shapes()))
def test_float32_equals_torch(
    native_library: NativeLibrary, number: int, shape: Shape, part: tuple[int, int]
) -> None:
    if (number // len(HEAD_DIMS) + number) % 2 != part[0]:  # each half has every width
        return
    native = on_native(native_library, DummyCheckpoint(shape.config()))
    for name, rows in BATCHES.items():
        actual = logits_of(native, rows, shape.block_size)
        assert float(errors(actual, exact_logits(shape, name)).max()) < 2e-5, name


@pytest.mark.parametrize("shape", shapes()[::3], ids=str)
def test_bfloat16_is_as_near_to_float32_as_torchs(native_library: NativeLibrary, shape: Shape) -> None:
    native = on_native(native_library, DummyCheckpoint(shape.config()), dtype=torch.bfloat16)
    ours, theirs = [], []
    for name, rows in BATCHES.items():
        exact = exact_logits(shape, name)
        theirs.append(errors(logits_of(torch_forward(shape, torch.bfloat16), rows, shape.block_size), exact))
        ours.append(errors(logits_of(native, rows, shape.block_size), exact))
    # A single row's rounding is luck, that of all together is not.
    our_errors, their_errors = torch.cat(ours), torch.cat(theirs)
    assert float(our_errors.mean()) < 1.15 * float(their_errors.mean())
    assert float(our_errors.max()) < 2 * float(their_errors.max())
