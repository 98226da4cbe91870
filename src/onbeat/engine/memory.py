"""The memory that a model and its paged KV cache need, and whether there is as much."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.kv_windows import KVWindows
from onbeat.engine.container import FreeMemory
from onbeat.engine.device import Device, free_memory
from onbeat.engine.engine_config import MemoryShare
from onbeat.engine.model_config.architecture import KVHeads, ModelConfig
from onbeat.engine.weights.parameters import parameter_shapes
from onbeat.scheduler.replica.token_budget import LARGEST_BUDGET
from onbeat.scheduler.scheduler_config import SchedulerLimits

BLOCK_SIZE_MULTIPLE = 16
_DEFAULT_SHARE = 0.25
"""Share of the free memory that the KV cache takes where the user gives no size."""
_DEFAULT_LIMIT_BYTES = 4 * 2**30
"""But no more than this."""
USUAL_TOKENS = 4096
"""Of a request that the KV cache holds where the user gives neither size nor length, and memory permits."""


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

    heads: tuple[KVHeads, ...]
    """Of each layer that keeps keys and values."""
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
        multiple = head_dim_multiple
        return cls(
            heads=tuple(KVHeads(num, -(-width // multiple) * multiple) for num, width in config.kept_heads),
            dtype=dtype,
            block_size=block_size,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        numbers = sum(num * width for num, width in self.heads)
        return 2 * numbers * self.block_size * self.dtype.itemsize


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


_START_BYTES = 160 * 2**20
"""What the engine takes while it starts, then gives back: most of it an array that no cache holds."""
_FLOAT_BYTES = 4


def most_tokens(limits: SchedulerLimits) -> int:
    """Return the tokens of the largest step, before a budget is chosen."""
    given = limits.max_num_batched_tokens
    return given if isinstance(given, int) else LARGEST_BUDGET


_SIGNS_OF_SHORT_MEMORY = ("can't allocate memory", "out of memory", "can't start new thread")
"""In what torch and Python say; NumPy raises `MemoryError`."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that a model takes, and the one that proposes drafts for it."""

    kv_cache: KVCacheSpec
    """Of the model itself."""
    draft_block_bytes: int
    """What the other keeps beside each KV block."""
    weight_bytes: int
    """Of both."""
    load_bytes: int
    """What loading takes for a while: the largest tensor that is read whole, once more."""
    token_bytes: int
    """What a step keeps of each token while it computes, about."""
    row_bytes: int
    """Of each row that samples, about."""
    state_bytes: int = 0
    """What layers that keep a state have of each request, however long it is."""
    draft_state_bytes: int = 0
    """What they have beside it for each draft of a step."""

    @classmethod
    def of(
        cls, config: ModelConfig, kv_cache: KVCacheSpec, weight_bytes: int, in_pieces: Collection[str] = ()
    ) -> Footprint:
        """Return what a model takes whose KV cache and weights take so much.

        Parameters
        ----------
        in_pieces : parameters of which loading holds a few rows at once.
        """
        shapes = parameter_shapes(config)
        largest = max(math.prod(shapes[name]) for name in shapes if name not in in_pieces)
        heads = max((config.num_heads + 2 * num) * width for num, width in config.kept_heads)
        heads += config.gate_width
        if config.linear is not None:
            heads = max(heads, config.linear.conv_size + config.linear.value_size)
        experts = config.experts
        # What an expert's rows are is kept for all experts of a token at once.
        width = 0 if experts is None else experts.num_per_token * experts.intermediate_size
        numbers = 3 * config.hidden_size + 2 * heads + 2 * max(config.mlp_size(config.num_layers - 1), width)
        numbers += 3 * config.num_layers * config.layer_input_size
        return cls(
            kv_cache=kv_cache,
            draft_block_bytes=0,
            weight_bytes=weight_bytes,
            load_bytes=largest * _FLOAT_BYTES,
            token_bytes=numbers * _FLOAT_BYTES,
            row_bytes=2 * config.vocab_size * _FLOAT_BYTES,  # logits and probabilities
            state_bytes=config.state_numbers * _FLOAT_BYTES,
            draft_state_bytes=config.draft_numbers * _FLOAT_BYTES,
        )

    def with_drafts(self, most_drafts: int) -> Footprint:
        """Return what it takes where requests have so many drafts in a step."""
        return replace(self, state_bytes=self.state_bytes + most_drafts * self.draft_state_bytes)

    def beside(self, draft: Footprint) -> Footprint:
        """Return what both models take, of which the other proposes drafts for this one."""
        return replace(
            self,
            draft_block_bytes=draft.block_bytes,
            weight_bytes=self.weight_bytes + draft.weight_bytes,
            state_bytes=self.state_bytes + draft.state_bytes,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block, the draft model's included."""
        return self.kv_cache.block_bytes + self.draft_block_bytes

    def num_blocks_in(self, budget_bytes: int) -> int:
        """Return how many blocks fit in a budget, what a draft model keeps beside them included.

        Raises
        ------
        ConfigError : not even one does.
        """
        return num_blocks_in(budget_bytes, self.block_bytes, self.kv_cache.block_size)

    def most_states(self, budget_bytes: int) -> int:
        """Return of how many requests half of a budget holds the states; the other half is for KV blocks.

        Raises
        ------
        ConfigError : not even of one.
        """
        most = budget_bytes // 2 // self.state_bytes
        if most < 1:
            raise ConfigError(
                f"the model keeps a state of {_size(self.state_bytes)} of each request, and of "
                f"{_size(budget_bytes)} of KV cache half may hold states; give at least "
                f"--kv-cache-memory-bytes {flag_size(2, self.state_bytes)}"
            )
        return most

    def step_bytes(self, limits: SchedulerLimits) -> int:
        """Return about what the largest steps take, before it is known how many tokens these have."""
        return self._work_bytes(most_tokens(limits), limits.max_num_seqs)

    def kv_bytes_of(self, num_tokens: int, limits: SchedulerLimits, windows: Mapping[str, int]) -> int:
        """Return a KV cache that holds a request of so many tokens, and a block more for drafts.

        Parameters
        ----------
        windows : see `KVGroups.windows`; `block_bytes` are of blocks of all tables.
        """
        block_size, num_tables = self.kv_cache.block_size, windows.get("num_tables", 1)
        num_seen = windows.get("window_length", 0) + most_tokens(limits)
        held = KVWindows.of(num_tables, num_seen, block_size).num_blocks(num_tokens // block_size + 2)
        return -(-held // num_tables) * self.block_bytes

    def most_kv_bytes(self, spare_bytes: int, limits: SchedulerLimits) -> int:
        """Return the largest KV cache that goes with the largest steps: these have no more tokens than it.

        Parameters
        ----------
        spare_bytes : that the weights leave.
        """
        slot_bytes = self.block_bytes / self.kv_cache.block_size
        beside_rows = spare_bytes - limits.max_num_seqs * self.row_bytes
        num_slots = min(int(beside_rows / (slot_bytes + self.token_bytes)), most_tokens(limits))
        few = min(int(num_slots * slot_bytes), spare_bytes - self._work_bytes(0, 0))
        return max(few, spare_bytes - self.step_bytes(limits))

    def check_weights(
        self, free: FreeMemory, *, kv_cache_bytes: int = 0, savings: Iterable[tuple[str, int]] = ()
    ) -> None:
        """Check that the weights fit.

        Parameters
        ----------
        kv_cache_bytes : that are asked for beside them; they count where it is said how many replicas fit.
        savings : flags with which they would take less, and by how much; the least first.

        Raises
        ------
        ConfigError : they do not.
        """
        work = self._work_bytes(0, 0)
        if self.weight_bytes + work >= free.num_bytes:
            fitting = free.replicas_that_fit(self.weight_bytes + work + kv_cache_bytes)
            cure = "use a smaller model, dtype or quantization, or give onbeat more memory"
            for flag, saved in savings:
                size = _size(self.weight_bytes - saved)
                if self.weight_bytes - saved + work < free.num_bytes:
                    cure = f"with {flag} they take {size}, which fits"
                    break
                cure = f"even with {flag} they take {size}: give onbeat more memory, or GPUs (--backend vllm)"
            raise ConfigError(
                f"the weights take {_size(self.weight_bytes)}, and loading them {_size(work)} more, but "
                f"{free.limit} leaves {_size(free.num_bytes)}; {cure}{fitting}"
            )

    def check_fits(self, free: FreeMemory, *, num_blocks: int, num_tokens: int, num_rows: int) -> None:
        """Check that all fits: weights, KV cache, and what steps compute in.

        Parameters
        ----------
        free : what there is.
        num_blocks : of the KV cache.
        num_tokens, num_rows : most tokens and requests of a step.

        Raises
        ------
        ConfigError : it does not; the message says what is needed, what there is and what would fit.
        """
        num_slots = num_blocks * self.kv_cache.block_size
        work = self._work_bytes(min(num_tokens, num_slots), min(num_rows, num_slots))
        kv_bytes = num_blocks * self.block_bytes
        if self.weight_bytes + kv_bytes + work <= free.num_bytes:
            return
        problem = (
            f"a KV cache of {_size(kv_bytes)} does not fit beside the weights ({_size(self.weight_bytes)}) "
            f"and what loading and steps of up to {num_tokens} tokens need ({_size(work)}): that is "
            f"{_size(self.weight_bytes + kv_bytes + work)}, but {free.limit} leaves {_size(free.num_bytes)}"
        )
        left = free.num_bytes - self.weight_bytes - self._work_bytes(num_tokens, num_rows)
        fitting_blocks = min(left // self.block_bytes, num_blocks)
        if fitting_blocks < 1:
            raise ConfigError(
                f"{problem}; no KV cache would fit: lower --max-num-batched-tokens, use a smaller model, "
                "dtype or quantization, or give onbeat more memory"
                f"{free.replicas_that_fit(self.weight_bytes + kv_bytes + work)}"
            )
        fitting = flag_size(fitting_blocks, self.block_bytes)
        raise ConfigError(
            f"{problem}; what fits is --kv-cache-memory-bytes {fitting}, "
            f"with a --max-model-len of at most {fitting_blocks * self.kv_cache.block_size}"
            f"{free.replicas_that_fit(self.weight_bytes + kv_bytes + work)}"
        )

    def _work_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Return what loading the model or the largest step takes, whichever is more."""
        step = num_tokens * self.token_bytes + num_rows * self.row_bytes
        return max(_START_BYTES, self.load_bytes, step)


def free_for(share: MemoryShare | None, device: Device) -> FreeMemory:
    """Return how much memory an engine may take: what is free, or its share of that."""
    free = free_memory(device)
    if share is None or device.type != "cpu":
        return free
    own = FreeMemory(
        share.total_bytes // share.num_shares,
        f"this machine, shared by {share.num_shares} replicas,",
        share.num_shares,
    )
    return min(own, free)


def is_short_memory(error: Exception) -> bool:
    """Return whether an allocator or the start of a thread failed for want of memory."""
    text = str(error).partition("\n")[0]
    return isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS_OF_SHORT_MEMORY)


@contextmanager
def short_memory_in_words(device: Device) -> Iterator[None]:
    """Turn what allocators and thread starts raise into words, for a footprint is an estimate.

    Raises
    ------
    ConfigError : memory ran out inside the block.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_short_memory(error):
            raise
        text, free = str(error).partition("\n")[0], free_memory(device)
        raise ConfigError(
            f"memory ran out while the engine started ({text or type(error).__name__}): {free.limit} leaves "
            f"{_size(free.num_bytes)}; give onbeat more memory, or a smaller --kv-cache-memory-bytes, model, "
            "dtype or number of --threads"
        ) from error


def flag_size(num_blocks: int, block_bytes: int) -> str:
    """Return the size of KV blocks as a flag takes it: in whole MiB, where these hold a block."""
    num_bytes = num_blocks * block_bytes
    whole = num_bytes >> 20
    return f"{whole}M" if whole << 20 >= block_bytes else str(num_bytes)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
