"""Paged attention with PyTorch's scaled dot product attention: the reference of every other backend.

Keys and values of a group of rows are gathered block by block and attended to in one call. The query heads
that share a KV head are folded into the query dimension, so that keys and values are never repeated.

Legend: T tokens of the step, R rows of a group, L query tokens of a row (padded), N query heads, K KV heads,
G query heads per KV head, H head width, B blocks per row (padded), S tokens of a block, C keys of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from onbeat.engine.attention.base import AttentionBatch, IntArray
from onbeat.engine.attention.sdpa_plan import FoldedGroup, LongChunk, PlanConfig, SdpaPlan, WindowPlanner
from onbeat.engine.kv_cache import LayerKVCache
from onbeat.engine.model_config import ModelConfig

# One more group costs about 60 us a layer: the time to read about this many keys of one KV head.
GROUP_COST_KEYS = 2048


class TorchSdpaBackend:
    """Reference attention backend, for any device and floating type of torch.

    Parameters
    ----------
    config : the model; gives heads, scale and each layer's sliding window.
    layers : the KV cache of each layer.
    """

    name = "torch"

    def __init__(self, config: ModelConfig, layers: Sequence[LayerKVCache]) -> None:
        block_size = layers[0].k_BSKH.shape[1]
        self.layers = layers
        self.scale = config.attention_scale
        self.windows = [config.layer_window(index) for index in range(config.num_layers)]
        self.num_kv_heads = config.num_kv_heads
        self.plan_config = PlanConfig(
            block_size=block_size,
            num_query_groups=config.num_heads // config.num_kv_heads,
            group_cost_blocks=max(GROUP_COST_KEYS // (config.num_kv_heads * block_size), 1),
            dtype=layers[0].k_BSKH.dtype,
            device=layers[0].k_BSKH.device,
        )

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        """Group the rows and build the masks, once for all layers of the same window."""
        return SdpaPlan(
            torch.from_numpy(batch.slot_mapping_T).to(self.plan_config.device),
            {
                window: WindowPlanner(self.plan_config, batch, window).plan()
                for window in dict.fromkeys(self.windows)
            },
        )

    def run(
        self, layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, metadata: SdpaPlan
    ) -> Tensor:
        """Store keys and values, then attend group by group; returns [T, N, H]."""
        cache = self.layers[layer_index]
        cache.k_BSKH.flatten(0, 1).index_copy_(0, metadata.slot_mapping_T, k_TKH)
        cache.v_BSKH.flatten(0, 1).index_copy_(0, metadata.slot_mapping_T, v_TKH)
        plan = metadata.windows[self.windows[layer_index]]
        num_tokens = q_TNH.shape[0]
        out_TNH = q_TNH.new_empty(num_tokens + 1, *q_TNH.shape[1:])
        for group in plan.folded:
            mixed_TNH = self._attend_folded(group, q_TNH, cache)
            if group.target_tokens is None:
                return mixed_TNH
            out_TNH.index_copy_(0, group.target_tokens, mixed_TNH)
        for chunk in plan.chunks:
            self._attend_chunk(chunk, q_TNH, cache, out_TNH)
        return out_TNH[:num_tokens]

    def scrub(self, block_ids: IntArray) -> None:
        """Replace what is not finite in some blocks by 0."""
        ids = torch.from_numpy(block_ids).to(self.plan_config.device)
        for cache in self.layers:
            for part in cache:
                part.index_copy_(0, ids, part.index_select(0, ids).nan_to_num_(0.0, 0.0, 0.0))

    def _attend_folded(self, group: FoldedGroup, q_TNH: Tensor, cache: LayerKVCache) -> Tensor:
        if group.source_tokens is not None:
            q_TNH = q_TNH.index_select(0, group.source_tokens)
        num_heads, head_dim = q_TNH.shape[1:]
        keys_shape = (group.num_rows, -1, self.num_kv_heads, head_dim)
        k_RCKH, v_RCKH = (
            part.index_select(0, group.block_ids).view(keys_shape)[:, : group.num_keys] for part in cache
        )
        q_RLKGH = q_TNH.reshape(
            group.num_rows, -1, self.num_kv_heads, num_heads // self.num_kv_heads, head_dim
        )
        q_RKLGH = q_RLKGH.transpose(1, 2)
        mixed_RKQH = scaled_dot_product_attention(
            q_RKLGH.flatten(2, 3),
            k_RCKH.transpose(1, 2),
            v_RCKH.transpose(1, 2),
            attn_mask=group.mask,
            scale=self.scale,
        )
        return mixed_RKQH.view(q_RKLGH.shape).transpose(1, 2).reshape(-1, num_heads, head_dim)

    def _attend_chunk(self, chunk: LongChunk, q_TNH: Tensor, cache: LayerKVCache, out_TNH: Tensor) -> None:
        num_groups = q_TNH.shape[1] // self.num_kv_heads
        # The query heads of a KV head are the batch dimension here: keys and values repeat with stride 0, and
        # the mask is not repeated either.
        k_GKCH, v_GKCH = (
            part.index_select(0, chunk.block_ids).flatten(0, 1).transpose(0, 1).expand(num_groups, -1, -1, -1)
            for part in cache
        )
        q_GKTH, out_GKTH = (
            part.view(part.shape[0], self.num_kv_heads, num_groups, -1).permute(2, 1, 0, 3)
            for part in (q_TNH, out_TNH)
        )
        for tile in chunk.tiles:
            out_GKTH[:, :, tile.start : tile.end] = scaled_dot_product_attention(
                q_GKTH[:, :, tile.start : tile.end],
                k_GKCH[:, :, tile.first_key : tile.end_key],
                v_GKCH[:, :, tile.first_key : tile.end_key],
                attn_mask=tile.mask,
                is_causal=tile.mask is None,
                scale=self.scale,
            )
