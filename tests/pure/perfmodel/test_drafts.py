"""Steps that verify drafts: what every model of step times says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.linear import DistServeCoefficients, distserve_closure
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import Parallelism, cpu_device, find_device
from onbeat.perfmodel.fitted import FIT_METHODS, FitTarget, NNLSForm, fit, make_form
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.shapes import MeasuredStep, draft_pairs, draft_pairs_of, shape_matrix
from onbeat.perfmodel.utilisation import StepOperations
from tests.examples import examples
from tests.pure.perfmodel.shapes import batch, decodes, mixed_batches, rows, verified, verifies, with_verified
from tests.pure.perfmodel.targets import make_roofline, roofline_seconds

Seconds = Callable[[BatchShape], float]

H100 = find_device("h100-sxm")
CPU = cpu_device(memory_bandwidth=2e10, peak_flops=2e11, memory_bytes=1e10)
LLAMA_8B, GEMMA = find_model_spec("Llama-3.1-8B"), find_model_spec("gemma-3-27b-pt")
SMOL = find_model_spec("SmolLM2-135M")
FP32 = Precision(weights="fp32", kv="fp32", compute="fp32")
DISTSERVE = DistServeCoefficients((0.02, 1e-4, 1e-8), (0.03, 1e-6, 1e-4), (0.01, 2e-6, 4e-4), 95)


def fitted_here(shapes: list[BatchShape], truth: Seconds, method: str) -> Seconds:
    parallelism, precision = Parallelism(), Precision()
    target = FitTarget(model=LLAMA_8B, device=H100, parallelism=parallelism, precision=precision)
    fitted = fit([MeasuredStep(shape, truth(shape)) for shape in shapes], target, method)
    return make_form(method, target).closure(fitted.parameters)


@pytest.fixture(scope="module")
def models() -> dict[str, Seconds]:
    roofline = make_roofline(LLAMA_8B, H100)
    return {
        "roofline": roofline,
        "roofline of windows": make_roofline(GEMMA, H100),
        "roofline of a CPU": make_roofline(SMOL, CPU, precision=FP32),
        "nnls": fitted_here(mixed_batches(60, seed=21, with_drafts=True), roofline, "nnls"),
        "distserve": distserve_closure(DISTSERVE),
    }


NAMES = (
    "roofline",
    "roofline of windows",
    "roofline of a CPU",
    "nnls",
    "distserve",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 4, 32])
@pytest.mark.parametrize("context", [64, 1000])
def test_another_draft_never_makes_a_step_shorter(models, name, count, context):
    times = [models[name](verifies(count, context, num_drafts)) for num_drafts in range(9)]
    assert times == sorted(times)
    assert times[0] == models[name](decodes(count, context))
    beside_a_chunk = [
        models[name](with_verified(batch([(300, 256)]), [(context, num_drafts)] * count))
        for num_drafts in range(9)
    ]
    assert beside_a_chunk == sorted(beside_a_chunk)


@pytest.mark.parametrize("name", ["roofline", "roofline of windows", "distserve"])
def test_drafts_are_cheaper_than_rows_of_their_own(models, name):
    """They read no context of their own: eight tokens of one request are not eight requests."""
    assert models[name](verifies(4, 2000, 7)) < models[name](decodes(32, 2000))


def test_on_a_gpu_a_few_drafts_cost_next_to_nothing_until_the_batch_is_large(models):
    gpu = models["roofline"]
    alone, crowded = (gpu(verifies(n, 500, 3)) / gpu(decodes(n, 500)) for n in (1, 256))
    assert alone < 1.03
    assert crowded > 1.3


def test_a_verified_row_reads_its_context_once_unless_arithmetic_takes_longer():
    """64 query heads a KV head, at most 16 at once for 256 KiB of KV a token: all read, nothing computed."""
    gpu = make_roofline(LLAMA_8B, H100)
    short, long = (gpu(verifies(8, context, 3)) for context in (1000, 9000))
    plain = [gpu(decodes(8, context)) for context in (1000, 9000)]
    assert long - short == pytest.approx(plain[1] - plain[0], rel=1e-3)
    slow = replace(H100, peak_flops=dict.fromkeys(H100.peak_flops, 1e12))
    bound = make_roofline(LLAMA_8B, slow)
    growth = bound(verifies(8, 9000, 3)) - bound(verifies(8, 1000, 3))
    assert growth == pytest.approx(4 * (bound(decodes(8, 9000)) - bound(decodes(8, 1000))), rel=0.01)


@examples(60)
@given(rows=rows, drafts=verified, name=st.sampled_from(["Llama-3.1-8B", "gemma-3-27b-pt", "Mixtral-8x7B"]))
def test_scalar_and_vectorised_rooflines_agree(rows, drafts, name):
    shape = with_verified(batch(rows), drafts)
    model = find_model_spec(name)
    together = roofline_seconds(shape_matrix([shape, decodes(3, 50)]), model, H100)
    assert together[0] == pytest.approx(make_roofline(model, H100)(shape), rel=1e-12)


@examples(40)
@given(rows=rows, drafts=verified)
def test_both_evaluations_of_a_linear_fit_agree(rows, drafts):
    names = make_form("nnls", FitTarget(model=LLAMA_8B, device=H100)).fit(
        shape_matrix(mixed_batches(30, seed=2, with_drafts=True)),
        np.linspace(0.01, 0.1, 30),
    )
    parameters = {name: 1e-4 * (index + 1) for index, name in enumerate(names)}
    shape = with_verified(batch(rows), drafts)
    if shape.num_new_tokens:
        predicted = NNLSForm().predict(shape_matrix([shape]), parameters)[0]
        assert predicted == pytest.approx(NNLSForm().closure(parameters)(shape))


@given(rows=rows, drafts=verified)
def test_pairs_of_drafts_are_counted_at_the_mean_context(rows, drafts):
    shape = with_verified(batch(rows), drafts)
    num_drafts = sum(number for _, number in drafts)
    if num_drafts:
        mean = shape.decode_context_tokens / shape.num_decodes
        assert draft_pairs(shape) == pytest.approx(num_drafts * mean)
    assert draft_pairs_of(shape_matrix([shape]))[0] == pytest.approx(draft_pairs(shape))


@pytest.mark.parametrize("method", FIT_METHODS)
def test_a_fit_learns_what_a_draft_costs(method: str) -> None:
    """The truth charges a draft far more than a token of a chunk, as an engine might; only steps that verify
    can teach that."""
    roofline = make_roofline(LLAMA_8B, H100)

    def truth(shape: BatchShape) -> float:
        if method == "roofline":
            return roofline(shape)
        return 4e-3 + 1e-5 * shape.num_new_tokens + 2e-4 * shape.num_draft_tokens + 1e-7 * draft_pairs(shape)

    def fitted_to(shapes: list[BatchShape]) -> Seconds:
        return fitted_here(shapes, truth, method)

    unseen = [verifies(count, 700, num_drafts) for count in (1, 5, 20) for num_drafts in (2, 5)]
    taught = fitted_to(mixed_batches(60, seed=4, with_drafts=True))
    assert [taught(shape) for shape in unseen] == pytest.approx([truth(shape) for shape in unseen], rel=0.03)
    if method == "nnls":
        untaught = fitted_to(mixed_batches(60, seed=4))
        assert untaught(verifies(20, 700, 5)) < 0.5 * truth(verifies(20, 700, 5))


def test_a_linear_fit_of_before_there_were_drafts_still_predicts():
    new = {"num_draft_tokens", "draft_pairs", "has_drafts"}
    shapes = mixed_batches(40, seed=5)
    form = make_form("nnls", FitTarget(model=LLAMA_8B, device=H100))
    whole = form.fit(shape_matrix(shapes), np.array([1e-3 + 1e-5 * s.num_new_tokens for s in shapes]))
    old = {name: value for name, value in whole.items() if name not in new}
    assert form.closure(old)(decodes(4, 100)) == form.closure(whole)(decodes(4, 100))
    assert form.closure(old)(verifies(4, 100, 3)) == pytest.approx(1e-3 + 16e-5, rel=1e-3)


def test_work_counts_drafts_as_arithmetic_and_their_context_once():
    work = StepOperations(LLAMA_8B)
    plain, verify = decodes(4, 1000), verifies(4, 1000, 3)
    assert work.flops(verify) == pytest.approx(4 * work.flops(plain), rel=0.01)
    assert work.bytes_read(verify) == pytest.approx(work.bytes_read(plain), rel=0.01)


def test_distserve_counts_a_draft_as_a_sequence_without_context():
    seconds = distserve_closure(DISTSERVE)
    assert seconds(verifies(2, 100, 3)) == pytest.approx(0.03 + 1e-6 * 206 + 1e-4 * 8)
    # 40 rows of four tokens are as many as 160 sequences.
    assert seconds(verifies(40, 100, 3)) == pytest.approx(0.01 + 2e-6 * 40 * 103 + 4e-4 * 160)
