"""KV blocks from weights, activations and memory."""

from typing import Any

import pytest

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.kv_windows import KVWindows
from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.memory import held_bytes_per_token, kv_groups
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import Precision
from tests.pure.perfmodel.targets import kv_capacity

H100 = find_device("h100-sxm")
LLAMA_8B = find_model_spec("Llama-3.1-8B")
LLAMA_70B = find_model_spec("Llama-3.1-70B")
FP8 = Precision("fp8", "fp8", "fp8")


def test_the_parts_add_up():
    found = kv_capacity(LLAMA_8B, H100)
    assert found.weight_bytes == LLAMA_8B.weight_bytes(Precision())
    usable_bytes = 0.9 * H100.memory_bytes
    assert found.weight_bytes + found.activation_bytes + found.kv_bytes == pytest.approx(usable_bytes)
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


def test_windows_share_the_same_memory_out_in_groups() -> None:
    """Ten of Gemma 3's 62 layers attend to everything, half of gpt-oss', and of Mistral 7B v0.1's none."""
    for name, groups, share in (
        ("gemma-3-27b-pt", (6, 10), 70 / 62),
        ("gpt-oss-20b", (1, 12), 1),
        ("Mistral-7B-v0.1", (7, 4), 1),
        ("Llama-3.1-8B", (0, 32), 1),
        # Two head sizes: layers with a window keep half as much as others, twice as much, half, half.
        ("gemma-4-E4B", (3, 8), 32 / 28),
        ("gemma-4-26B-A4B", (9, 3), 12 / 11),
        ("gemma-4-31B", (10, 5), 1),
        ("gemma-4-E2B", (2, 6), 1),
    ):
        model = find_model_spec(name)
        assert kv_groups(model)[1:] == groups
        windows = kv_groups(model).windows(model.sliding_window, model.max_position_embeddings)
        assert windows.get("num_tables", 1) == 1 + groups[0]
        assert kv_groups(model).windows(model.sliding_window, 128) == {}, "nothing would be given back"
        held = held_bytes_per_token(model, Precision(), windows.get("num_tables", 1))
        assert held == pytest.approx(model.kv_bytes_per_token(Precision()) * share)


def test_a_request_may_be_longer_than_the_blocks_of_all_tables() -> None:
    model = find_model_spec("gpt-oss-20b")
    windows = kv_groups(model).windows(model.sliding_window, model.max_position_embeddings)
    limits: dict[str, Any] = {"num_tables": 2, "window_length": 128, "max_num_batched_tokens": 512}
    assert windows == {key: limits[key] for key in windows}
    most = kv_capacity(model, H100, **limits)
    longest = KVWindows.of(2, 128 + 512, 16).num_token_blocks(2 * most.num_blocks) * 16
    assert longest > 1.9 * most.num_tokens
    assert kv_capacity(model, H100, least_tokens=longest, **limits) == most
    with pytest.raises(DoesNotFit):
        kv_capacity(model, H100, least_tokens=longest + 48, **limits)
