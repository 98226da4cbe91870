"""The roofline: its two forms agree, it moves the right way, and it meets what others measured."""

import csv
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.check.roofline_accuracy import read_grid, relative_errors
from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import seconds_of_each
from onbeat.perfmodel.device_spec import Parallelism, cpu_device, find_device
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import RooflineParameters, default_parameters
from onbeat.perfmodel.shapes import FIELDS, shape_matrix
from tests.examples import examples
from tests.pure.perfmodel.shapes import mixed_batches
from tests.pure.perfmodel.targets import make_roofline, roofline_seconds

H100, A100 = find_device("h100-sxm"), find_device("a100-80-sxm")
LLAMA_8B = find_model_spec("Llama-3.1-8B")
needs_data = pytest.mark.skipif("ONBEAT_SHARED" not in os.environ, reason="ONBEAT_SHARED is not set")


def batch(*rows):
    """A batch of rows (cached tokens, new tokens)."""
    shape = BatchShape()
    for num_computed_tokens, num_new_tokens in rows:
        shape.add(num_computed_tokens, num_new_tokens, samples=True)
    return shape


rows = st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 8192)), max_size=20)
factors = st.builds(
    lambda values: RooflineParameters(
        *(value * factor for value, factor in zip(_defaults(), values, strict=True))
    ),
    st.lists(
        st.floats(0.2, 5), min_size=len(fields(RooflineParameters)), max_size=len(fields(RooflineParameters))
    ),
)


def _defaults():
    return [getattr(RooflineParameters(), field.name) for field in fields(RooflineParameters)]


@examples(60)
@given(
    batches=st.lists(rows, min_size=1, max_size=5),
    parameters=factors,
    name=st.sampled_from(["Llama-3.1-8B", "Mixtral-8x7B", "gemma-3-27b-pt", "Qwen3-30B-A3B"]),
    parallelism=st.sampled_from([Parallelism(), Parallelism(2), Parallelism(4, 2)]),
)
def test_scalar_and_vectorised_forms_agree(batches, parameters, name, parallelism):
    model = find_model_spec(name)
    options = {
        "parallelism": parallelism,
        "precision": Precision("fp8", "fp8", "fp8"),
        "parameters": parameters,
    }
    predict = make_roofline(model, H100, **options)
    shapes = [batch(*rows) for rows in batches]
    together = roofline_seconds(shape_matrix(shapes), model, H100, **options)
    np.testing.assert_allclose(together, [predict(shape) for shape in shapes], rtol=1e-12)


@examples(60)
@given(rows=rows, more=st.tuples(st.integers(0, 50_000), st.integers(1, 4096)))
def test_another_row_never_makes_a_step_shorter(rows, more):
    predict = make_roofline(LLAMA_8B, H100)
    before = predict(batch(*rows))
    assert predict(batch(*rows, more)) >= before
    assert (before > 0) == bool(rows)


@examples(60)
@given(
    rows=rows.filter(bool),
    contexts=st.lists(st.integers(1, 200_000), max_size=5),
    name=st.sampled_from(["Llama-3.1-8B", "Mixtral-8x7B", "gemma-3-27b-pt"]),
)
def test_a_run_of_steps_takes_what_its_steps_take_to_the_last_digit(rows, contexts, name):
    model, shape = find_model_spec(name), batch(*rows)
    before = replace(shape)
    seconds = make_roofline(model, H100)
    assert list(seconds.of_run(shape, contexts)) == seconds_of_each(seconds, shape, contexts)
    assert shape == before


@given(st.lists(rows, max_size=4))
def test_matrix_and_shapes_are_inverse(batches):
    shapes = [batch(*rows) for rows in batches]
    matrix = shape_matrix(shapes)
    assert matrix.shape == (len(shapes), len(FIELDS))
    assert [BatchShape(*map(int, row)) for row in matrix] == shapes


def test_no_step_beats_the_data_sheet():
    weights = 2 * (LLAMA_8B.num_parameters - LLAMA_8B.embedding_parameters)
    predict = make_roofline(LLAMA_8B, H100)
    assert predict(batch((1000, 1))) > weights / 3.35e12
    assert predict(batch((0, 8192))) > 2 * LLAMA_8B.layer_parameters * 8192 / 989.4e12


def test_devices_shorten_a_step_but_links_cost():
    model = find_model_spec("Llama-3.1-70B")
    prompt = batch((0, 4096))
    one, four = (make_roofline(model, H100, parallelism=Parallelism(n))(prompt) for n in (1, 4))
    assert one / 4 < four < one / 2
    staged = make_roofline(model, H100, parallelism=Parallelism(1, 4))(prompt)
    assert one < staged < 1.05 * one  # through all stages, with transfers


def test_narrower_formats_are_quicker():
    predict = {w: make_roofline(LLAMA_8B, H100, precision=Precision(weights=w)) for w in ("bf16", "int4")}
    decode = batch((1000, 1))
    assert 2 < predict["bf16"](decode) / predict["int4"](decode) < 4
    kv8 = make_roofline(LLAMA_8B, H100, precision=Precision(kv="int8"))
    long = batch(*[(30_000, 1)] * 16)
    assert kv8(long) < predict["bf16"](long)


def test_experts_cost_arithmetic_of_few_and_memory_of_those_met():
    predict = make_roofline(find_model_spec("Mixtral-8x7B"), H100, parallelism=Parallelism(2))
    one, few, many = (predict(batch(*[(100, 1)] * n)) for n in (1, 8, 64))
    assert few > 1.5 * one
    assert many < 1.3 * few


def test_windows_bound_what_is_attended_to():
    windowed = find_model_spec("Mistral-7B-v0.1")
    predict = make_roofline(windowed, H100)
    assert predict(batch((50_000, 1))) == pytest.approx(predict(batch((4095, 1))), rel=1e-3)
    whole = make_roofline(find_model_spec("Mistral-7B-v0.3"), H100)
    assert predict(batch((28_672, 4096))) < whole(batch((28_672, 4096)))


@pytest.mark.parametrize(
    "name", ["DeepSeek-V3", "Qwen3.5-27B", "gemma-4-26B-A4B", "gpt-oss-120b", "GLM-4.5-Air"]
)
def test_both_evaluations_agree_on_attention_that_is_not_plain(name: str) -> None:
    model, shapes = find_model_spec(name), mixed_batches(20, seed=3)
    predict = make_roofline(model, H100, parallelism=Parallelism(8))
    matrix = roofline_seconds(shape_matrix(shapes), model, H100, parallelism=Parallelism(8))
    assert matrix.tolist() == pytest.approx([predict(shape) for shape in shapes])


def test_a_state_costs_each_row_whatever_its_context() -> None:
    hybrid = find_model_spec("Qwen3.5-27B")
    predict = make_roofline(hybrid, H100)
    more = predict(batch(*[(1000, 1)] * 9)) - predict(batch(*[(1000, 1)] * 8))
    without = make_roofline(replace(hybrid, state_bytes=0), H100)
    assert more - (without(batch(*[(1000, 1)] * 9)) - without(batch(*[(1000, 1)] * 8))) == pytest.approx(
        2 * hybrid.state_bytes / H100.memory_bandwidth / 0.87
    )


def test_latent_kv_is_read_whole_by_every_device() -> None:
    latent, heads = find_model_spec("DeepSeek-V3"), find_model_spec("Llama-3.1-70B")
    for model, least, most in ((latent, 0.9, 1.1), (heads, 0.2, 0.3)):
        more = [make_roofline(model, H100, parallelism=Parallelism(tensor)) for tensor in (2, 8)]
        two, eight = (f(batch(*[(9000, 1)] * 8)) - f(batch(*[(1000, 1)] * 8)) for f in more)
        assert least < eight / two < most


def test_over_pcie_devices_wait_for_each_other() -> None:
    def step(device: str, tensor: int) -> float:
        return make_roofline(LLAMA_8B, find_device(device), parallelism=Parallelism(tensor))(
            batch(*[(500, 1)] * 32)
        )

    assert step("h100-nvl", 4) > 1.2 * step("h100-sxm", 4)  # bridges join pairs
    assert step("l40s", 8) > 2 * step("l40s", 2) / 3  # eight are hardly quicker than two
    assert step("rtx-4090", 4) > 0.6 * step("rtx-4090", 2)


def test_cpu_has_its_own_defaults():
    cpu = cpu_device(memory_bandwidth=2e10, peak_flops=1e11)
    assert (
        default_parameters(cpu, Precision()).layer_seconds
        > 5 * default_parameters(H100, Precision()).layer_seconds
    )
    predict = make_roofline(find_model_spec("SmolLM2-135M"), cpu)
    assert 0.01 < predict(batch((100, 1))) < 0.1


def test_what_cannot_run_is_an_error():
    with pytest.raises(ConfigError, match="divide"):
        make_roofline(LLAMA_8B, H100, parallelism=Parallelism(3))
    with pytest.raises(ConfigError, match="compute in fp8"):
        make_roofline(LLAMA_8B, A100, precision=Precision(compute="fp8"))
    cpu = cpu_device(memory_bandwidth=2e10, peak_flops=1e11)
    with pytest.raises(ConfigError, match="link"):
        make_roofline(LLAMA_8B, cpu, parallelism=Parallelism(2))


@needs_data
def test_uncalibrated_error_on_the_published_grid():
    grid = read_grid(Path(os.environ["ONBEAT_SHARED"]) / "data" / "profiles" / "aic_step_grid.csv")
    medians = [np.median(np.abs(relative_errors(key, steps))) for key, steps in grid.items()]
    assert len(medians) == 19
    assert np.median(medians) <= 0.065
    assert max(medians) <= 0.13


# Measured batches of Sarathi-Serve (Agrawal et al., OSDI 2024), Yi-34B on two A100 80 GB.
YI = find_model_spec("Yi-34B")
SARATHI_HOST_SECONDS = 1.94e-3
"""What that engine's host does in the measured span: it schedules, prepares inputs, samples, handles outputs.

For a 34B model, TP 2, batch 8 on A100, as published with Vidur (Agrawal et al., MLSys 2024).
"""


def yi_34b():
    parameters = replace(default_parameters(A100, Precision()), step_seconds=SARATHI_HOST_SECONDS)
    return make_roofline(YI, A100, parallelism=Parallelism(2), parameters=parameters)


def sarathi_rows(figure):
    name = f"yi34b_tp2_a100_{figure}.csv"
    path = Path(os.environ["ONBEAT_SHARED"]) / "data" / "profiles" / "sarathi" / name
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@needs_data
def test_a_hybrid_batch_costs_what_a_prompt_of_its_size_costs():
    decode_only, hybrid, prefill = sarathi_rows("table-2_results")
    predict = make_roofline(YI, A100, parallelism=Parallelism(2))
    mixed, whole = predict(batch((0, 1021), *[(1024, 1)] * 3)), predict(batch((0, 1024)))
    assert 0.97 <= mixed / whole <= 1.05
    assert mixed * 1e3 == pytest.approx(float(hybrid["batch_execution_time"]), rel=0.25)
    assert whole * 1e3 == pytest.approx(float(prefill["batch_execution_time"]), rel=0.25)
    # More than half of the decode-only batch is that engine's host time: compare with its operators.
    operators = float(decode_only["linear"]) + float(decode_only["attention"])
    assert predict(batch(*[(1024, 1)] * 4)) * 1e3 == pytest.approx(operators, rel=0.25)


@needs_data
def test_prompts_of_all_lengths_are_met_uncalibrated():
    measured = {
        int(r["batch_num_prefill_tokens"]): float(r["batch_execution_time"])
        for r in sarathi_rows("figure-2_prefill")
    }
    predict = yi_34b()
    errors = [abs(predict(batch((0, n))) / measured[n] - 1) for n in (512, 1024, 2048, 4096, 8192, 16384)]
    assert max(errors) <= 0.30  # kernels of 2026 are quicker than that engine's of 2024


@needs_data
@pytest.mark.parametrize("length", [2047, 4095, 16383])
def test_the_cost_of_chunking(length):
    measured = {
        int(row["chunk_size"]): float(row["prefill_execution_time_relative"])
        for row in sarathi_rows("figure-9_chunking-overhead")
        if int(row["prefill_length"]) == length
    }
    predict = yi_34b()
    whole = predict(batch((0, length)))

    def ratio(chunk):
        return (
            sum(predict(batch((start, min(chunk, length - start)))) for start in range(0, length, chunk))
            / whole
        )

    assert ratio(512) == pytest.approx(measured[512], abs=0.16)
    assert ratio(1024) == pytest.approx(measured[1024], abs=0.16)
    assert ratio(2048) <= ratio(1024) <= ratio(512)
