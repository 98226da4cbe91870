"""The KV cache in torch's memory, as the reference engine and the GPU engine have it.

Legend: B blocks, S tokens of a block, K KV heads, H head width.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onbeat.core.errors import ConfigError
from onbeat.engine.kv_access import KVRegion
from onbeat.engine.memory import KVCacheSpec
from onbeat.engine.model_config.architecture import KVHeads
from onbeat.engine.torch.types import FP8, torch_dtype

_SCRUBBED_TOGETHER = 256
"""Blocks: 8 MiB of an 8B model's layer, where a long request's would take as much as a large step."""


class LayerKVCache(NamedTuple):
    """Keys and values of one layer.

    A KV head's part of a block is contiguous, so that gathering (block, head) pairs gives each head's keys of
    a request in one piece, which is what matrix products want.
    """

    k_BKSH: Tensor
    v_BKSH: Tensor


def allocate_kv(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> list[LayerKVCache]:
    """Return the zeroed cache of every layer that has one.

    Zeroed, because slots that were never written are read (and masked) as part of a block, and masking
    does not survive a NaN.
    """
    dtype = torch_dtype(spec.dtype)
    return [
        LayerKVCache(
            *(allocate_zeroed((num_blocks, num, spec.block_size, width), dtype, device) for _ in range(2))
        )
        for num, width in spec.heads
    ]


def allocate_pool(
    spec: KVCacheSpec, num_blocks: int, device: torch.device, kinds: Iterable[KVHeads]
) -> Tensor:
    """Return zeroed blocks that layers of several block tables have in turns, [B, numbers of a block].

    Parameters
    ----------
    spec : of the layers of the fullest block table.
    kinds : heads of any layer; a block has room for a whole number of its keys or values.
    """
    unit = math.lcm(*map(math.prod, kinds)) * spec.block_size
    numbers = -(-spec.block_bytes // spec.dtype.itemsize // unit) * unit
    return allocate_zeroed((num_blocks, numbers), torch_dtype(spec.dtype), device)


def layer_of_pool(pool: Tensor, heads: KVHeads, number: int, block_size: int) -> LayerKVCache:
    """Return the part of a pool that a layer has, as so many blocks as its heads are in one of the pool's.

    The first of a pool's block i is block i * that number.

    Parameters
    ----------
    number : of the layer among those of its block table.
    """
    parts = pool.view(-1, heads.num, block_size, heads.width)
    return LayerKVCache(parts[2 * number :], parts[2 * number + 1 :])


def allocate_zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros whose memory is taken only as it is written, where the system can do that.

    On a CPU the system's zero pages serve (NumPy's `zeros`); torch would write every byte at once, which for
    a KV cache of gigabytes costs seconds at start and memory that may never be needed.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


@torch.inference_mode()
def scrub(layers: Iterable[Sequence[Tensor]], block_ids: Tensor) -> None:
    """Replace what is not finite in some blocks by 0; few at a time, for memory may be short."""
    for few in torch.split(block_ids, _SCRUBBED_TOGETHER):
        for part in chain.from_iterable(layers):
            if part.dtype == FP8:
                codes = part.view(torch.uint8)
                some = codes.index_select(0, few)
                codes.index_copy_(0, few, some.masked_fill_(some & 0x7F == 0x7F, 0))  # NaN; there is no other
            else:
                part.index_copy_(0, few, part.index_select(0, few).nan_to_num_(0.0, 0.0, 0.0))


def region_of(blocks: Tensor) -> KVRegion:
    """Return the memory of a tensor whose first dimension is that of the blocks.

    Raises
    ------
    ConfigError : it is not in host memory.
    """
    if blocks.device.type != "cpu":
        raise ConfigError(
            f"KV on {blocks.device} cannot be handed to another engine yet; run the replicas on CPUs, or "
            "without hand-over"
        )
    assert blocks.is_contiguous()
    return KVRegion(blocks.data_ptr(), blocks[0].numel() * blocks.element_size())
