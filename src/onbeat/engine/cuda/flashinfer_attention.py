"""Attention by FlashInfer: planned fa2 for decodes, fa2 or fa3 for chunks, in bfloat16; fa3 needs sm_90.

Keys and values may have 8 bits instead.

A planned wrapper writes its plan to pinned host memory and copies it in stream order. With a step in flight,
the next plan must not touch what has not been copied yet: each wrapper has two such buffers in turn.

Legend: T tokens of a step, R rows, N query heads, K KV heads, H head width, W columns of a block table.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onbeat.core.errors import ConfigError
from onbeat.engine.cuda.graphs import GraphKey
from onbeat.engine.cuda.stream import DeviceStream, stream_of
from onbeat.engine.cuda.triton_ops import list_blocks
from onbeat.engine.forward import Mark
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.torch import kernels
from onbeat.engine.torch.kv import LayerKVCache

_WORKSPACE_BYTES = 128 << 20
"""Results of parts of a row that are still to be merged: what FlashInfer recommends."""
_PLAN_BYTES = 8 << 20
"""Of a plan, as FlashInfer's wrappers have it."""
_LONG_CHUNK = 128
"""New tokens of a row from which on fa3 is taken: what one of its tiles holds."""
_MOST_PROCESSORS = 188
"""Of a GPU: an H100 has 132 of them, an RTX PRO 6000 has the most."""


class FlashInfer(NamedTuple):
    """What is used of the library."""

    version: str
    PrefillWrapper: Any
    DecodeWrapper: Any
    fast_decode_plan: Any

    @classmethod
    def load(cls) -> FlashInfer:
        """Import it."""
        import flashinfer

        return cls(
            flashinfer.__version__,
            flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            flashinfer.fast_decode_plan,
        )


def unbuilt_kernel(
    config: ModelConfig, chunk_backend: kernels.ChunkBackend = "fa2", kv_dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Return the name of a module of FlashInfer that a model needs and that is not there yet."""
    from flashinfer.jit.attention import gen_batch_prefill_module

    bf16, head_dim = torch.bfloat16, config.head_dim
    types = (bf16, kv_dtype, bf16, torch.int32, head_dim, head_dim)
    no_rotation, no_cap, no_fp16_sums = 0, False, False
    for has_window in {config.is_sliding(layer) for layer in range(config.num_layers)}:
        module = gen_batch_prefill_module(
            chunk_backend, *types, no_rotation, has_window, no_cap, no_fp16_sums
        )
        if not module.is_compiled:
            return str(module.name)
    return None


class PlanBuffers:
    """Where plans of one wrapper lie: on the device, and two places on the host in turn.

    Parameters
    ----------
    stream : where the plans are copied.
    device : of the wrapper.

    Attributes
    ----------
    planned : what the plan on the device is for, in whatever terms whoever planned compares; None: not known.
    """

    def __init__(self, stream: DeviceStream, device: torch.device) -> None:
        self.planned: object = None
        self.on_device = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._stream = stream
        self._on_host = [stream.pinned(_PLAN_BYTES // 4).view(torch.uint8) for _ in range(2)]
        self._copied: list[Mark | None] = [None, None]
        self._turn = 0

    def next(self) -> Tensor:
        """Return host memory whose last plan has been copied; the plan on the device is about to change."""
        self.planned = None
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.wait()
        return self._on_host[self._turn]

    def mark_copied(self) -> None:
        """Note that the copy of the plan in the memory that `next` returned is queued."""
        self._copied[self._turn] = self._stream.mark()


class PlannedDecodes:
    """As many queries a row, for a fixed number of rows, by a plan that the host makes of their lengths.

    `plan` comes before each step, outside of a capture; `list_rows` once a step and `attend` once a layer,
    inside of it.

    Parameters
    ----------
    library : FlashInfer.
    sizes : what it is made for.
    layer : one of those that it serves: they have its window, scale and heads.
    key : rows of each step, and new tokens of each row.
    workspace : scratch memory on the device, which others may use in stream order.
    buffers : for the plans of all sizes of this window: only one step's runs at a time.
    """

    def __init__(
        self,
        library: FlashInfer,
        sizes: kernels.KernelSizes,
        layer: kernels.LayerSpec,
        key: GraphKey,
        *,
        workspace: Tensor,
        buffers: PlanBuffers,
    ) -> None:
        int32 = partial(torch.zeros, dtype=torch.int32, device=sizes.device)
        num_rows, self._width = key.size, key.width
        self._sizes = sizes
        self._layer = layer
        self._buffers = buffers
        self._ends_R1 = int32(num_rows + 1)
        self._blocks = int32(num_rows * sizes.max_row_blocks)
        self._last_lens_R = int32(num_rows)
        self._query_ends = torch.arange(num_rows + 1, dtype=torch.int32) * key.width
        if key.width > 1:
            self._wrapper = library.PrefillWrapper(
                workspace,
                "HND",
                use_cuda_graph=True,
                qo_indptr_buf=self._query_ends.to(sizes.device, copy=True),
                paged_kv_indptr_buf=self._ends_R1,
                paged_kv_indices_buf=self._blocks,
                paged_kv_last_page_len_buf=self._last_lens_R,
                backend="fa2",
            )
            self._plan = self._wrapper.plan
        else:
            self._wrapper = library.DecodeWrapper(
                workspace,
                "HND",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=self._ends_R1,
                paged_kv_indices_buffer=self._blocks,
                paged_kv_last_page_len_buffer=self._last_lens_R,
                backend="fa2",
            )
            self._plan = partial(library.fast_decode_plan, self._wrapper)
        self._wrapper.reset_workspace_buffer(workspace, buffers.on_device)
        # The first plan takes the module; `fast_decode_plan` only plans.
        self._planned(self._wrapper.plan, np.full(num_rows, key.width, np.int32))

    def plan(self, lens_R: kernels.Int32Array) -> None:
        """Plan a step of rows of these lengths: those that `list_rows` will find on the device.

        A plan depends on how many blocks each row has, and on nothing else of the lengths.
        """
        wanted = self, (-(-lens_R // self._sizes.block_size)).tobytes()
        if self._buffers.planned != wanted:
            self._planned(self._plan, lens_R)
            self._buffers.planned = wanted

    def list_rows(self, rows: kernels.DecodeRows) -> None:
        """Write the rows' blocks and lengths where the kernel reads them."""
        list_blocks(rows, self._sizes.block_size, self._ends_R1, self._blocks, self._last_lens_R)

    def attend(self, q_RNH: Tensor, kv: LayerKVCache, out_RNH: Tensor) -> None:
        """Attend; see `Kernels.attend_decodes`."""
        self._wrapper.run(q_RNH, tuple(kv), out=out_RNH)

    def _planned(self, plan: Any, lens_R: kernels.Int32Array) -> None:
        num_blocks_R = -(-lens_R // self._sizes.block_size)
        ends_R1 = _ends(num_blocks_R)
        last_lens_R = lens_R - (num_blocks_R - 1) * self._sizes.block_size
        _plan_in(self._wrapper, self._buffers.next())
        queries: tuple[Tensor, ...] = ()
        options = _options(self._layer, self._sizes)
        if self._width > 1:
            queries = (self._query_ends,)
            options |= {"causal": True, "max_token_per_sequence": self._width}
            options["seq_lens"] = torch.from_numpy(lens_R.astype(np.int32))
        plan(
            *queries,
            torch.from_numpy(ends_R1),
            self._blocks[: ends_R1[-1]],
            torch.from_numpy(last_lens_R.astype(np.int32)),
            self._layer.num_heads,
            self._layer.num_kv_heads,
            self._layer.head_dim,
            self._sizes.block_size,
            **options,
        )
        self._buffers.mark_copied()


class _WrapperKey(NamedTuple):
    window: int | None
    backend: kernels.ChunkBackend
    has_chunks: bool


class Chunks:
    """Any number of queries a row, causally.

    Parameters
    ----------
    library : FlashInfer.
    sizes : what it is made for.
    backend : fa2, or fa3 where all rows of a call are long: it does not share a row's context out among
        processors, so the others stay with fa2.
    workspace : as that of `PlannedDecodes`.
    """

    def __init__(
        self,
        library: FlashInfer,
        sizes: kernels.KernelSizes,
        backend: kernels.ChunkBackend,
        workspace: Tensor,
    ) -> None:
        self._make_wrapper = library.PrefillWrapper
        self._sizes = sizes
        # fa3 wants queries of 8 bits where keys have them.
        self._backend = backend if sizes.kv_dtype == sizes.dtype else "fa2"
        self._workspace = workspace
        self._stream = stream_of(sizes.device)
        self._wrappers: dict[_WrapperKey, tuple[Any, PlanBuffers]] = {}

    def plan(self, rows: kernels.ChunkRows, layer: kernels.LayerSpec) -> Any:
        """Return a wrapper that is ready for the step; see `Kernels.plan_chunks`.

        There is one for each window and kernel, and another for rows of one token, which may attend beside
        chunks: what it knows of a step is read when its kernels are launched, and the plan on the device is
        overwritten in stream order.
        """
        is_long = rows.query_lens_R.min() >= _LONG_CHUNK
        has_chunks = bool(rows.query_lens_R.max() > 1)
        key = _WrapperKey(layer.window, self._backend if is_long else "fa2", has_chunks)
        wrapper, buffers = self._wrapper(key)
        block_size = self._sizes.block_size
        query_ends_R1, block_ends_R1 = _ends(rows.query_lens_R), _ends(rows.num_blocks_R)
        last_lens_R = rows.context_lens_R - (rows.num_blocks_R - 1) * block_size
        query_ends, block_ends, last_lens, context_lens, blocks = self._pinned(
            query_ends_R1, block_ends_R1, last_lens_R, rows.context_lens_R, rows.block_ids
        )
        _plan_in(wrapper, buffers.next())
        wrapper.plan(
            query_ends,
            block_ends,
            blocks,
            last_lens,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            block_size,
            causal=True,
            seq_lens=context_lens,
            max_token_per_sequence=int(rows.query_lens_R.max()),
            **_options(layer, self._sizes),
        )
        buffers.mark_copied()
        return wrapper

    def attend(self, q_TNH: Tensor, kv: LayerKVCache, plan: Any, out_TNH: Tensor) -> None:
        """Attend; see `Kernels.attend_chunks`."""
        plan.run(q_TNH, tuple(kv), out=out_TNH)

    def _wrapper(self, key: _WrapperKey) -> tuple[Any, PlanBuffers]:
        if key not in self._wrappers:
            buffers = PlanBuffers(self._stream, self._sizes.device)
            wrapper = self._make_wrapper(self._workspace, "HND", backend=key.backend)
            wrapper.reset_workspace_buffer(self._workspace, buffers.on_device)
            self._wrappers[key] = wrapper, buffers
        return self._wrappers[key]

    def _pinned(self, *arrays: kernels.Int32Array) -> tuple[Tensor, ...]:
        """Return arrays in one piece of memory that torch gives away again only once it has been copied."""
        numbers = torch.from_numpy(np.concatenate(arrays, dtype=np.int32))
        if self._sizes.device.type == "cuda":
            numbers = numbers.pin_memory()
        return torch.split(numbers, [len(array) for array in arrays])


def _plan_in(wrapper: Any, memory: Tensor) -> None:
    """Let a wrapper write its next plan to pinned memory; the library has no public way.

    Raises
    ------
    ConfigError : this FlashInfer keeps it elsewhere: plans would overwrite each other unseen.
    """
    if not hasattr(wrapper, "_pin_memory_int_workspace_buffer"):
        raise ConfigError("this FlashInfer keeps its plans elsewhere; pip install flashinfer-python==0.6.14")
    wrapper._pin_memory_int_workspace_buffer = memory


def allocate_workspace(sizes: kernels.KernelSizes) -> Tensor:
    """Return scratch memory for all of them: as much as a plan may ask for, which fails with less."""
    config = sizes.config
    group = config.num_heads // config.num_kv_heads
    # A plan splits contexts while its tiles of queries are fewer than two for each processor and KV head.
    chunk_queries = 2 * _MOST_PROCESSORS // config.num_kv_heads * 128
    most_queries = chunk_queries
    for num_rows, width in ((sizes.max_rows, 1), *sizes.verify_rows):
        tile = next(tile for tile in (16, 64, 128) if group * width <= tile or tile == 128)
        most_queries = max(most_queries, (-(-num_rows * width * group // tile) + num_rows) * tile)
    # For each query and head an output and the logarithm of a sum, float32
    needed = 4 * config.num_heads * (config.head_dim + 1) * most_queries
    return torch.zeros(max(_WORKSPACE_BYTES, needed), dtype=torch.uint8, device=sizes.device)


def _ends(lens: kernels.Int32Array) -> kernels.Int32Array:
    """Return 0 and where each of the pieces ends."""
    ends = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=ends[1:])
    return ends


def _options(layer: kernels.LayerSpec, sizes: kernels.KernelSizes) -> dict[str, Any]:
    """Return what all plans say of a layer."""
    return {
        # How many tokens before its own a token sees
        "window_left": -1 if layer.window is None else layer.window - 1,
        "sm_scale": layer.scale,
        "q_data_type": sizes.dtype,
        "kv_data_type": sizes.kv_dtype,
    }
