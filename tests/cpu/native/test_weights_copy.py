"""Plain copies of quantized weights: what reads them, when they are worth it, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onbeat.core.errors import EngineError, ModelLoadError
from onbeat.core.options import change, make
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.loaded_model import LoadedModel, profile_key_of
from onbeat.engine.native import set_timer, weights_copy
from onbeat.engine.native.forward import NativeForward, NativeModel, NativeOptions
from onbeat.engine.native.instruction_sets import SetTimes, StepKind
from onbeat.engine.native.layouts import PLAIN_LAYOUTS
from onbeat.engine.native.library import NativeLibrary, Source, Store
from onbeat.engine.native.matrix import MatrixLayout, PackedMatrix
from onbeat.engine.native.weights_copy import (
    copy_bytes,
    copy_kinds,
    fewest_rows,
    make_copy,
    time_copy,
    why_no_copy,
)
from onbeat.engine.start import prepare
from onbeat.engine.step_time_spec import precision_of
from onbeat.engine.torch.types import numpy_dtype
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.forwards import on_native, pack
from tests.cpu.native.test_batch_invariant import TYPES, open_quantized, write_quantized
from tests.cpu.native.test_forward import checkpoint_of, first_logits, relative_error

BF16, F32 = (PLAIN_LAYOUTS[dtype] for dtype in (BFLOAT16, FLOAT32))


# ---- What it holds ----


@pytest.mark.parametrize("layout", [MatrixLayout(Store.Q8, 32), MatrixLayout(Store.Q8, 16)])
def test_its_memory_counts_until_it_is_dropped(native_library: NativeLibrary, layout: MatrixLayout) -> None:
    matrix = PackedMatrix(native_library, layout, num_outputs=70, num_inputs=96)
    rows = np.random.default_rng(0).standard_normal((70, 96)).astype(np.float32)
    assert matrix.pack(rows, Source.F32, np.arange(70))
    packed = matrix.num_bytes
    matrix.drop_copy()  # of nothing
    for plain, number in ((BF16, 2), (F32, 4)):
        matrix.copy(plain, num_threads=2)
        assert matrix.num_bytes == packed + 96 * 96 * number  # whole panels of 32 outputs
        matrix.drop_copy()
        assert matrix.num_bytes == packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_products_of_a_copy_are_those_of_dequantized_weights(
    native_library: NativeLibrary, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """To the last bit, so that tokens are as right as without quantized activations."""
    checkpoint = open_quantized(tmp_path, kind)
    for instruction_set in native_library.instruction_sets:
        dequantized, copied = (
            first_logits(
                on_native(
                    native_library,
                    checkpoint,
                    dtype=dtype,
                    quantization="auto",
                    instruction_set=instruction_set,
                    **ways,
                )
            )
            for ways in ({"activation_quantization": "none"}, {"copy_rows": 1})
        )
        assert torch.equal(dequantized, copied), instruction_set


def test_fewer_rows_read_what_is_packed(native_library: NativeLibrary) -> None:
    lengths, checkpoint = (1, 9, 20), checkpoint_of("llama3")
    without, few, many = (
        first_logits(on_native(native_library, checkpoint, quantization="int8", copy_rows=rows), lengths)
        for rows in (0, 1000, 1)
    )
    assert torch.equal(few, without)
    assert 0 < relative_error(many, without) < 0.05


def test_a_copy_of_another_type_than_activations_is_refused(native_library: NativeLibrary) -> None:
    checkpoint = checkpoint_of("llama3")
    weights = pack(native_library, checkpoint, quantization="int8")
    make_copy(weights, options_of(torch.bfloat16))
    with pytest.raises(Exception, match="qkv"):
        NativeForward(native_library, checkpoint.config, weights, options_of(torch.float32, copy_rows=1))
    NativeForward(native_library, checkpoint.config, weights, options_of(torch.float32)).close()


def options_of(dtype: torch.dtype, **fields: Any) -> NativeOptions:
    return NativeOptions(dtype=numpy_dtype(dtype), num_blocks=4, block_size=16, num_threads=2, **fields)


# ---- Whether there is one ----

KINDS = [StepKind(rows, 1, 2) for rows in (8, 16, 32)] + [StepKind(1, 256, 1)]


@pytest.mark.parametrize(
    ("gains", "rows"),
    [
        ((0.5, 0.5, 0.5, 0.5), 8),
        ((1.5, 0.85, 0.6, 0.5), 16),
        ((1.5, 1.2, 0.95, 0.5), 256),  # less than a tenth is chance
        ((0.5, 1.2, 0.5, 0.95), 0),
        ((1.0, 1.0, 1.0, 1.0), 0),
    ],
)
def test_rows_from_which_it_is_quicker(gains: tuple[float, ...], rows: int) -> None:
    times = {
        "without": [1.0, 2.0, 3.0, 4.0],
        "with": [g * t for g, t in zip(gains, (1, 2, 3, 4), strict=True)],
    }
    assert fewest_rows(KINDS, times) == rows


def test_real_steps_are_timed_and_leave_no_copy(
    native_library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_quantized(tmp_path, "Q4_0")
    weights = pack(native_library, checkpoint, quantization="auto", dtype=torch.bfloat16)
    before, options = weights.num_bytes, options_of(torch.bfloat16)
    kinds = copy_kinds(weights)
    times = time_copy(NativeModel(native_library, checkpoint.config, weights, options), kinds)
    assert [len(own) for own in times.values()] == [len(kinds)] * 2
    assert all(min(own) > 0 for own in times.values())
    assert weights.num_bytes == before


def test_memory_decides_first(native_library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = pack(native_library, checkpoint_of("llama3"), quantization="int8")
    options = options_of(torch.bfloat16)
    assert "too small to time it" in (why_no_copy(weights, options, 2**40) or "")
    monkeypatch.setattr(set_timer, "_LEAST_BYTES", 0)
    needed = 2 * copy_bytes(weights, options)
    assert why_no_copy(weights, options, needed) is None
    assert "half of what" in (why_no_copy(weights, options, needed - 2) or "")
    assert "may take 0 MiB" in (why_no_copy(weights, options, -5) or "")


# ---- The start ----


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = write_quantized(tmp_path_factory.mktemp("model") / "tiny.gguf", "Q4_0")
    return make(
        EngineConfig,
        model=ModelFiles(kind="gguf", path=path, name="tiny"),
        dtype="bfloat16",
        policy="sarathi",
        step_time_profile="none",
        max_model_len=256,
        kv_cache_memory_bytes=2**20,
        threads=1,
    )


@pytest.fixture
def start(
    native_library: NativeLibrary,
    config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[LoadedModel, list[str]]]:
    """Return what starts an engine whose times are made up, and what it says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(set_timer, "_LEAST_BYTES", 0)
    monkeypatch.setattr(
        "onbeat.engine.backends.native.choose_instruction_set",
        lambda *_, **__: (native_library.instruction_sets[0], "as made up"),
    )

    def run(gain: float, **changes: Any) -> tuple[LoadedModel, list[str]]:
        def measure(*arguments: Any) -> SetTimes:
            if gain < 0:
                raise EngineError("no threads")
            count = len(arguments[-1])
            return {"without": [1.0] * count, "with": [2.0] + [gain] * (count - 1)}

        monkeypatch.setattr(weights_copy, "time_copy", measure)
        said: list[str] = []
        return prepare(change(config, **changes)).load(said.append), said

    return run


def forward_of(loaded: LoadedModel) -> NativeForward:
    forward = loaded.runner.forward
    assert isinstance(forward, NativeForward)
    return forward


Start = Callable[..., tuple[LoadedModel, list[str]]]


def test_it_is_kept_where_it_is_quicker_and_said(start: Start) -> None:
    loaded, said = start(0.5)
    forward = forward_of(loaded)
    assert forward.options.copy_rows == 16
    assert forward.settings["weights_copy"] == "from 16 rows"
    plain, _ = start(0.5, weights_copy="off")
    packed = forward_of(plain).weights.num_bytes
    assert forward.weights.num_bytes >= packed + copy_bytes(forward.weights, forward.options)
    sentence = next(line for line in said if "copy" in line)
    assert sentence.startswith("steps of 16 tokens")
    assert "0.50 times as long" in sentence
    _, again = start(-1)  # the times are kept
    assert "as timed before" in next(line for line in again if "copy" in line)


def test_a_profile_of_steps_with_a_copy_is_another_one(start: Start) -> None:
    keys = []
    for setting in ("auto", "off"):
        loaded, _ = start(0.5, weights_copy=setting)
        precision = precision_of(BFLOAT16)
        assert precision is not None
        keys.append(profile_key_of(loaded, precision))
    assert (keys[0].instruction_set or "").endswith(" from 16 rows")
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("gain", "changes", "sentence"),
    [
        (0.95, {}, "no copy of the weights: a prompt takes 0.95 times as long with it, as timed now"),
        (-1, {}, "no copy of the weights: it could not be timed (no threads)"),
        (
            0.5,
            {"batch_invariant": True},
            "no copy of the weights: batch-invariant products multiply all rows",
        ),
        (0.5, {"weights_copy": "off"}, None),
        (0.5, {"quantization": "none"}, None),
    ],
)
def test_there_is_none_and_why(
    start: Start, gain: float, changes: dict[str, Any], sentence: str | None
) -> None:
    loaded, said = start(gain, **changes)
    assert forward_of(loaded).options.copy_rows == 0
    assert "weights_copy" not in forward_of(loaded).settings
    lines = [line for line in said if "copy" in line]
    assert len(lines) == (sentence is not None)
    assert sentence is None or sentence in lines[0]


def test_too_little_memory_is_said(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_copy, "MEMORY_SHARE", 0.0)
    loaded, said = start(0.5)
    assert forward_of(loaded).options.copy_rows == 0
    assert any("keeps no copy" in line and "would take" in line for line in said)


def test_another_set_may_be_quicker_without(
    start: Start, native_library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "onbeat.engine.backends.native.choose_instruction_set", lambda *_, **__: ("portable", "as made up")
    )
    loaded, said = start(0.5)
    assert forward_of(loaded).settings["instruction_set"] == "portable"
    assert forward_of(loaded).options.copy_rows == 0
    assert any("quicker without" in line for line in said)


def test_memory_that_runs_out_on_the_way_is_said(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[PackedMatrix] = []

    def copy(matrix: PackedMatrix, layout: MatrixLayout, *, num_threads: int) -> None:
        calls.append(matrix)
        if len(calls) == 3:
            raise ModelLoadError("there is not enough memory to copy a matrix of 1 x 2")

    monkeypatch.setattr(PackedMatrix, "copy", copy)
    loaded, said = start(0.5)
    assert forward_of(loaded).options.copy_rows == 0
    assert "not enough memory" in " ".join(said)
