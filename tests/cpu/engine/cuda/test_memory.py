"""The KV cache gets what is left of a GPU's memory."""

from __future__ import annotations

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.engine.cuda.memory import MeasuredMemory, largest_steps
from onbeat.scheduler.config import SchedulerConfig

GIB = 2**30
MEASURED = MeasuredMemory(total=80 * GIB, used=16 * GIB, step=GIB, num_graphs=13)
BLOCK_BYTES = 2 << 20


def num_blocks(measured: MeasuredMemory = MEASURED, other_bytes: int = 0, wanted: int | None = None) -> int:
    return measured.num_blocks(0.9, block_bytes=BLOCK_BYTES, other_bytes=other_bytes, wanted=wanted)


def test_the_kv_cache_takes_the_share_that_nothing_else_needs() -> None:
    rest = 0.9 * 80 * GIB - 17 * GIB
    assert rest - GIB < num_blocks() * BLOCK_BYTES < rest - 256 * 2**20
    assert num_blocks() - num_blocks(other_bytes=GIB) == 512
    assert num_blocks(wanted=100) == 100


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    full = MeasuredMemory(total=80 * GIB, used=71 * GIB, step=GIB, num_graphs=0)
    with pytest.raises(ConfigError, match=r"80.0 GiB, 71.0 GiB are taken .* leaves no room for a KV cache"):
        num_blocks(full)
    with pytest.raises(
        ConfigError, match=r"54\.\d GiB for the KV cache, but 78.1 GiB are asked for"
    ) as caught:
        num_blocks(wanted=40_000)
    fitting = int(str(caught.value).rsplit(" ", 1)[1].removesuffix("M"))
    assert num_blocks(wanted=(fitting << 20) // BLOCK_BYTES) > 0


@pytest.mark.parametrize(("max_model_len", "lens"), [(400, [400, 400, 200]), (4000, [1000])])
def test_the_largest_steps_are_a_full_chunk_and_all_rows(max_model_len: int, lens: list[int]) -> None:
    limits = SchedulerConfig(
        policy="sarathi",
        num_blocks=4096,
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=1000,
    )
    chunks, decodes = largest_steps(limits)
    assert chunks.attention.query_lens_R.tolist() == lens
    assert len(np.unique(chunks.attention.slot_mapping_T)) == 1000
    assert decodes.attention.query_lens_R.tolist() == [1] * 8
    assert len(np.unique(decodes.attention.slot_mapping_T)) == 8
