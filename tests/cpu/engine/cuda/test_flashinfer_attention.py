"""What FlashInfer is told, by what it remembers of its calls. It computes on GPUs alone: tests/gpu."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from onbeat.core.errors import ConfigError
from onbeat.engine.cuda import flashinfer_attention
from onbeat.engine.cuda.flashinfer_attention import (
    Chunks,
    FlashInfer,
    PlanBuffers,
    PlannedDecodes,
    allocate_workspace,
    unbuilt_kernel,
)
from onbeat.engine.cuda.graphs import GraphKey
from onbeat.engine.cuda.stream import CpuStream
from onbeat.engine.forward import Mark
from onbeat.engine.torch.kernels import ChunkRows, DecodeRows, LayerSpec
from onbeat.engine.torch.kv import LayerKVCache
from tests.cpu.engine.cuda.kernel_sizes import kernel_sizes
from tests.cpu.engine.cuda.recorded_flashinfer import Recorder, numbers

SIZES = kernel_sizes(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
KV = LayerKVCache(*(torch.zeros(9, 2, 16, 64, dtype=torch.bfloat16) for _ in range(2)))
ROWS = DecodeRows(
    torch.arange(3 * 64, dtype=torch.int32).view(3, 64), torch.tensor([1, 16, 40], dtype=torch.int32)
)
WORKSPACE = torch.zeros(0)


def layer(window: int | None) -> LayerSpec:
    return LayerSpec(
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        scale=0.3,
        window=window,
        frequencies_H=torch.ones(32),
        factors_H=torch.ones(32),
        sinks_N=None,
        query_norm=None,
        key_norm=None,
    )


def chunk_rows(query_lens: list[int], context_lens: list[int], blocks: list[int]) -> ChunkRows:
    lens = np.array(context_lens, np.int32)
    return ChunkRows(np.array(query_lens, np.int32), lens, -(-lens // 16), np.array(blocks, np.int32))


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_chunks_are_told_where_rows_and_blocks_end(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_attention, "_LONG_CHUNK", 1)
    recorder = Recorder()
    chunks = Chunks(recorder.library(), SIZES, backend, WORKSPACE)  # type: ignore[arg-type]
    plan = chunks.plan(chunk_rows([5, 7, 1], [5, 48, 17], [4, 2, 7, 8, 3, 1]), layer(None))
    made, call = recorder.last("PrefillWrapper"), recorder.last("prefill plan")
    assert (made["backend"], made["kv_layout"], made["use_cuda_graph"]) == (backend, "HND", False)
    assert numbers(call["qo_indptr"]) == [0, 5, 12, 13]
    assert numbers(call["paged_kv_indptr"]) == [0, 1, 4, 6]
    assert numbers(call["paged_kv_indices"]) == [4, 2, 7, 8, 3, 1]
    assert numbers(call["paged_kv_last_page_len"]) == [5, 16, 1]
    assert numbers(call["seq_lens"]) == [5, 48, 17]
    assert call["max_token_per_sequence"] == 7
    assert (call["num_qo_heads"], call["num_kv_heads"], call["head_dim_qk"], call["page_size"]) == (
        8,
        2,
        64,
        16,
    )
    assert (call["causal"], call["sm_scale"], call["window_left"]) == (True, 0.3, -1)
    assert call["q_data_type"] == call["kv_data_type"] == torch.bfloat16

    q_TNH, out_TNH = (torch.zeros(13, 8, 64, dtype=torch.bfloat16) for _ in range(2))
    chunks.attend(q_TNH, KV, plan, out_TNH)
    ran = recorder.last("prefill run")
    assert ran["q"] is q_TNH
    assert ran["out"] is out_TNH
    assert type(ran["paged_kv_cache"]) is tuple
    assert ran["paged_kv_cache"][1] is KV.v_BKSH


def test_keys_and_values_of_8_bits_are_read_by_fa2() -> None:
    recorder = Recorder()
    sizes = replace(SIZES, kv_dtype=torch.float8_e4m3fn)
    chunks = Chunks(recorder.library(), sizes, "fa3", WORKSPACE)
    chunks.plan(chunk_rows([200], [200], list(range(13))), layer(None))
    assert recorder.last("PrefillWrapper")["backend"] == "fa2"
    buffers = PlanBuffers(CpuStream(), SIZES.device)
    decodes = PlannedDecodes(
        recorder.library(), sizes, layer(None), GraphKey(3), workspace=WORKSPACE, buffers=buffers
    )
    decodes.plan(ROWS.lens_R.numpy())
    for call in ("prefill plan", "decode plan", "fast plan"):
        types = recorder.last(call)
        assert (types["q_data_type"], types["kv_data_type"]) == (torch.bfloat16, torch.float8_e4m3fn)


def test_each_window_has_a_wrapper_and_a_plan_of_its_own() -> None:
    """Both plans of a step are made before its first layer runs."""
    recorder = Recorder()
    chunks = Chunks(recorder.library(), SIZES, "fa2", WORKSPACE)
    rows = chunk_rows([5], [5], [4])
    whole, sliding = chunks.plan(rows, layer(None)), chunks.plan(rows, layer(40))
    assert recorder.last("prefill plan")["window_left"] == 39
    assert whole is not sliding
    assert whole.int_workspace_buffer.data_ptr() != sliding.int_workspace_buffer.data_ptr()
    assert chunks.plan(rows, layer(None)) is whole


def test_fa3_is_for_calls_whose_rows_are_all_long() -> None:
    recorder = Recorder()
    chunks = Chunks(recorder.library(), SIZES, "fa3", WORKSPACE)
    blocks = list(range(8))
    long = chunks.plan(chunk_rows([128], [128], blocks), layer(None))
    assert recorder.last("PrefillWrapper")["backend"] == "fa3"
    mixed = chunks.plan(chunk_rows([128, 1], [128, 30], [*blocks, 0, 1]), layer(None))
    assert recorder.last("PrefillWrapper")["backend"] == "fa2"
    assert long is not mixed
    assert long.int_workspace_buffer.data_ptr() != mixed.int_workspace_buffer.data_ptr()
    assert chunks.plan(chunk_rows([200, 128], [200, 128], list(range(21))), layer(None)) is long


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_rows_of_one_token_have_a_plan_beside_that_of_their_steps_chunks(backend: str) -> None:
    recorder = Recorder()
    chunks = Chunks(recorder.library(), SIZES, backend, WORKSPACE)  # type: ignore[arg-type]
    singles = chunks.plan(chunk_rows([1, 1], [30, 7], [0, 1, 2]), layer(40))
    assert recorder.last("PrefillWrapper")["backend"] == "fa2"
    long = chunks.plan(chunk_rows([128], [140], list(range(9))), layer(40))
    assert recorder.last("PrefillWrapper")["backend"] == backend
    assert singles is not long
    assert singles.int_workspace_buffer.data_ptr() != long.int_workspace_buffer.data_ptr()
    assert chunks.plan(chunk_rows([1], [9], [0]), layer(40)) is singles


def test_planned_decodes_plan_on_the_host_what_they_list_on_the_device() -> None:
    recorder = Recorder()
    buffers = PlanBuffers(CpuStream(), SIZES.device)
    decodes = PlannedDecodes(
        recorder.library(), SIZES, layer(40), GraphKey(3), workspace=WORKSPACE, buffers=buffers
    )
    made = recorder.last("DecodeWrapper")
    assert (made["kv_layout"], made["backend"]) == ("HND", "fa2")
    assert made["use_cuda_graph"]
    assert made["use_tensor_cores"]
    assert [name for name, _ in recorder.calls] == ["DecodeWrapper", "decode plan"]  # which takes the module

    decodes.plan(ROWS.lens_R.numpy())
    decodes.list_rows(ROWS)
    call = recorder.last("fast plan")
    assert numbers(call["indptr"]) == numbers(made["paged_kv_indptr_buffer"]) == [0, 1, 2, 5]
    assert numbers(call["last_page_len"]) == numbers(made["paged_kv_last_page_len_buffer"]) == [1, 16, 8]
    assert numbers(made["paged_kv_indices_buffer"][:5]) == [0, 64, 128, 129, 130]
    assert len(call["indices"]) == 5
    assert (call["num_qo_heads"], call["num_kv_heads"], call["head_dim"], call["page_size"]) == (8, 2, 64, 16)
    assert (call["sm_scale"], call["window_left"]) == (0.3, 39)
    assert call["q_data_type"] == call["kv_data_type"] == torch.bfloat16

    q_RNH, out_RNH = (torch.zeros(3, 8, 64, dtype=torch.bfloat16) for _ in range(2))
    decodes.attend(q_RNH, KV, out_RNH)
    assert recorder.last("decode run")["out"] is out_RNH


def test_rows_that_verify_drafts_are_planned_causally_for_the_buffers_of_their_graph() -> None:
    recorder = Recorder()
    buffers = PlanBuffers(CpuStream(), SIZES.device)
    rows = ROWS._replace(lens_R=torch.tensor([5, 17, 40], dtype=torch.int32), width=5)
    verifies = PlannedDecodes(
        recorder.library(), SIZES, layer(40), GraphKey(3, width=5), workspace=WORKSPACE, buffers=buffers
    )
    made = recorder.last("PrefillWrapper")
    assert (made["kv_layout"], made["backend"], made["use_cuda_graph"]) == ("HND", "fa2", True)
    assert numbers(made["qo_indptr_buf"]) == [0, 5, 10, 15]
    assert [name for name, _ in recorder.calls] == ["PrefillWrapper", "prefill plan"]

    for _ in range(2):
        verifies.plan(rows.lens_R.numpy())
    verifies.list_rows(rows)
    assert [name for name, _ in recorder.calls] == ["PrefillWrapper", *["prefill plan"] * 2]
    call = recorder.last("prefill plan")
    assert numbers(call["qo_indptr"]) == [0, 5, 10, 15]
    assert numbers(call["paged_kv_indptr"]) == numbers(made["paged_kv_indptr_buf"]) == [0, 1, 3, 6]
    assert numbers(call["paged_kv_last_page_len"]) == numbers(made["paged_kv_last_page_len_buf"]) == [5, 1, 8]
    assert numbers(made["paged_kv_indices_buf"][:6]) == [0, 64, 65, 128, 129, 130]
    assert numbers(call["seq_lens"]) == [5, 17, 40]
    assert (call["causal"], call["max_token_per_sequence"], call["window_left"]) == (True, 5, 39)
    assert len(call["paged_kv_indices"]) == 6

    q_TNH, out_TNH = (torch.zeros(15, 8, 64, dtype=torch.bfloat16) for _ in range(2))
    verifies.attend(q_TNH, KV, out_TNH)
    assert recorder.last("prefill run")["out"] is out_TNH


def test_decodes_are_planned_again_only_where_a_row_has_another_block() -> None:
    """Sizes share the memory of their plans on the device."""
    recorder = Recorder()
    buffers = PlanBuffers(CpuStream(), SIZES.device)
    two, three = (
        PlannedDecodes(
            recorder.library(), SIZES, layer(40), GraphKey(num), workspace=WORKSPACE, buffers=buffers
        )
        for num in (2, 3)
    )
    steps = [
        (two, [1, 16]),
        (two, [2, 16]),
        (two, [3, 17]),
        (three, [3, 17, 1]),
        (two, [4, 18]),
        (two, [5, 19]),
    ]
    planned = []
    for decodes, lens in steps:
        before = len(recorder.calls)
        decodes.plan(np.array(lens, np.int32))
        planned.append(len(recorder.calls) > before)
    assert planned == [True, False, True, True, True, False]


class _SlowStream(CpuStream):
    """A device that has copied nothing until somebody waits for it."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self._num_marks = 0

    def mark(self) -> Mark:
        number = self._num_marks
        self._num_marks += 1
        return _SlowMark(lambda: self.waited.append(number))


class _SlowMark:
    def __init__(self, on_wait) -> None:
        self._on_wait = on_wait

    def is_passed(self) -> bool:
        return False

    def wait(self) -> None:
        self._on_wait()

    def seconds_since(self, earlier: Mark) -> float:
        raise NotImplementedError


def test_a_plan_is_not_overwritten_before_it_is_copied() -> None:
    """Two steps may be in flight; the third plan waits for the copy of the first, not of the second."""
    stream = _SlowStream()
    buffers = PlanBuffers(stream, SIZES.device)
    places = []
    for _ in range(4):
        places.append(buffers.next().data_ptr())
        buffers.mark_copied()
    assert places[0] == places[2] != places[1] == places[3]
    assert stream.waited == [0, 1]


def test_wrappers_write_their_plans_to_the_buffers_in_turn() -> None:
    recorder = Recorder()
    chunks = Chunks(recorder.library(), SIZES, "fa2", WORKSPACE)
    for _ in range(3):
        chunks.plan(chunk_rows([5], [5], [4]), layer(None))
    pinned = [call["pinned"].data_ptr() for name, call in recorder.calls if name == "prefill plan"]
    assert pinned[0] == pinned[2] != pinned[1]
    assert recorder.last("prefill plan")["pinned"].nbytes == 8 << 20


def test_a_library_that_keeps_its_plans_elsewhere_is_refused() -> None:
    """A step in flight would read the next one's plan."""
    library = Recorder().library()

    class Renamed(library.PrefillWrapper):  # type: ignore[name-defined,misc]
        def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
            self._pinned = torch.empty(0)

    chunks = Chunks(library._replace(PrefillWrapper=Renamed), SIZES, "fa2", WORKSPACE)
    with pytest.raises(ConfigError, match="flashinfer-python=="):
        chunks.plan(chunk_rows([5], [5], [4]), layer(None))


def test_the_workspace_holds_the_largest_plan() -> None:
    """FlashInfer's allocator fails where a plan does not fit."""
    assert allocate_workspace(SIZES).nbytes == 128 << 20
    wide = kernel_sizes(num_heads=64, num_kv_heads=8, head_dim=128)
    # Two tiles of 128 queries for each of 188 processors, shared by 8 KV heads
    assert allocate_workspace(wide).nbytes >= 47 * 128 * 64 * (128 + 1) * 4
    # Rows of 5 tokens and 8 heads a KV head fill a tile of 64, and each may begin one
    verifying = replace(wide, verify_rows=((96, 5),))
    assert allocate_workspace(verifying).nbytes == (60 + 96) * 64 * 64 * (128 + 1) * 4


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[None]:
    """The library, which asks the GPU what to compile for when it is imported, unless it is told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
        yield


@pytest.mark.usefixtures("flashinfer")
def test_the_recorded_signatures_are_those_of_the_library() -> None:
    real, recorded = FlashInfer.load(), Recorder().library()
    assert real.version == recorded.version
    for ours, theirs in (
        (recorded.fast_decode_plan, real.fast_decode_plan),
        *(
            (getattr(getattr(recorded, name), method), getattr(getattr(real, name), method))
            for name in ("PrefillWrapper", "DecodeWrapper")
            for method in ("__init__", "plan", "run", "reset_workspace_buffer")
        ),
    ):
        assert _parameters(ours) == _parameters(theirs)


@pytest.mark.usefixtures("flashinfer")
def test_a_kernel_that_is_not_ready_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env = importlib.import_module("flashinfer.jit.env")
    monkeypatch.setattr(env, "FLASHINFER_AOT_DIR", tmp_path)
    monkeypatch.setattr(env, "FLASHINFER_JIT_DIR", tmp_path / "jit")
    unbuilt = unbuilt_kernel(SIZES.config)
    assert unbuilt is not None
    assert unbuilt.startswith("batch_prefill_with_kv_cache_dtype_q_bf16")
    (tmp_path / unbuilt).mkdir()
    (tmp_path / unbuilt / f"{unbuilt}.so").touch()
    assert unbuilt_kernel(SIZES.config) is None
    assert unbuilt_kernel(SIZES.config, "fa3") is not None
    of_fp8 = unbuilt_kernel(SIZES.config, kv_dtype=torch.float8_e4m3fn)
    assert of_fp8 is not None
    assert "kv_e4m3" in of_fp8


def _parameters(function: object) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(each.name, each.kind, each.default) for each in parameters]
