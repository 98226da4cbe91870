"""Products of few rows in Triton, interpreted on the CPU in float32, and how they are chosen."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from onbeat.engine.cuda import chosen_products, triton_products
from onbeat.engine.cuda.chosen_products import ChosenProducts, Timed, choose_products
from onbeat.engine.cuda.triton_products import H100, MOST_ROWS, TILINGS, Card, SplitMemory, Tiling
from tests.cpu.engine.cuda.interpreted_loops import mend_loops

CPU = torch.device("cpu")
SPLIT = Tiling(16, 32, 4, 4, 4)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_loops(monkeypatch)
    torch.manual_seed(0)


@pytest.mark.parametrize("num_rows", [1, 7, 16, 33, MOST_ROWS])
@pytest.mark.parametrize("tiling", [Tiling(64, 32, 4, 4, 4), Tiling(64, 64, 1, 4, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_what_linear_computes(num_rows: int, tiling: Tiling, has_bias: bool) -> None:
    x_TD, matrix_FD = torch.randn(num_rows, 384), torch.randn(128, 384)
    bias_F = torch.randn(128) if has_bias else None
    memory = SplitMemory.allocate(triton_products.num_parts(tiling, num_rows, 128), CPU)
    memory.parts.fill_(torch.nan)
    for _ in range(2):  # the second finds what the first left behind
        out_TF = triton_products.multiply(x_TD, matrix_FD, bias_F, tiling, memory)
        expected_TF = torch.nn.functional.linear(x_TD, matrix_FD, bias_F)
        torch.testing.assert_close(out_TF, expected_TF, rtol=1e-4, atol=1e-4)
        assert not memory.arrived.any()


@pytest.mark.parametrize("tiling", TILINGS)
def test_each_tiling_fits_matrices_of_models_and_computes_them(tiling: Tiling) -> None:
    assert all(tiling.fits(*shape, 3) for shape in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)))
    num_inputs = 2 * tiling.splits * tiling.depth
    x_TD, matrix_FD = torch.randn(3, num_inputs), torch.randn(tiling.outputs, num_inputs)
    memory = SplitMemory.allocate(triton_products.num_parts(tiling, 3, tiling.outputs), CPU)
    out_TF = triton_products.multiply(x_TD, matrix_FD, None, tiling, memory)
    torch.testing.assert_close(out_TF, x_TD @ matrix_FD.T, rtol=1e-3, atol=1e-3)


def test_a_matrix_that_leaves_something_over_does_not_fit() -> None:
    assert not SPLIT.fits(24, 128, 1)
    assert not SPLIT.fits(16, 192, 1)
    assert SPLIT.fits(16, 256, 1)


def test_a_tiling_of_few_outputs_is_not_for_many_rows() -> None:
    assert SPLIT.fits(16, 256, 32)
    assert not SPLIT.fits(16, 256, 33)
    assert Tiling(64, 512, 1, 4, 2).fits(64, 512, 16)
    assert not Tiling(64, 512, 1, 4, 4).fits(64, 512, 64)  # more memory than a processor has


def test_cards_with_less_memory_run_fewer_tilings() -> None:
    cards = {"H100": H100, "A100": Card(163 << 10, 8), "L4": Card(99 << 10, 8)}
    fitting = {
        name: [sum(tiling.fits(4096, 4096, num_rows, card) for tiling in TILINGS) for num_rows in (1, 128)]
        for name, card in cards.items()
    }
    assert fitting == {"H100": [11, 4], "A100": [11, 4], "L4": [9, 1]}


def test_rows_between_those_that_were_timed_go_by_the_next_larger_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = [
        Timed(48, 128, 1, None, 2.0, 2.0),
        Timed(48, 128, 8, SPLIT, 1.0, 2.0),
        Timed(48, 128, 32, None, 2.0, 2.0),
        Timed(64, 128, 32, SPLIT, 1.0, 2.0),
    ]
    chosen = ChosenProducts(timed, CPU)
    launched: list[tuple[int, int]] = []
    multiply = triton_products.multiply

    def watched(x_TD: torch.Tensor, matrix_FD: torch.Tensor, *rest: Any) -> torch.Tensor:
        launched.append((len(matrix_FD), len(x_TD)))
        return multiply(x_TD, matrix_FD, *rest)

    monkeypatch.setattr(chosen_products, "multiply", watched)
    for num_outputs in (48, 64):
        for num_rows in (1, 2, 8, 9, 32, 33):
            x_TD, matrix_FD = torch.randn(num_rows, 128), torch.randn(num_outputs, 128)
            expected_TF = x_TD @ matrix_FD.T
            torch.testing.assert_close(chosen(x_TD, matrix_FD), expected_TF, rtol=1e-4, atol=1e-4)
    assert launched == [(48, 2), (48, 8), (64, 1), (64, 2), (64, 8), (64, 9), (64, 32)]
    assert "48 x 128: 1 rows cuBLAS 2.0 us (2.0), 8 rows Triton 16x32/4 1.0 us (2.0)" in str(chosen)


class _Timer:
    """Stands for a GPU that takes a microsecond for each output of a tiling, and 40 for cuBLAS."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.tiling: Tiling | None = None
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
        monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
        monkeypatch.setattr(Card, "current", lambda: H100)
        monkeypatch.setattr(chosen_products, "compile_all", lambda products, memory: list(products))
        monkeypatch.setattr(chosen_products, "multiply", self.multiply)
        monkeypatch.setattr(chosen_products, "_graph_us", self.time)
        monkeypatch.setattr(
            chosen_products, "TILINGS", (Tiling(16, 32, 1, 4, 4), SPLIT, Tiling(32, 32, 1, 4, 4))
        )

    def multiply(self, x_TD: Any, matrix_FD: Any, bias_F: Any, tiling: Tiling, memory: Any) -> torch.Tensor:
        self.tiling = tiling
        if tiling.outputs == 32:
            raise KeyError("a compiler's own kind of error")
        out_TF: torch.Tensor = x_TD @ matrix_FD.T
        return out_TF if tiling.splits == 1 else 2 * out_TF  # wrong

    def time(self, product: Any, matrices: Any, stream: Any) -> float:
        self.calls += 1
        self.tiling = None
        product(matrices[0])
        assert len(matrices) >= 16
        return 40.0 if self.tiling is None else float(self.tiling.outputs)


def _weights() -> Any:
    layer = SimpleNamespace(
        qkv_XD=torch.randn(96, 128),
        o_DX=torch.randn(64, 128),
        gate_up_FD=torch.randn(96, 128),
        down_DF=torch.randn(40, 128),
    )
    return SimpleNamespace(layers=[layer, layer], device=CPU, dtype=torch.float32)


def test_the_quickest_right_tiling_is_chosen_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timer = _Timer(monkeypatch)
    said: list[str] = []
    chosen = choose_products(_weights(), 24, directory=tmp_path, on_progress=said.append)
    assert {each.num_rows for each in chosen.timed} == {1, 8, 16, 32}  # 24 rows go by 32
    for each in chosen.timed:
        fits = each.num_outputs != 40
        assert each.tiling == (Tiling(16, 32, 1, 4, 4) if fits else None)
        assert each.us == (16.0 if fits else 40.0)
    assert "timed in" in said[0]
    calls = timer.calls
    again = choose_products(_weights(), 24, directory=tmp_path, on_progress=said.append)
    assert again.timed == chosen.timed
    assert timer.calls == calls
    assert "timed before" in said[1]
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps([[1, 2]]))
    assert choose_products(_weights(), 24, directory=tmp_path).timed == chosen.timed
    assert timer.calls > calls


def test_what_there_is_no_time_for_goes_by_cublas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _Timer(monkeypatch)
    chosen = choose_products(_weights(), 24, directory=tmp_path, seconds=0.0)
    assert not chosen.timed
    assert not list(tmp_path.iterdir())
    x_TD = torch.randn(2, 128)
    matrix_FD = torch.randn(16, 128)
    torch.testing.assert_close(chosen(x_TD, matrix_FD), torch.nn.functional.linear(x_TD, matrix_FD))
