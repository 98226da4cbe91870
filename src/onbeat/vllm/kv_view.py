"""vLLM's KV blocks, as our plans see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.vllm.surface import EngineRequest, Surface


class VLLMKVView:
    """A `KVView`, and its own `PoolView`, over vLLM's `KVCacheManager`.

    A model with several groups of layers has as many block tables for each request, whose blocks come from
    one pool. A block here is one of each. Layers with a sliding window give blocks back, so that there is
    more room then than is counted: what would never fit is counted as vLLM does, window by window.

    vLLM gives a prompt its blocks chunk by chunk. Here an admitted prompt has them all: what it will take
    still (`promised`) is not free.

    Parameters
    ----------
    requests : id -> vLLM's requests that onbeat knows.

    Attributes
    ----------
    promised : blocks that running prompts have yet to be given.
    has_prefix_cache : whether vLLM looks for prompts in it.

    Raises
    ------
    ConfigError : groups with different block sizes, or drafts that do not fit into a block.
    """

    def __init__(self, surface: Surface, requests: dict[str, EngineRequest]) -> None:
        self._manager = manager = surface.scheduler.kv_cache_manager
        self._blocks = manager.block_pool
        self.has_prefix_cache = bool(getattr(manager, "enable_caching", False))
        self._requests = requests
        groups = list(manager.coordinator.single_type_managers)
        sizes = {int(group.block_size) for group in groups}
        if len(sizes) != 1:
            found = ", ".join(str(size) for size in sorted(sizes)) or "none"
            raise ConfigError(
                f"the model's layers have KV blocks of different sizes ({found} tokens), which onbeat cannot "
                "count yet (Mamba beside attention, say); start vLLM without --scheduler-cls"
            )
        (self.block_size,) = sizes
        self._num_groups = len(groups)
        full = [group for group in groups if type(group).__name__ == "FullAttentionManager"]
        self._main = (full or groups)[0]
        self._place = groups.index(self._main)
        self.num_blocks = (int(self._blocks.num_gpu_blocks) - 1) // self._num_groups
        watermark = int(getattr(manager, "watermark_blocks", 0)) // self._num_groups
        self._watermark = max(0, watermark - self.num_blocks // 100)
        """What vLLM keeps free beyond the watermark that plans keep."""
        self._most = self.num_blocks - self.num_blocks // 100 - self._watermark
        """Of one request, beside others."""
        self._caps = [_cap(group) for group in groups]
        self._num_beyond = surface.num_drafts + surface.num_lookahead
        if self._num_beyond > self.block_size:
            raise ConfigError(
                f"{self._num_beyond} draft tokens do not fit into a KV block of {self.block_size}; use fewer "
                "(num_speculative_tokens) or a larger --block-size"
            )
        self.promised = 0

    @property
    def pool(self) -> VLLMKVView:
        return self

    @property
    def num_free_blocks(self) -> int:
        free = int(self._blocks.get_num_free_blocks()) // self._num_groups
        return max(0, free - self.promised - self._watermark)

    def num_blocks_for(self, num_tokens: int) -> int:
        num = -(-num_tokens // self.block_size)
        return num if num <= self._most else self._within_windows(num)

    def _within_windows(self, num_blocks: int) -> int:
        """Return what a request with so many blocks of full attention holds of all groups."""
        return math.ceil(sum([min(num_blocks, cap) for cap in self._caps]) / self._num_groups)

    def match(self, state: RequestState) -> list[int]:
        request = self._requests[state.request_id]
        if getattr(request, "kv_cache_report_mode", None) == "full" and self._manager.enable_kv_cache_events:
            return []  # to look would publish the blocks a second time
        found, num_tokens, *_ = self._manager.get_computed_blocks(request)
        blocks = found.blocks[self._place][: num_tokens // self.block_size]
        return [block.block_id for block in blocks]

    @contextmanager
    def holding(self, requests: Iterable[EngineRequest]) -> Iterator[None]:
        """Keep what the cache has of these requests from being evicted for others."""
        held: list[Any] = []
        for request in requests:
            found, num_tokens, *_ = self._manager.get_computed_blocks(request)
            if num_tokens:
                held += [block for group in found.blocks for block in group if not block.is_null]
        self._blocks.touch(held)
        try:
            yield
        finally:
            self._blocks.free_blocks(reversed(held))

    def num_idle(self, block_ids: Iterable[int]) -> int:
        blocks = self._blocks.blocks
        return sum([blocks[block_id].ref_cnt == 0 for block_id in block_ids])

    def exclusive_ids(self, block_ids: Iterable[Any]) -> list[int]:
        return [block.block_id for block in block_ids if block.ref_cnt == 1 and not block.is_null]

    def follow(self, state: RequestState, num_uncertain: int = 0) -> None:
        """Let a running request hold what vLLM has given it, and be promised what its prompt lacks.

        Parameters
        ----------
        num_uncertain : tokens in flight that may be rejected, for which it has slots.
        """
        state.block_ids = blocks = self._main.req_to_blocks.get(state.request_id) or []
        num_blocks = len(blocks)
        if state.num_tokens + state.num_in_flight_tokens - state.num_computed_tokens > 1:
            num_in_all = max(-(-state.num_tokens // self.block_size), num_blocks)
            missing = num_in_all - num_blocks
            if num_in_all > self._most:
                missing = self._within_windows(num_in_all) - self._within_windows(num_blocks)
            self.promised += missing
            num_blocks = num_in_all
        state.num_allocated_tokens = num_blocks * self.block_size - self._num_beyond - num_uncertain


def _cap(group: Any) -> float:
    """Return the blocks that one request holds at most in a group of layers; the first name is of 0.31 on."""
    names = ("max_admission_blocks_per_request", "_max_admission_blocks_per_request")
    return next((cap for name in names if (cap := getattr(group, name, None)) is not None), math.inf)
