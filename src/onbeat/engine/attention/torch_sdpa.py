"""Paged attention with PyTorch's scaled dot product attention: the reference of every other.

Keys and values of a group of rows are gathered block by block and attended to in one call. The query heads
that share a KV head are folded into the query dimension, so that keys and values are never repeated.

Legend: T tokens of the step, R rows of a group, L query tokens of a row (padded), N query heads, K KV heads,
G query heads per KV head, H head width, B blocks per row (padded), S tokens of a block, C keys of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from onbeat.engine.attention.base import AttentionBatch, IntArray
from onbeat.engine.attention.sdpa_metadata import (
    FoldedGroup,
    LongChunk,
    SdpaMetadata,
    SdpaSizes,
    WindowGrouping,
)
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.torch_kv import LayerKVCache

# One more group costs about 60 us a layer: the time to read about this many keys of one KV head.
GROUP_COST_KEYS = 2048


class GatherSource(NamedTuple):
    """A layer's cache, and the memory that gathered parts of it go to."""

    cache: LayerKVCache
    workspace: tuple[Tensor, Tensor]


class TorchAttention:
    """Reference attention, for any device and floating type of torch; it owns the KV cache's layout.

    Parameters
    ----------
    config : the model; gives heads, scale and each layer's sliding window.
    layers : the KV cache of each layer.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[LayerKVCache]) -> None:
        block_size = layers[0].k_BKSH.shape[2]
        self.layers = layers
        self.scale = config.attention_scale
        self.windows = [config.layer_window(index) for index in range(config.num_layers)]
        self.num_kv_heads = config.num_kv_heads
        self.prefers_products = (
            layers[0].k_BKSH.device.type == "cpu" and layers[0].k_BKSH.dtype == torch.bfloat16
        )
        self.sizes = SdpaSizes(
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            num_query_groups=config.num_heads // config.num_kv_heads,
            group_cost_blocks=max(GROUP_COST_KEYS // (config.num_kv_heads * block_size), 1),
            # The CPU's kernels take float32 masks for bfloat16; those of other devices want the same type.
            mask_dtype=torch.float32 if self.prefers_products else layers[0].k_BKSH.dtype,
            device=layers[0].k_BKSH.device,
        )

    def prepare(self, batch: AttentionBatch) -> SdpaMetadata:
        """Group the rows and build the masks, once for all layers of the same window."""
        blocks_T, offsets_T = np.divmod(batch.slot_mapping_T, self.sizes.block_size)
        windows = {
            window: WindowGrouping(self.sizes, batch, window).metadata()
            for window in dict.fromkeys(self.windows)
        }
        cache_BKSH = self.layers[0].k_BKSH
        max_pieces = max(metadata.max_pieces for metadata in windows.values())
        workspace_PSH = cache_BKSH.new_empty(2, max_pieces, *cache_BKSH.shape[2:])
        return SdpaMetadata(
            torch.from_numpy(blocks_T).to(self.sizes.device),
            torch.from_numpy(offsets_T).to(self.sizes.device),
            windows,
            (workspace_PSH[0], workspace_PSH[1]),
        )

    def run(
        self, layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, metadata: SdpaMetadata
    ) -> Tensor:
        """Store keys and values, then attend group by group; returns [T, N, H]."""
        cache = self.layers[layer_index]
        where = (metadata.blocks_T, metadata.offsets_T)
        cache.k_BKSH.transpose(1, 2).index_put_(where, k_TKH)
        cache.v_BKSH.transpose(1, 2).index_put_(where, v_TKH)
        source = GatherSource(cache, metadata.workspace)
        window = metadata.windows[self.windows[layer_index]]
        num_tokens = q_TNH.shape[0]
        out_TNH = q_TNH.new_empty(num_tokens + 1, *q_TNH.shape[1:])
        for group in window.folded:
            mixed_TNH = self._attend_folded(group, q_TNH, source)
            if group.target_tokens is None:
                return mixed_TNH
            out_TNH.index_copy_(0, group.target_tokens, mixed_TNH)
        for chunk in window.chunks:
            self._attend_chunk(chunk, q_TNH, source, out_TNH)
        return out_TNH[:num_tokens]

    def scrub(self, block_ids: IntArray) -> None:
        """Replace what is not finite in some blocks by 0."""
        ids = torch.from_numpy(block_ids).to(self.sizes.device)
        for cache in self.layers:
            for part in cache:
                part.index_copy_(0, ids, part.index_select(0, ids).nan_to_num_(0.0, 0.0, 0.0))

    def _attend_folded(self, group: FoldedGroup, q_TNH: Tensor, source: GatherSource) -> Tensor:
        if group.source_tokens is not None:
            q_TNH = q_TNH.index_select(0, group.source_tokens)
        num_heads, head_dim = q_TNH.shape[1:]
        k_RKCH, v_RKCH = self._gather(group.pieces, group.num_rows, source)
        q_RLKGH = q_TNH.reshape(
            group.num_rows, -1, self.num_kv_heads, num_heads // self.num_kv_heads, head_dim
        )
        q_RKLGH = q_RLKGH.transpose(1, 2)
        q_RKQH = q_RKLGH.flatten(2, 3)
        if self.prefers_products and group.mask is not None and q_RKLGH.shape[2] == 1:
            mixed_RKQH = attend_by_products(q_RKQH, k_RKCH, v_RKCH, group.mask, self.scale)
        else:
            mixed_RKQH = scaled_dot_product_attention(
                q_RKQH,
                k_RKCH[:, :, : group.num_keys],
                v_RKCH[:, :, : group.num_keys],
                attn_mask=group.mask,
                scale=self.scale,
            )
        return mixed_RKQH.view(q_RKLGH.shape).transpose(1, 2).reshape(-1, num_heads, head_dim)

    def _attend_chunk(self, chunk: LongChunk, q_TNH: Tensor, source: GatherSource, out_TNH: Tensor) -> None:
        num_groups = q_TNH.shape[1] // self.num_kv_heads
        # The query heads of a KV head are the batch dimension here: keys and values repeat with stride 0, and
        # the mask is not repeated either.
        k_GKCH, v_GKCH = (
            part.expand(num_groups, -1, -1, -1) for part in self._gather(chunk.pieces, 1, source)
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

    def _gather(self, pieces: Tensor, num_rows: int, source: GatherSource) -> tuple[Tensor, Tensor]:
        """Return keys and values of some rows, [R, K, C, H]; they are valid until the next call."""
        shape = (num_rows, self.num_kv_heads, -1, source.cache.k_BKSH.shape[3])
        k_RKCH, v_RKCH = (
            torch.index_select(part.flatten(0, 1), 0, pieces, out=workspace[: len(pieces)]).view(shape)
            for part, workspace in zip(source.cache, source.workspace, strict=True)
        )
        return k_RKCH, v_RKCH


def attend_by_products(q_RKGH: Tensor, k_RKCH: Tensor, v_RKCH: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend with two batched products and a softmax in float32 between them.

    The fused kernel of the CPU is made for many queries per head. Decodes have few, and take half as long
    this way in bfloat16, at the price of scores that are rounded to it as queries and keys already are.

    Parameters
    ----------
    mask : [R, 1, 1, C] in float32.
    """
    q_PGH, k_PCH, v_PCH = (part.flatten(0, 1) for part in (q_RKGH, k_RKCH, v_RKCH))
    scores_RKGC = torch.bmm(q_PGH, k_PCH.transpose(1, 2)).view(*q_RKGH.shape[:3], -1)
    weights_RKGC = torch.add(mask, scores_RKGC, alpha=scale).softmax(dim=-1, dtype=torch.float32)
    return torch.bmm(weights_RKGC.to(v_PCH.dtype).flatten(0, 1), v_PCH).view(q_RKGH.shape)


class ForwardContext(NamedTuple):
    """What a forward pass carries through the layers."""

    attention: TorchAttention
    metadata: SdpaMetadata
    """Of the step."""
