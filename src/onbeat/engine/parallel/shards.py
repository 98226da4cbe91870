"""Which part of each parameter a rank of a tensor-parallel group holds.

The split of Megatron-LM (Shoeybi et al., 2019): a block's first products are split by outputs (heads,
feed-forward columns) and need no exchange; its last one is split by inputs, so that the ranks' results add up
to the whole. The output head is split by vocabulary. Norms and the embedding table are whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.weights import Checkpoint, parameter_shapes


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place in its group."""

    rank: int
    size: int
    """Ranks of the group: the degree of parallelism."""

    @property
    def is_first(self) -> bool:
        """Whether this rank samples, and talks to the scheduler."""
        return self.rank == 0


def check_degree(config: ModelConfig, size: int) -> None:
    """Check that a model can be split into so many parts.

    Raises
    ------
    ConfigError : it cannot; the message names the degrees that work.
    """
    if config.qk_norm == "all" and size > 1:
        raise ConfigError(
            f"{config.architecture} cannot be split among {size} ranks: its norms of queries and keys "
            "span all heads; leave --tensor-parallel-size out"
        )
    counts = {"query heads": config.num_heads, "feed-forward columns": config.intermediate_size}
    if config.experts is not None:
        counts["columns of an expert"] = config.experts.intermediate_size
    odd = [f"{count} {what}" for what, count in counts.items() if count % size]
    if odd:
        common = math.gcd(*counts.values())
        degrees = ", ".join(str(degree) for degree in range(1, common + 1) if common % degree == 0)
        raise ConfigError(
            f"a tensor-parallel size of {size} does not divide this model's {' and '.join(odd)}; "
            f"sizes that do: {degrees}"
        )


def kv_heads_of(config: ModelConfig, shard: Shard) -> tuple[int, ...]:
    """Return which of the model's KV heads a rank holds, in the order of its query heads.

    Attention wants the same number of query heads for each KV head. Where a rank's query heads do not cover
    KV heads evenly (always so with more ranks than KV heads), KV heads are held by several ranks, or by
    one rank several times.
    """
    queries_per_rank = config.num_heads // shard.size
    queries_per_kv_head = config.num_heads // config.num_kv_heads
    step = math.gcd(queries_per_rank, queries_per_kv_head)
    first = shard.rank * queries_per_rank
    return tuple(query // queries_per_kv_head for query in range(first, first + queries_per_rank, step))


def config_of_rank(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the model as a rank sees it: fewer heads and feed-forward columns, everything else the same."""
    experts = config.experts
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=len(kv_heads_of(config, shard)),
        intermediate_size=config.intermediate_size // shard.size,
        experts=None
        if experts is None
        else replace(experts, intermediate_size=experts.intermediate_size // shard.size),
    )


def vocabulary_rows(vocab_size: int, shard: Shard) -> slice:
    """Return the tokens whose logits a rank computes; the last ranks may have fewer than the others."""
    width = -(-vocab_size // shard.size)
    start = min(shard.rank * width, vocab_size)
    return slice(start, min(start + width, vocab_size))


class ShardedCheckpoint:
    """A rank's parts of a checkpoint, which look like the checkpoint of a smaller model.

    Only `lm_head.weight` differs from that: it has the rows of `vocabulary_rows`.

    Parameters
    ----------
    checkpoint : the whole model's.
    shard : the rank; its size must divide the model (`check_degree`).
    """

    def __init__(self, checkpoint: Checkpoint, shard: Shard) -> None:
        self._checkpoint = checkpoint
        self._shard = shard
        self._whole = checkpoint.config
        self.config = config_of_rank(self._whole, shard)
        """The model as this rank sees it."""
        self._kv_heads = np.array(kv_heads_of(self._whole, shard))

    def names(self) -> Iterable[str]:
        """Return the parameters' names."""
        return parameter_shapes(self.config).keys()

    def get(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return this rank's part of a parameter; see `Checkpoint.get`."""
        whole = self._checkpoint.get(name, dtype)
        module, kind = name.split(".")[-2:]
        match module, kind:
            case (("q_proj" | "gate_proj" | "up_proj"), _):
                return self._nth_part(whole, 0)
            case (("k_proj" | "v_proj"), _):
                heads = whole.reshape(self._whole.num_kv_heads, self._whole.head_dim, *whole.shape[1:])
                return heads.take(self._kv_heads, 0).reshape(-1, *whole.shape[1:])
            case (("o_proj" | "down_proj"), "weight"):
                return self._nth_part(whole, 1)
            case (("o_proj" | "down_proj"), _):
                # The ranks' results are added up, and the bias must be in the sum once.
                return whole if self._shard.is_first else np.zeros_like(whole)
            case "lm_head", _:
                return whole[vocabulary_rows(self._whole.vocab_size, self._shard)].copy()
            case _:
                return whole

    def _nth_part(self, whole: NDArray[Any], axis: int) -> NDArray[Any]:
        """Return a copy, so that the whole array's memory can go."""
        part: NDArray[Any] = np.split(whole, self._shard.size, axis)[self._shard.rank].copy()
        return part
