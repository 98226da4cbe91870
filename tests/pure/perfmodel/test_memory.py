"""KV blocks from weights, activations and memory."""

import pytest

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.memory import kv_capacity
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import Precision

H100 = find_device("h100-sxm")
LLAMA_8B = find_model_spec("Llama-3.1-8B")
LLAMA_70B = find_model_spec("Llama-3.1-70B")
FP8 = Precision("fp8", "fp8", "fp8")


def test_the_parts_add_up():
    found = kv_capacity(LLAMA_8B, H100)
    assert found.weight_bytes == LLAMA_8B.weight_bytes(Precision())
    assert found.weight_bytes + found.activation_bytes + found.kv_bytes == pytest.approx(found.usable_bytes)
    assert found.block_bytes == 16 * LLAMA_8B.kv_bytes_per_token(Precision())
    assert found.num_blocks * found.block_bytes <= found.kv_bytes < (found.num_blocks + 1) * found.block_bytes
    # vLLM reports about 430,000 to 460,000 tokens for this model on 80 GB at 0.9.
    assert 400_000 < found.num_tokens < 480_000


def test_more_devices_hold_more_than_their_share():
    one, two = kv_capacity(LLAMA_8B, H100), kv_capacity(LLAMA_8B, H100, parallelism=Parallelism(2))
    assert two.num_tokens > 2 * one.num_tokens
    staged = kv_capacity(LLAMA_8B, H100, parallelism=Parallelism(1, 2))
    assert staged.num_tokens > 2 * one.num_tokens
    assert staged.block_bytes == one.block_bytes / 2


def test_kv_heads_are_copied_beyond_their_number():
    eight = kv_capacity(LLAMA_70B, H100, parallelism=Parallelism(8))
    sixteen = kv_capacity(LLAMA_70B, H100, parallelism=Parallelism(16))
    assert sixteen.block_bytes == eight.block_bytes


def test_narrower_formats_hold_more():
    wide = kv_capacity(LLAMA_70B, H100, parallelism=Parallelism(4))
    narrow = kv_capacity(LLAMA_70B, H100, parallelism=Parallelism(4), precision=FP8)
    assert narrow.num_tokens > 2 * wide.num_tokens


def test_more_utilisation_and_fewer_batched_tokens_leave_more():
    base = kv_capacity(LLAMA_8B, H100).num_blocks
    assert kv_capacity(LLAMA_8B, H100, gpu_memory_utilization=0.95).num_blocks > base
    assert kv_capacity(LLAMA_8B, H100, max_num_batched_tokens=16384).num_blocks < base


def test_what_does_not_fit_is_told_in_bytes():
    with pytest.raises(DoesNotFit, match=r"Llama-3.1-70B.*H100.*133.2.*GiB.*72") as caught:
        kv_capacity(LLAMA_70B, H100)
    assert "131.4 for weights" in str(caught.value)


def test_kv_for_the_longest_request_is_counted():
    most = kv_capacity(LLAMA_8B, H100).num_tokens
    assert kv_capacity(LLAMA_8B, H100, least_tokens=most).num_tokens == most
    with pytest.raises(DoesNotFit, match=f"KV of {most + 1} tokens"):
        kv_capacity(LLAMA_8B, H100, least_tokens=most + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"block_size": 0}, "block_size is 0"),
        ({"parallelism": Parallelism(3)}, "does not divide"),
        ({"parallelism": Parallelism(1, 33)}, "cannot make 33 stages"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ConfigError, match=message):
        kv_capacity(LLAMA_8B, H100, **options)


def test_degrees_below_one():
    with pytest.raises(ConfigError, match="degree is 0"):
        Parallelism(0)
