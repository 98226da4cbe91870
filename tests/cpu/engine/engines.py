"""The ways to run tiny models that golden tests go through, and how near each must come to the reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import pytest
import torch

from onbeat.engine.native.library import NativeLibrary
from tests.cpu.engine.forwards import MakeForward, on_cuda_engine, on_native, on_torch
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, tiny_model

TIE_GAP = 1e-3
"""Where the reference's two largest logits are nearer than this, float32 may choose the other one."""
FLOAT32_ERROR = 1e-4
"""Most of a row's logits, relative to their norm."""


class TinyEngine(Protocol):
    """Runs tiny models by their names in `tiny_models.FAMILIES`."""

    def make_forward(self, name: str, dtype: torch.dtype | None = None) -> MakeForward:
        """Return what makes forward passes; without a type, in the most exact one that the engine has."""
        ...

    def check(
        self, token_ids: Sequence[int], expected_ids: Sequence[int], expected_logits: torch.Tensor
    ) -> int:
        """Check greedy tokens against float64's and return how many have the same tokens before them."""
        ...

    def check_logits(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        """Check rows of logits against float64's."""
        ...


class TorchEngine:
    """In float64: equal to the last token, and to nine decimals."""

    most_error = 1e-9

    def make_forward(self, name: str, dtype: torch.dtype | None = None) -> MakeForward:
        return on_torch(tiny_model(name, dtype or torch.float64).weights)

    def check(
        self, token_ids: Sequence[int], expected_ids: Sequence[int], expected_logits: torch.Tensor
    ) -> int:
        assert list(token_ids) == list(expected_ids)
        return len(expected_ids)

    def check_logits(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(logits, expected, rtol=0, atol=self.most_error)


class RoundedTorchEngine(TorchEngine):
    """Of models whose norms of heads, which are in float32, add up in another order (`Rotation`)."""

    most_error = 1e-4


class CudaEngine(TorchEngine):
    """The GPU engine with operators of plain torch, on the CPU in float64: as equal as `TorchEngine`."""

    def __init__(self) -> None:
        self._make = functools.cache(self._make_new)

    def make_forward(self, name: str, dtype: torch.dtype | None = None) -> MakeForward:
        return self._make(name, dtype or torch.float64)

    def _make_new(self, name: str, dtype: torch.dtype) -> MakeForward:
        return on_cuda_engine(StateCheckpoint(hf_tiny_model(name, torch.float64)), dtype=dtype)


class NativeEngine:
    """In float32: equal until a tie that float32 cannot see."""

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library
        self._make = functools.cache(self._make_new)

    def make_forward(self, name: str, dtype: torch.dtype | None = None) -> MakeForward:
        return self._make(name, dtype or torch.float32)

    def _make_new(self, name: str, dtype: torch.dtype) -> MakeForward:
        return on_native(self.library, StateCheckpoint(hf_tiny_model(name, torch.float64)), dtype=dtype)

    def check(
        self, token_ids: Sequence[int], expected_ids: Sequence[int], expected_logits: torch.Tensor
    ) -> int:
        assert len(token_ids) == len(expected_ids)
        for index, (token_id, expected_id) in enumerate(zip(token_ids, expected_ids, strict=True)):
            if token_id != expected_id:
                first, second = expected_logits[index].topk(2).values.tolist()
                assert first - second < TIE_GAP, f"token {index} is {token_id}, not {expected_id}"
                return index + 1
        return len(expected_ids)

    def check_logits(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        errors = (logits.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(errors.max()) < FLOAT32_ERROR


NUM_TURNS = 6
in_turns = pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, NUM_TURNS))]
)
"""Cases by which engines take turns: in the first turn each case is of one of them, which is not slow."""


def is_due(engine: TinyEngine, case: int, turn: int) -> bool:
    """Return whether the case of this number is of the engine at this turn.

    At each turn a sixth of the cases are of torch, and another sixth of the code of the GPU engine. The
    native engine, which is quick, has all others at the first turn, and those two sixths at the second.
    """
    share = case % NUM_TURNS
    if isinstance(engine, NativeEngine):
        return turn == (share in (0, NUM_TURNS // 2))
    return (share + isinstance(engine, CudaEngine) * NUM_TURNS // 2) % NUM_TURNS == turn


def torch_or_native(of_torch: type[TorchEngine]) -> Any:
    """Return a fixture: a class of torch, and then the native engine."""

    @pytest.fixture(name="engine", params=["torch", "native"])
    def fixture(request: pytest.FixtureRequest) -> TinyEngine:
        if request.param == "native":
            return NativeEngine(request.getfixturevalue("native_library"))
        return of_torch()

    return fixture


def in_parts(count: int) -> pytest.MarkDecorator:
    """Cut all cases in so many parts, of which the first is not slow."""
    rest = (pytest.param((part, count), marks=pytest.mark.slow) for part in range(1, count))
    return pytest.mark.parametrize("part", [(0, count), *rest])


def is_in_part(engine: TinyEngine, case: int, part: tuple[int, int]) -> bool:
    """Return whether a case is of this part: all of the quick native engine are of the first.

    Of the other engines neighbours are in different parts. So with a number that is a sum over what the case
    consists of, each two of these meet in each part, but for what has fewer values than there are parts.
    """
    if isinstance(engine, NativeEngine):
        return part[0] == 0
    return (case + isinstance(engine, CudaEngine)) % part[1] == part[0]
