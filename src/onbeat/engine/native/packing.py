"""From a checkpoint to what the native engine reads: packed matrices, and vectors in float32.

One parameter is in plain memory at a time; parameters that stay quantized go from the mapped file straight
into their matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.model_config.rope import head_order
from onbeat.engine.native.layouts import LAYER_PROJECTION, LAYER_TABLE, LOOKED_UP, OWN_INPUT, WeightLayouts
from onbeat.engine.native.library import MatrixLayout, NativeLibrary, PackedMatrix, Source, Store
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.engine.weights.parameters import (
    BESIDE_NORMS,
    LAYER_NORMS,
    inner_parts,
    parameter_shapes,
    projections,
    row_order,
)

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
    """Queries, keys and values, one after the other: in one matrix, or more where their stores differ. In
    linear attention these are all its projections."""
    o: PackedMatrix
    feed_forward: GatedWeights | ExpertWeights
    vectors: Mapping[str, FloatArray | None]
    """Norms, biases and the like, by their names in the library's `LayerStructure`."""
    beside: ExpertWeights | None
    """Experts beside the feed-forward."""
    own_input: tuple[PackedMatrix, ...]
    """What gates the tokens' own input of the layer, and what projects it to the residual."""
    scale: float
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


IntArray = NDArray[np.int64]

NO_ORDERS: Mapping[str, IntArray] = MappingProxyType({})
INTERLEAVED_ROWS = 16
"""Rows of the gate, then as many of the up projection: what one product of the kernel needs of both."""

_PIECE_NUMBERS = 1 << 21
"""Of the largest matrices, which are packed piece by piece: whole, they would take as much again, in fresh
memory, which takes twice as long to make numbers in."""


class MatrixPart(NamedTuple):
    """A parameter that becomes part of a matrix."""

    name: str
    to_outputs: IntArray
    """For each of its rows, the matrix's."""


class WeightPacker:
    """Packs one checkpoint.

    Parameters
    ----------
    library : whose matrices they are.
    checkpoint : gives each parameter once.
    layouts : how each matrix keeps its numbers.
    num_threads : threads that share the work.
    """

    def __init__(
        self, library: NativeLibrary, checkpoint: Checkpoint, layouts: WeightLayouts, *, num_threads: int
    ) -> None:
        self._library = library
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._shapes = parameter_shapes(checkpoint.config)
        self._layouts = layouts
        self._num_threads = num_threads

    def pack(self) -> NativeWeights:
        """Read and pack everything.

        Raises
        ------
        ModelLoadError : a parameter cannot be read, memory is short, or sizes do not suit the quantization.
        """
        config = self._config
        divisor = np.float32(config.logits_divisor * (config.logits_softcap or 1.0))
        embedding, final_norm = self._rows("model.embed_tokens.weight"), self._norm("model.norm")
        return NativeWeights(
            embedding=embedding,
            layers=[self._layer(index) for index in range(config.num_layers)],
            lm_head=embedding if config.tie_word_embeddings else self._rows("lm_head.weight"),
            final_norm=final_norm,
            head_norm=final_norm / divisor,
            head_bias=_padded(self._vector("lm_head.bias") / divisor) if config.head_bias else None,
            expert_size=self._layouts.expert_size,
            inputs=self._inputs() if config.layer_input_size else None,
        )

    def _inputs(self) -> LayerInputs:
        table, projection = map(self._rows, (LAYER_TABLE, LAYER_PROJECTION))
        return LayerInputs(table, projection, self._norm("model.per_layer_projection_norm"))

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        is_linear, (inputs, output) = config.is_linear(index), projections(config, index)
        is_beside = config.experts is not None and config.experts.is_beside
        own_inputs = OWN_INPUT if config.layer_input_size else ()
        has_head_norms = config.qk_norm is not None and not is_linear
        has_key_norm = has_head_norms and config.kv_layer(index) == index
        order = head_order(*config.layer_turn(index))
        orders = {} if order is None or is_linear else dict.fromkeys(inputs[:2], order)
        vectors = {
            f"{place}_norm": None if name is None else self._norm(f"{prefix}.{name}")
            for place, name in LAYER_NORMS[config.norms]._asdict().items()
        } | {
            "qkv_bias": self._bias(*inputs, orders=orders) if config.attention_bias else None,
            "o_bias": self._bias(f"{attention}.o_proj") if config.attention_output_bias else None,
            "query_norm": self._head_norm(f"{attention}.q_norm", order) if has_head_norms else None,
            "key_norm": self._head_norm(f"{attention}.k_norm", order) if has_key_norm else None,
            "sinks": self._vector(f"{attention}.sinks") if config.has_sinks else None,
            "value_norm": np.ones(config.kv_heads(index).width, np.float32) if config.norms_values else None,
            "after_input_norm": self._norm(f"{prefix}.post_per_layer_input_norm") if own_inputs else None,
            **(self._around_experts(prefix) if is_beside else {}),
            **(self._delta(f"{prefix}.linear_attn") if is_linear else {}),
        }
        return LayerWeights(
            qkv=tuple(
                self._rows(*names, orders=orders)
                for names in self._layouts.split([f"{name}.weight" for name in inputs])
            ),
            o=self._rows(f"{output}.weight"),
            feed_forward=self._experts(f"{prefix}.mlp")
            if config.has_experts(index) and not is_beside
            else self._gated(f"{prefix}.mlp", self._layouts.mlp_size(index)),
            vectors=vectors,
            beside=self._experts(f"{prefix}.mlp") if is_beside else None,
            own_input=tuple(self._rows(f"{prefix}{name}") for name in own_inputs),
            scale=float(self._vector(f"{prefix}.layer_scalar")[0]) if config.scales_layers else 0.0,
        )

    def _around_experts(self, prefix: str) -> dict[str, FloatArray]:
        """Return the norms and factors around a feed-forward and the experts beside it."""
        names = "after_dense_norm", "expert_norm", "after_experts_norm"
        scale = self._vector(f"{prefix}.router.scale")
        return {
            "router_norm": scale * np.float32(self._config.hidden_size**-0.5),
            "expert_factors": self._vector(f"{prefix}.router.per_expert_scale"),
            **{name: self._norm(f"{prefix}.{of}") for name, of in zip(names, BESIDE_NORMS, strict=True)},
        }

    def _delta(self, prefix: str) -> dict[str, FloatArray]:
        """Return what a layer of linear attention has between its projections; `conv`: [tokens, inputs]."""
        conv = self._vector(f"{prefix}.conv1d.weight")
        return {
            "conv": np.ascontiguousarray(conv.reshape(len(conv), -1).T),
            "decay": -np.exp(self._vector(f"{prefix}.A_log")),
            "dt_bias": self._vector(f"{prefix}.dt_bias"),
            "delta_norm": self._vector(f"{prefix}.norm.weight"),
        }

    def _rows(
        self, *names: str, num_inputs: int | None = None, orders: Mapping[str, IntArray] = NO_ORDERS
    ) -> PackedMatrix:
        """Pack parameters one below the other; rows shorter than `num_inputs` are padded with zeros.

        Parameters
        ----------
        orders : of projections to heads, which number of each head comes at which place.
        """
        parts, start = [], 0
        for name in names:
            end = start + self._shapes[name][0]
            stored, order = row_order(self._config, name), orders.get(name.removesuffix(".weight"))
            places = np.arange(start, end) if stored is None else start + np.argsort(stored)
            if order is not None:
                places = _in_order(places, np.argsort(order))
            parts.append(MatrixPart(name, places))
            start = end
        return self._fuse(parts, start, num_inputs or self._shapes[names[0]][1])

    def _experts(self, prefix: str) -> ExpertWeights:
        sizes = self._config.experts
        assert sizes is not None, "the layer has experts"
        names = [f"experts.{index}" for index in range(sizes.num_experts)]
        routers = [f"{prefix}.gate.weight"]
        if sizes.shared_size:
            names.append("shared_expert")
            routers.append(f"{prefix}.shared_expert_gate.weight")
        return ExpertWeights(
            self._rows(*routers),
            tuple(self._gated(f"{prefix}.{name}", self._layouts.expert_size) for name in names),
            sizes.num_per_token + bool(sizes.shared_size),
            self._bias(f"{prefix}.gate") if sizes.has_bias else None,
        )

    def _gated(self, prefix: str, padded_size: int) -> GatedWeights:
        size, num_inputs = self._shapes[f"{prefix}.up_proj.weight"]
        inner = [f"{prefix}.{part}_proj" for part in inner_parts(self._config)]
        blocks, offsets = np.divmod(np.arange(size), INTERLEAVED_ROWS)
        first = len(inner) * INTERLEAVED_ROWS * blocks + offsets
        parts = [
            MatrixPart(f"{name}.weight", first + part * INTERLEAVED_ROWS) for part, name in enumerate(inner)
        ]
        num_outputs = len(inner) * padded_size
        inner_bias = down_bias = None
        if f"{prefix}.up_proj.bias" in self._shapes:
            inner_bias = _padded(np.zeros(num_outputs, np.float32))
            down_bias = self._bias(f"{prefix}.down_proj")
            for name, part in zip(inner, parts, strict=True):
                inner_bias[part.to_outputs] = self._bias(name)
        return GatedWeights(
            self._fuse(parts, num_outputs, num_inputs),
            self._rows(f"{prefix}.down_proj.weight", num_inputs=padded_size),
            inner_bias,
            down_bias,
        )

    def _fuse(self, parts: Sequence[MatrixPart], num_outputs: int, num_inputs: int) -> PackedMatrix:
        """Pack parts in the first layout that takes them all."""
        names = [part.name for part in parts]
        for layout in self._layouts.layouts(names):
            matrix = self._create(names, layout, num_outputs=num_outputs, num_inputs=num_inputs)
            if all(self._pack_part(matrix, part) for part in parts) and self._pack_padding(matrix, parts):
                return matrix
            matrix.free()
        raise ModelLoadError(f"{', '.join(names)} cannot be packed by the native engine; serve with torch")

    def _create(
        self, names: Sequence[str], layout: MatrixLayout, *, num_outputs: int, num_inputs: int
    ) -> PackedMatrix:
        try:
            return PackedMatrix(self._library, layout, num_outputs=num_outputs, num_inputs=num_inputs)
        except ModelLoadError as error:
            given = self._layouts.quantization
            cure = f"; serve without quantization {given}" if given.startswith("int") else ""
            raise ModelLoadError(f"{', '.join(names)}: {error}{cure}") from error

    def _pack_part(self, matrix: PackedMatrix, part: MatrixPart) -> bool:
        quantized, pieces = None, self._pieces(part.name)
        if matrix.layout != self._layouts.plain:
            quantized = self._layouts.quantized_rows(part.name)
        if quantized is not None:
            source, to_outputs = Source[quantized.type_name], part.to_outputs[quantized.to_rows]
            is_packed = all(
                matrix.pack(quantized.read(rows), source, to_outputs[rows], num_threads=self._num_threads)
                for rows in pieces
            )
            if is_packed or self._layouts.quantization != "int4":
                return is_packed
        for rows in pieces:
            values = self._checkpoint.get(part.name, _dtype(matrix), rows)
            if num_missing := matrix.num_inputs - values.shape[1]:
                values = np.pad(values, ((0, 0), (0, num_missing)))
            if not self._pack_numbers(matrix, values, part.to_outputs[rows]):
                return False
        return True

    def _pieces(self, name: str) -> list[slice]:
        """Return rows of a parameter that are read at once."""
        num_rows, num_inputs = self._shapes[name]
        is_plain_mlp = ".mlp." in name and self._checkpoint.quantized_rows(name) is None
        step = num_rows
        if is_plain_mlp or name in LOOKED_UP:
            step = max(_PIECE_NUMBERS // num_inputs // 32, 1) * 32
        return [slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]

    def _pack_padding(self, matrix: PackedMatrix, parts: Sequence[MatrixPart]) -> bool:
        """Write zeros to the rows that no part has."""
        used = np.concatenate([part.to_outputs for part in parts])
        unused = np.setdiff1d(np.arange(matrix.num_outputs), used)
        zeros = np.zeros((len(unused), matrix.num_inputs), _dtype(matrix))
        return len(unused) == 0 or self._pack_numbers(matrix, zeros, unused)

    def _pack_numbers(self, matrix: PackedMatrix, values: NDArray[Any], to_outputs: IntArray) -> bool:
        source = Source.BF16 if values.dtype == BFLOAT16 else Source.F32
        rows = np.ascontiguousarray(values)
        return matrix.pack(rows, source, to_outputs, num_threads=self._num_threads)

    def _norm(self, name: str) -> FloatArray:
        """Return what a norm multiplies by, then what it adds, if it does."""
        scale = self._vector(f"{name}.weight") + np.float32(self._config.norm_weight_offset)
        bias = f"{name}.bias"
        return np.concatenate([scale, self._vector(bias)]) if bias in self._shapes else scale

    def _head_norm(self, name: str, order: IntArray | None) -> FloatArray:
        scale = self._norm(name).ravel()
        return scale if order is None else _in_order(scale, order)

    def _bias(self, *names: str, orders: Mapping[str, IntArray] = NO_ORDERS) -> FloatArray:
        vectors = ((self._vector(f"{name}.bias"), orders.get(name)) for name in names)
        return np.concatenate([part if order is None else _in_order(part, order) for part, order in vectors])

    def _vector(self, name: str) -> FloatArray:
        return self._checkpoint.get(name, FLOAT32)


def _in_order(numbers: NDArray[Any], order: IntArray) -> NDArray[Any]:
    """Return numbers of heads, one behind the other, with those of each head in an order."""
    return numbers.reshape(-1, len(order))[:, order].ravel()


def _padded(vector: FloatArray) -> FloatArray:
    """Return a vector of a product's outputs that is as long as its panels."""
    return np.pad(vector, (0, -len(vector) % (2 * INTERLEAVED_ROWS)))


def _dtype(matrix: PackedMatrix) -> np.dtype[Any]:
    """Return the type in which numbers are handed to a matrix."""
    return BFLOAT16 if matrix.layout.store == Store.BF16 else FLOAT32
