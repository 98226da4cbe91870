"""Profiles of a tiny model: which batches are measured, what is made of them, how the runner is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onbeat.cli.profile import profile_result
from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.engine.container import FreeMemory
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.dtypes import FLOAT32
from onbeat.engine.executor import PendingStep
from onbeat.engine.loaded_model import LoadedModel, profile_key_of
from onbeat.engine.native.forward import NativeForward
from onbeat.engine.native.library import NotLoaded, load_library
from onbeat.engine.profiling.batches import (
    BatchLimits,
    BatchRow,
    MeasuredBatch,
    corner_batches,
    mixed_batches,
    random_batches,
    verify_batches,
)
from onbeat.engine.profiling.measure import StepTimer, num_blocks_for
from onbeat.engine.profiling.profiler import (
    ProfileSettings,
    cpu_limits,
    gpu_limits,
    limits_of,
    measure_in_rounds,
    profile_model,
)
from onbeat.engine.start import prepare
from onbeat.engine.step_time_spec import model_spec_of
from onbeat.engine.torch.weights import FeedForward, layer_products
from onbeat.perfmodel.device_spec import ROW_COUNTS, cpu_device, known_device
from onbeat.perfmodel.fitted import FitTarget, fit_best
from onbeat.perfmodel.model_spec import model_spec_from_hf
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import read_profile, write_profile
from onbeat.perfmodel.shapes import MeasuredStep, draft_pairs
from tests.cpu.e2e.tiny_directory import LLAMA, write_tiny_directory
from tests.cpu.engine.tiny_config import tiny_config
from tests.examples import examples

SHORT = ProfileSettings(seconds=0.7, num_levels=3, num_mixed=8, num_held_back=6, max_context_tokens=1024)
LIMITS = BatchLimits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=200, max_context_tokens=1000)


def load(directory: Path, **changes: Any) -> LoadedModel:
    options: dict[str, Any] = {"max_model_len": 256} | changes
    return prepare(tiny_config(directory, **options)).load(lambda _: None)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_tiny_directory(tmp_path_factory.mktemp("model") / "tiny"))


@given(
    seqs=st.integers(1, 80),
    extra=st.integers(0, 700),
    length=st.integers(2, 5000),
    context=st.integers(64, 50_000),
    seed=st.integers(0, 9),
)
@examples(60)
def test_batches_keep_the_limits(seqs, extra, length, context, seed):
    limits = BatchLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + extra,
        max_model_len=length,
        max_context_tokens=context,
    )
    batches = corner_batches(limits, 4) + verify_batches(limits, 4)
    batches += mixed_batches(limits, 8) + random_batches(limits, 8, seed)
    assert batches
    for batch in batches:
        shape = batch.shape
        assert 1 <= shape.num_sequences <= seqs
        assert shape.num_new_tokens <= max(limits.max_num_batched_tokens, 2)
        assert all(cached >= 0 and new >= 1 for cached, new, *_ in batch.rows)
        assert all(cached + new <= max(length, 2) for cached, new, *_ in batch.rows)
        assert all(row.num_drafts in (0, row.num_new_tokens - 1) for row in batch.rows)
        assert sum(cached + new for cached, new, *_ in batch.rows) <= max(context, 2 * seqs)


@pytest.mark.parametrize(("num_blocks", "num_rows"), [(3, 1), (40, 18), (300, 135), (600, 256)])
def test_a_cache_that_is_small_for_its_slots_still_gives_batches_context(loaded, num_blocks, num_rows):
    sizes = {"num_blocks": num_blocks, "max_model_len": min(256, 16 * num_blocks)}
    config = replace(loaded.limits, max_num_seqs=256, max_num_batched_tokens=512, **sizes)
    limits = BatchLimits.of_scheduler(config, max_context_tokens=2**15, device_type="cpu")
    assert limits.max_num_seqs == num_rows
    assert limits.max_context_tokens >= 0.4 * num_blocks * config.block_size
    batches = corner_batches(limits, 4) + verify_batches(limits, 4)
    batches += mixed_batches(limits, 8) + random_batches(limits, 8, 0)
    assert num_blocks_for(batches, config.block_size) <= num_blocks


def test_batches_cover_what_steps_are_made_of():
    shapes = [batch.shape for batch in corner_batches(LIMITS, 4) + mixed_batches(LIMITS, 16)]
    assert {(shape.num_decodes > 0, shape.num_chunks > 0) for shape in shapes} == {
        (True, False),
        (False, True),
        (True, True),
    }
    assert max(shape.num_decodes for shape in shapes) == 16
    assert max(shape.num_new_tokens for shape in shapes) == 64
    assert any(shape.num_lm_head_rows < shape.num_sequences for shape in shapes)


def test_what_a_draft_costs_is_measured_apart_from_what_a_row_costs():
    limits = BatchLimits(
        max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2000, max_context_tokens=2**15
    )
    shapes = [batch.shape for batch in verify_batches(limits, 6)]
    assert all(shape.num_decodes == shape.num_verify_rows == shape.num_sequences for shape in shapes)
    assert {shape.num_draft_tokens // shape.num_decodes for shape in shapes} == {1, 3, 7}
    assert {1, 32} <= {shape.num_decodes for shape in shapes}
    columns = np.array(
        [
            (
                1,
                shape.num_verify_rows,
                shape.num_draft_tokens,
                shape.decode_context_tokens,
                draft_pairs(shape),
            )
            for shape in shapes
        ],
        dtype=float,
    )
    assert np.linalg.cond(columns / columns.max(axis=0)) < 50
    mixed = [batch.shape for batch in mixed_batches(limits, 32)]
    assert any(shape.num_chunks and 0 < shape.num_verify_rows < shape.num_decodes for shape in mixed)
    assert sum(shape.num_draft_tokens > 0 for shape in mixed) < len(mixed) / 2


def test_held_back_batches_depend_on_the_seed_alone():
    assert random_batches(LIMITS, 8, 3) == random_batches(LIMITS, 8, 3)
    assert random_batches(LIMITS, 8, 3) != random_batches(LIMITS, 8, 4)


def test_the_timer_leaves_the_runner_empty(loaded):
    batches = corner_batches(
        BatchLimits.of_scheduler(loaded.limits, max_context_tokens=1024, device_type="cpu"), 3
    )
    timer = StepTimer(loaded.runner, num_blocks=num_blocks_for(batches, 16))
    times = [timer.time(batch) for batch in batches]
    timer.close()
    assert min(times) > 0
    assert timer.num_runs == len(batches)
    assert loaded.runner.proposer is None
    assert not loaded.runner.batch.slots
    assert len(loaded.runner.batch.free_slots) == loaded.limits.max_num_seqs


def test_the_timer_verifies_the_drafts_of_a_step(loaded, monkeypatch):
    batch = MeasuredBatch((BatchRow(30, 4, num_drafts=3), BatchRow(9, 1), BatchRow(0, 20, samples=False)))
    seen: list[ModelRunnerOutput] = []
    launch = loaded.runner.launch

    def recorded(scheduled: SchedulerOutput) -> PendingStep:
        step: PendingStep = launch(scheduled)
        seen.append(step.result())
        return step

    monkeypatch.setattr(loaded.runner, "launch", recorded)
    timer = StepTimer(loaded.runner, num_blocks=num_blocks_for([batch], 16))
    timer.time(batch)
    assert seen[-1].num_drafted == [3, 0]
    assert 1 <= len(seen[-1].sampled_token_ids[0]) <= 4
    timer.time(MeasuredBatch((BatchRow(9, 1),)))
    assert seen[-1].num_drafted is None
    timer.close()
    assert loaded.runner.proposer is None
    assert batch.shape == BatchShape(
        num_new_tokens=25,
        num_sequences=3,
        num_decodes=2,
        num_chunks=1,
        query_key_pairs=210,
        decode_context_tokens=44,
        sum_chunk_squares=400,
        num_lm_head_rows=5,
        num_verify_rows=1,
        num_draft_tokens=3,
    )


def test_rows_of_a_timed_step_have_tokens_of_their_own(loaded, monkeypatch):
    seen: list[SchedulerOutput] = []
    launch = loaded.runner.launch
    monkeypatch.setattr(
        loaded.runner, "launch", lambda scheduled: (seen.append(scheduled), launch(scheduled))[1]
    )
    timer = StepTimer(loaded.runner, num_blocks=8)
    timer.time(MeasuredBatch((BatchRow(30, 1),) * 4))
    timer.close()
    prompts = {admitted.request.prompt_token_ids for step in seen for admitted in step.admitted}
    assert {len(prompt) for prompt in prompts} == {31}
    assert len({prompt[-1] for prompt in prompts}) == 4


def test_a_campaign_takes_medians_and_stops_in_time():
    batches = [MeasuredBatch((BatchRow(10 * i, 1),)) for i in range(1, 4)]
    runs: dict[int, int] = {}

    def run(batch: MeasuredBatch) -> float:
        context = batch.rows[0].num_cached_tokens
        runs[context] = runs.get(context, 0) + 1
        return 5.0 if runs[context] == 1 else context * 1e-3  # the first run of each is disturbed

    shares: list[float] = []
    steps = measure_in_rounds(run, batches, 60.0, shares.append, max_rounds=5)
    assert [step.seconds for step in steps if step] == pytest.approx([0.010, 0.020, 0.030])
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    assert measure_in_rounds(run, batches, 0.0) == [None, None, None]


def test_a_fit_finds_the_law_behind_the_steps():
    """Times made of a fixed part, tokens and context, as one of the methods has it."""
    batches = corner_batches(LIMITS, 5) + verify_batches(LIMITS, 5) + mixed_batches(LIMITS, 16)

    def seconds(shape: BatchShape) -> float:
        per_token = 1e-5 * shape.num_new_tokens + 2e-5 * shape.num_draft_tokens
        return 1e-3 + per_token + 1e-7 * shape.decode_context_tokens

    steps = [MeasuredStep(batch.shape, seconds(batch.shape)) for batch in batches]
    held_back = [MeasuredStep(batch.shape, seconds(batch.shape)) for batch in random_batches(LIMITS, 8, 5)]
    target = FitTarget(
        model=model_spec_from_hf(LLAMA, name="tiny"),
        device=cpu_device(memory_bandwidth=1e10, peak_flops=1e11, memory_bytes=1e9),
        precision=Precision(weights="fp32", kv="fp32", compute="fp32"),
    )
    fitted = fit_best(target, steps, held_back)
    assert fitted.errors.num_points == len(held_back)
    assert fitted.errors.p95 < 0.01


def test_limits_of_a_gpu_are_measured_by_torch():
    limits = gpu_limits(DeviceConfig(CPU, FLOAT32, 1), "fp32", read_bytes=2**24, matrix_size=256)
    assert 1e8 < limits.memory_bandwidth < 1e13
    assert 1e8 < limits.peak_flops["fp32"] < 1e15


def test_rates_are_those_of_numbers_that_differ(monkeypatch):
    """A GPU multiplies equal numbers more than a tenth faster than a model's."""
    multiplied: list[torch.Tensor] = []
    mm, linear = torch.mm, torch.nn.functional.linear
    monkeypatch.setattr(torch, "mm", lambda *both: (multiplied.extend(both), mm(*both))[1])
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda *both: (multiplied.extend(both[:2]), linear(*both))[1]
    )
    gpu_limits(DeviceConfig(CPU, FLOAT32, 1), "fp32", read_bytes=2**16, matrix_size=16)
    qkv_XD, o_DX, *feed_forward = (torch.randn(8, 8) for _ in range(4))
    layer = SimpleNamespace(qkv_XD=qkv_XD, o_DX=o_DX, feed_forward=FeedForward(*feed_forward))
    products = layer_products(SimpleNamespace(layers=[layer]))
    products.run(4)
    assert len(multiplied) > 8
    assert all(values.std() > 0.5 for values in multiplied)


def test_limits_of_a_gpu_are_measured_in_what_memory_is_left(monkeypatch):
    monkeypatch.setattr(
        "onbeat.engine.profiling.profiler.free_memory", lambda _: FreeMemory(2**24, "the GPU")
    )
    shapes: list[tuple[int, ...]] = []
    ones = torch.ones

    def noted(*shape: int, **options: Any) -> torch.Tensor:
        shapes.append(shape)
        made: torch.Tensor = ones(*shape, **options)
        return made

    monkeypatch.setattr(torch, "ones", noted)
    gpu_limits(DeviceConfig(CPU, FLOAT32, 1), "fp32", matrix_size=16)
    assert shapes[0] == (2**22 // 4,)


class FakeProducts:
    """Rows at a rate of their own, on a machine whose every third run is disturbed."""

    flops_per_row = 1e6
    num_bytes = 1000

    def __init__(self, seconds_per_row: float = 1e-6) -> None:
        self.seconds_per_row = seconds_per_row
        self.runs: list[int] = []
        self.is_closed = False

    def run(self, num_rows: int) -> float:
        self.runs.append(num_rows)
        quick = num_rows * self.seconds_per_row * (1 if num_rows < 16 else 0.25)
        return quick * (9 if len(self.runs) % 3 == 0 else 1)

    def close(self) -> None:
        self.is_closed = True


def test_rates_by_rows_are_the_best_of_several_runs():
    products = FakeProducts()
    found = cpu_limits(1, products, "bf16")
    assert products.is_closed
    assert 1e8 < found.memory_bandwidth < 1e13
    assert found.peak_flops["bf16"] == pytest.approx(4e12)
    rates = dict(found.product_rates)
    assert list(rates) == list(ROW_COUNTS)
    assert rates[2] == pytest.approx(1e12, rel=0.01)
    assert rates[512] == pytest.approx(4e12)


def test_products_that_take_long_are_not_repeated():
    found = cpu_limits(1, FakeProducts(seconds_per_row=0.03), "bf16")
    assert [rows for rows, _ in found.product_rates] == [1, 2, 4]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_an_engine_measures_its_own_products(backend, tmp_path):
    if backend == "native" and isinstance(load_library(), NotLoaded):
        pytest.skip("the native library is not built")
    loaded = load(write_tiny_directory(tmp_path / "tiny"), backend=backend)
    products = loaded.runner.forward.products()
    assert products.flops_per_row > 0
    assert products.num_bytes > 0
    assert 0 < products.run(1) < 1
    assert 0 < products.run(ROW_COUNTS[-1]) < 1
    products.close()
    limits = limits_of(loaded, "cpu", "fp32")
    assert limits is not None
    assert [rows for rows, _ in limits.product_rates] == list(ROW_COUNTS)
    assert all(0 < rate <= limits.peak_flops["fp32"] * 1.001 for _, rate in limits.product_rates)
    assert (profile_key_of(loaded, Precision()).instruction_set is None) == (backend == "torch")
    loaded.runner.forward.close()


def test_the_layer_that_is_timed_leaves_no_token_out(tmp_path, monkeypatch):
    """It is the last one, of whose tokens a step computes those alone that somebody asks for."""
    if isinstance(load_library(), NotLoaded):
        pytest.skip("the native library is not built")
    loaded = load(write_tiny_directory(tmp_path / "tiny"), backend="native")
    products = loaded.runner.forward.products()
    run, wanted = NativeForward.run, []

    def watched(self, inputs, *, wants_logits):
        wanted.append((len(inputs.token_ids_T), inputs.pooled_tokens.tolist()))
        return run(self, inputs, wants_logits=wants_logits)

    monkeypatch.setattr(NativeForward, "run", watched)
    products.run(40)
    products.close()
    loaded.runner.forward.close()
    assert wanted == [(40, list(range(40)))]


def test_a_profile_is_measured_fitted_and_read_again(loaded, tmp_path):
    shares: list[float] = []
    result = profile_model(loaded, SHORT, shares.append)
    profile = result.profile
    assert profile.fitted.errors.num_points == len(result.held_back) > 0
    assert profile.key.device == "cpu"
    assert profile.limits is not None
    assert profile.engine["num_held_back"] == len(result.held_back)
    assert shares
    assert any(step.shape.num_verify_rows == step.shape.num_sequences > 0 for step in result.fitted_steps)
    held_back = replace(result, held_back=result.fitted_steps)  # the few of this profile may have no drafts
    assert [row for row in profile_result(held_back).document()["errors"] if row["steps"].endswith("drafts")]
    path = tmp_path / "p.json"
    write_profile(path, profile)
    assert read_profile(path, profile.key) == profile
    with pytest.raises(ConfigError, match=r"threads '1', not '7'"):
        read_profile(path, replace(profile.key, threads=7))


def test_steps_with_drafts_are_measured_only_where_the_timer_gives_the_drafts(loaded):
    class Other:
        """A runner of another engine."""

        def __getattr__(self, name):
            return getattr(loaded.runner, name)

    result = profile_model(replace(loaded, runner=Other()), SHORT)
    assert result.held_back
    assert not any(step.shape.num_draft_tokens for step in result.profile.steps)
    assert any(step.shape.num_decodes and step.shape.num_chunks for step in result.held_back)


def test_too_little_time_is_an_error(loaded):
    with pytest.raises(ConfigError, match=r"1e-09 s.* fit"):
        profile_model(loaded, replace(SHORT, seconds=1e-9))


def test_float64_has_no_step_times(tmp_path):
    loaded = load(write_tiny_directory(tmp_path / "tiny"), dtype="float64")
    with pytest.raises(ConfigError, match="float64"):
        profile_model(loaded, SHORT)


def test_the_engines_sizes_are_those_of_the_file(loaded):
    assert model_spec_of(loaded.backend.model, "tiny") == model_spec_from_hf(LLAMA, name="tiny")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80-sxm"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_gpus_are_known_by_the_drivers_name(name, expected):
    assert known_device(name) == expected


VLLM = {"backend": "vllm", "vllm": "0.32.0", "model_runner": "second"}


@pytest.mark.parametrize(
    ("engine", "graphs", "kind"),
    [
        ({}, "cuda", None),
        ({}, "cuda and pieces", "graphs: cuda and pieces"),
        ({}, "none", "graphs: none"),
        (VLLM, "cuda", "vLLM 0.32.0, second runner"),
        (VLLM | {"model_runner": "first"}, "none", "vLLM 0.32.0, first runner, graphs: none"),
    ],
)
def test_a_profile_of_a_gpu_says_what_was_captured_and_by_which_runner(engine, graphs, kind):
    settings = {"backend": "cuda", **engine, "graphs": f"{graphs}, up to 8 rows"}
    forward = SimpleNamespace(settings=settings)
    backend = SimpleNamespace(name="tiny", device=DeviceConfig(CPU, FLOAT32, num_threads=1))
    loaded = SimpleNamespace(backend=backend, runner=SimpleNamespace(forward=forward))
    assert profile_key_of(loaded, Precision()).instruction_set == kind
