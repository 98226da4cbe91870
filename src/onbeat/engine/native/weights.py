"""A model's weights as the native engine reads them: packed matrices, and vectors in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.native.library import PackedMatrix

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """A feed-forward, or an expert."""

    gate_up: PackedMatrix
    down: PackedMatrix
    gate_up_bias: FloatArray | None = None
    """In the order of the matrix."""
    down_bias: FloatArray | None = None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        return self.gate_up, self.down

    @property
    def numbers_per_token(self) -> float:
        return sum(matrix.num_outputs * matrix.num_inputs for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A feed-forward of experts."""

    router: PackedMatrix
    experts: tuple[GatedWeights, ...]
    num_per_token: int
    router_bias: FloatArray | None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        return self.router, *(matrix for expert in self.experts for matrix in expert.matrices)

    @property
    def numbers_per_token(self) -> float:
        router = self.router.num_outputs * self.router.num_inputs
        return router + self.num_per_token * self.experts[0].numbers_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; None where the family has no such thing."""

    qkv: tuple[PackedMatrix, ...]
    """Queries, keys and values, one after the other: in one matrix, or more where their stores differ."""
    o: PackedMatrix
    feed_forward: GatedWeights | ExpertWeights
    qkv_bias: FloatArray | None
    o_bias: FloatArray | None
    attention_norm: FloatArray | None
    mlp_norm: FloatArray | None
    after_attention_norm: FloatArray | None
    after_mlp_norm: FloatArray | None
    query_norm: FloatArray | None
    key_norm: FloatArray | None
    sinks: FloatArray | None
    conv: FloatArray | None = None
    """Of linear attention, for which `qkv` and `o` are its projections: [tokens, inputs]."""
    decay: FloatArray | None = None
    dt_bias: FloatArray | None = None
    delta_norm: FloatArray | None = None
    value_norm: FloatArray | None = None
    beside: ExpertWeights | None = None
    """Experts beside the feed-forward, with the norms of either and factors on the shares."""
    router_norm: FloatArray | None = None
    expert_norm: FloatArray | None = None
    after_dense_norm: FloatArray | None = None
    after_experts_norm: FloatArray | None = None
    expert_factors: FloatArray | None = None
    own_input: tuple[PackedMatrix, ...] = ()
    """What gates the tokens' own input of the layer, and what projects it to the residual."""
    after_input_norm: FloatArray | None = None
    scale: float = 0.0
    """Of the residual behind the layer; 0: none."""

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        beside = () if self.beside is None else self.beside.matrices
        return *self.qkv, self.o, *self.feed_forward.matrices, *beside, *self.own_input

    @property
    def numbers_per_token(self) -> float:
        """Numbers of its matrices that a token is multiplied with."""
        sizes = (matrix.num_outputs * matrix.num_inputs for matrix in (*self.qkv, self.o))
        beside = 0.0 if self.beside is None else self.beside.numbers_per_token
        return sum(sizes) + self.feed_forward.numbers_per_token + beside


class LayerInputs(NamedTuple):
    """Where tokens' own inputs of all layers come from: a table, and the embedding past a product."""

    table: PackedMatrix
    projection: PackedMatrix
    norm: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeights:
    """A model's weights as the native engine reads them."""

    embedding: PackedMatrix
    lm_head: PackedMatrix
    """The embedding itself where they are tied."""
    final_norm: FloatArray
    head_norm: FloatArray
    """The final norm over what logits are divided by: the head multiplies what comes out of it."""
    head_bias: FloatArray | None
    """Likewise divided, and padded."""
    layers: Sequence[LayerWeights]
    expert_size: int
    """With its padding; 0 without experts."""
    inputs: LayerInputs | None = None

    @property
    def matrices(self) -> list[PackedMatrix]:
        """Each matrix once."""
        outer = [self.embedding] if self.lm_head is self.embedding else [self.embedding, self.lm_head]
        outer += [] if self.inputs is None else self.inputs[:2]
        return outer + [matrix for layer in self.layers for matrix in layer.matrices]

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(matrix.num_bytes for matrix in self.matrices)

    @property
    def stores(self) -> str:
        """The stores of the matrices, for people: `q4+q8`."""
        return "+".join(sorted({matrix.layout.store.name.lower() for matrix in self.matrices}))
