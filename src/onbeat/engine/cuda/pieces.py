"""Steps with prompts, replayed in pieces: all of a layer but its attention, whose rows no graph can know.

The host then launches a graph between two calls of attention, in place of some ten operators.

Legend: T tokens of a step, N query heads, H head width, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onbeat.engine.cuda.graphs import GraphKey, Graphs
from onbeat.engine.cuda.state import CudaOptions
from onbeat.engine.torch.kernels import Kernels, Multiply, StepTensors
from onbeat.engine.torch.kv import LayerKVCache
from onbeat.engine.torch.layer import (
    Attend,
    Hidden,
    LayerStep,
    after_attention,
    before_attention,
    scale_embedding,
)
from onbeat.engine.torch.weights import TorchWeights


class Pieces:
    """The pieces of steps of some sizes, and the memory that one hands to the next.

    Parameters
    ----------
    weights, kernels, kv, multiply : the model, its KV cache, and what computes it.
    graphs : what captures the pieces.
    options : sizes, those of steps among them.
    """

    def __init__(
        self,
        weights: TorchWeights,
        kernels: Kernels,
        kv: Sequence[LayerKVCache],
        multiply: Multiply,
        graphs: Graphs,
        options: CudaOptions,
    ) -> None:
        sizes = options.piece_sizes
        self._weights = weights
        self._kv = kv
        self._graphs = graphs
        most, spec, device = max(sizes), weights.layers[0].spec, weights.device
        self._ids_T, self._positions_T = (
            torch.zeros(most, dtype=torch.int32, device=device) for _ in range(2)
        )
        self._kv_slots_T = torch.full_like(self._ids_T, options.padding_kv_slot)
        self._x_TD, self._residual_TD = (
            torch.zeros(most, weights.config.hidden_size, dtype=weights.dtype, device=device)
            for _ in range(2)
        )
        self._q_TNH, self._mixed_TNH = (
            torch.zeros(most, spec.num_heads, spec.head_dim, dtype=weights.dtype, device=device)
            for _ in range(2)
        )
        places = {size: StepTensors(self._positions_T[:size], self._kv_slots_T[:size]) for size in sizes}
        self._steps = {size: LayerStep(tensors, kv, kernels, multiply) for size, tensors in places.items()}
        keys = [GraphKey(size, piece) for size in sizes for piece in range(len(weights.layers) + 1)]
        graphs.prepare(keys, self._run_piece, lambda _: None)

    def run(self, ids_T: Tensor, tensors: StepTensors, attend: Attend, wanted_N: Tensor) -> Hidden:
        """Run a step of one of the sizes, padding included; return the hidden states of some tokens."""
        size = len(ids_T)
        for own, given in (
            (self._ids_T, ids_T),
            (self._positions_T, tensors.positions_T),
            (self._kv_slots_T, tensors.kv_slots_T),
        ):
            own[:size].copy_(given)
        q_TNH, mixed_TNH = self._q_TNH[:size], self._mixed_TNH[:size]
        for piece, (layer, kv) in enumerate(zip(self._weights.layers, self._kv, strict=True)):
            self._graphs.replay(GraphKey(size, piece))
            attend(q_TNH, kv, layer.spec, mixed_TNH)
        self._graphs.replay(GraphKey(size, len(self._kv)))
        return Hidden(*(part.index_select(0, wanted_N) for part in (self._x_TD, self._residual_TD)))

    def _run_piece(self, key: GraphKey) -> None:
        """Run what lies between two calls of attention: the rest of one layer, and the start of the next."""
        assert key.piece is not None, "the whole of a step has no pieces"
        weights, layers = self._weights, self._weights.layers
        step, residual_TD = self._steps[key.size], self._residual_TD[: key.size]
        x_TD = None
        if key.piece:
            mixed_TNH = self._mixed_TNH[: key.size]
            before = layers[key.piece - 1]
            x_TD = after_attention(weights, before, mixed_TNH, residual_TD, step)
        else:
            torch.index_select(weights.embedding_VD, 0, self._ids_T[: key.size], out=residual_TD)
            scale_embedding(weights, residual_TD)
        if key.piece < len(layers):
            layer, kv = layers[key.piece], self._kv[key.piece]
            before_attention(layer, x_TD, residual_TD, step, kv, self._q_TNH[: key.size])
        elif x_TD is not None:
            self._x_TD[: key.size].copy_(x_TD)
