"""Operations and bytes of a batch, against the same counted by hand."""

import pytest

from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import Parallelism
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.utilisation import StepOperations

MODEL = find_model_spec("Llama-3.1-8B")


def decodes(count, context):
    shape = BatchShape()
    for _ in range(count):
        shape.add(context - 1, 1, samples=True)
    return shape


def test_decode_reads_weights_and_context():
    weights = 2 * (MODEL.num_parameters - MODEL.embedding_parameters)  # the embedding is a look-up
    work = StepOperations(MODEL)
    assert work.bytes_read(decodes(4, 1000)) == pytest.approx(weights + 4 * 1000 * 131072)
    flops = 4 * (weights + 4 * 32 * 128 * 32 * 1000)
    assert work.flops(decodes(4, 1000)) == pytest.approx(flops)


def test_whole_prompt_attends_to_half_its_square():
    shape = BatchShape()
    shape.add(0, 1000, samples=True)
    pairs = 1000 * 1001 // 2
    expected = 2 * MODEL.layer_parameters * 1000 + 2 * MODEL.embedding_parameters + 4 * 32 * 128 * 32 * pairs
    assert StepOperations(MODEL).flops(shape) == pytest.approx(expected)


def test_experts_are_read_as_far_as_they_are_met():
    mixtral = find_model_spec("Mixtral-8x7B")
    work = StepOperations(mixtral)
    expert = 2 * mixtral.num_moe_layers * mixtral.expert_parameters
    one = work.bytes_read(decodes(1, 1)) - work.bytes_read(BatchShape())
    many = work.bytes_read(decodes(500, 1))
    kv = mixtral.kv_bytes_per_token(Precision())
    fixed = 2 * (mixtral.dense_parameters + mixtral.embedding_parameters)
    assert one == pytest.approx(fixed + 2 * expert + kv)
    assert many == pytest.approx(fixed + 8 * expert + 500 * kv)


def test_devices_share_the_work():
    shape = decodes(4, 1000)
    one, eight = StepOperations(MODEL), StepOperations(MODEL, Precision(), Parallelism(4, 2))
    assert eight.flops(shape) == pytest.approx(one.flops(shape) / 8)
    assert eight.bytes_read(shape) == pytest.approx(one.bytes_read(shape) / 8)


def test_empty_batch_is_no_work():
    assert StepOperations(MODEL).flops(BatchShape()) == 0
    assert StepOperations(MODEL).bytes_read(BatchShape()) == 0
