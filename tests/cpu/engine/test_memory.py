"""What a model needs beside what there is."""

from __future__ import annotations

import re

import pytest
import torch

from onbeat.core.errors import ConfigError
from onbeat.engine.container import FreeMemory
from onbeat.engine.device import CPU
from onbeat.engine.dtypes import FLOAT32
from onbeat.engine.memory import Footprint, KVCacheSpec, short_memory_in_words
from onbeat.engine.model_config import KVHeads

MIB = 2**20
SPEC = KVCacheSpec(heads=(KVHeads(4, 64),) * 4, dtype=FLOAT32, block_size=16)
FOOTPRINT = Footprint(
    kv_cache=SPEC,
    draft_block_bytes=0,
    weight_bytes=100 * MIB,
    load_bytes=20 * MIB,
    token_bytes=MIB // 4,
    row_bytes=MIB // 8,
)


def free(num_mib: int) -> FreeMemory:
    return FreeMemory(num_mib * MIB, "the sandbox")


def test_weights_need_room_to_be_loaded() -> None:
    FOOTPRINT.check_weights(free(300))
    with pytest.raises(ConfigError, match=r"100.*MiB.*120"):
        FOOTPRINT.check_weights(free(120))


def test_weights_that_do_not_fit_name_the_flag_with_which_they_would() -> None:
    savings = [("--quantization int8", 10 * MIB), ("--quantization int4", 50 * MIB)]
    with pytest.raises(ConfigError, match="with --quantization int4 they take 50 MiB, which fits"):
        FOOTPRINT.check_weights(free(220), savings=savings)
    with pytest.raises(
        ConfigError, match=r"even with --quantization int4 they take 50 MiB: .*--backend vllm"
    ):
        FOOTPRINT.check_weights(free(180), savings=savings)


def test_what_is_too_much_names_need_limit_and_what_fits() -> None:
    def check(num_blocks: int) -> None:
        FOOTPRINT.check_fits(free(1024), num_blocks=num_blocks, num_tokens=1024, num_rows=32)

    with pytest.raises(ConfigError) as caught:
        check(40_000)
    message = str(caught.value)
    assert re.search(r"4\.9 GiB .*\(100 MiB\).* 5\.2 GiB.* 1\.0 GiB", message)
    found = re.search(r"--kv-cache-memory-bytes (\d+)M, with a --max-model-len of at most (\d+)$", message)
    assert found is not None
    check(FOOTPRINT.num_blocks_in(int(found[1]) * MIB))
    assert 0 <= int(found[2]) - FOOTPRINT.num_blocks_in(int(found[1]) * MIB) * 16 <= 32


def test_large_steps_may_leave_no_room_at_all() -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        FOOTPRINT.check_fits(free(400), num_blocks=512, num_tokens=8192, num_rows=32)
    FOOTPRINT.check_fits(free(400), num_blocks=16, num_tokens=8192, num_rows=32)  # no step is that large


def test_memory_that_runs_out_is_said_in_words() -> None:
    with pytest.raises(ConfigError, match="memory ran out"), _in_words():
        torch.empty(2**50)
    with (
        pytest.raises(ConfigError, match="--kv-cache-memory-bytes"),
        _in_words(),
    ):
        raise MemoryError
    with pytest.raises(RuntimeError, match="something else"), _in_words():
        raise RuntimeError("something else")


def _in_words():
    return short_memory_in_words(CPU)


def test_shares_say_how_many_would_fit() -> None:
    share = FreeMemory(256 * MIB, "this machine, shared by 4 replicas,", 4)
    with pytest.raises(ConfigError, match=r"4.*256.*MiB.*2"):
        FOOTPRINT.check_fits(share, num_blocks=128, num_tokens=1024, num_rows=32)
    with pytest.raises(ConfigError, match=r"4.*1.*--replicas"):
        FOOTPRINT.check_weights(FreeMemory(90 * MIB, "this machine, shared by 4 replicas,", 4))
