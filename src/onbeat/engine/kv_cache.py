"""How many bytes the paged KV cache takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.engine.model_config import ModelConfig

BLOCK_SIZE_MULTIPLE = 16
_DEFAULT_SHARE = 0.25
"""Share of the free memory that the KV cache takes where the user gives no size."""
_DEFAULT_LIMIT_BYTES = 4 * 2**30
"""But no more than this."""


def modest_kv_bytes(spare_bytes: int) -> int:
    """Return the size of a KV cache in memory that others want, too, where the user gives none."""
    return min(int(spare_bytes * _DEFAULT_SHARE), _DEFAULT_LIMIT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Size of one block, tokens and bytes.

    Raises
    ------
    ConfigError : a block size that is no positive multiple of 16.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.block_size % BLOCK_SIZE_MULTIPLE:
            raise ConfigError(
                f"the block size is {self.block_size} tokens; it must be a multiple of {BLOCK_SIZE_MULTIPLE}"
            )

    @classmethod
    def of_model(
        cls, config: ModelConfig, *, dtype: np.dtype[Any], block_size: int, head_dim_multiple: int = 1
    ) -> KVCacheSpec:
        """Return the cache shape of a model; heads may be padded to a multiple of some width."""
        return cls(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=-(-config.head_dim // head_dim_multiple) * head_dim_multiple,
            dtype=dtype,
            block_size=block_size,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def num_blocks_in(budget_bytes: int, block_bytes: int, block_size: int) -> int:
    """Return how many whole blocks fit in a budget.

    Raises
    ------
    ConfigError : not even one does.
    """
    num_blocks = budget_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{budget_bytes} bytes of KV cache hold no block: one of {block_size} tokens takes "
            f"{block_bytes} bytes; give the KV cache more memory"
        )
    return num_blocks
