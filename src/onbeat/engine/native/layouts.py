"""Which matrices are packed together, and how each keeps its numbers: decided before any is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.engine_config import Quantization
from onbeat.engine.native.library import MatrixLayout, Store
from onbeat.engine.weights.checkpoint import Checkpoint, QuantizedRows
from onbeat.engine.weights.parameters import inner_parts, parameter_shapes, projections

PLAIN_LAYOUTS: Mapping[np.dtype[Any], MatrixLayout] = {
    FLOAT32: MatrixLayout(Store.F32),
    BFLOAT16: MatrixLayout(Store.BF16),
}
INT8_LAYOUT, INT4_LAYOUT = MatrixLayout(Store.Q8, 32), MatrixLayout(Store.Q4, 32)
NATURAL_LAYOUTS: Mapping[str, MatrixLayout] = {
    "Q8_0": MatrixLayout(Store.Q8, 32),
    "Q5_0": MatrixLayout(Store.Q8, 32),
    "IQ4_NL": MatrixLayout(Store.Q8, 32),
    "IQ4_XS": MatrixLayout(Store.Q8, 32),
    "Q3_K": MatrixLayout(Store.Q8, 16),
    "Q6_K": MatrixLayout(Store.Q8, 16),
    "Q5_1": MatrixLayout(Store.Q8_MIN, 32),
    "Q5_K": MatrixLayout(Store.Q8_MIN, 32),
    "Q2_K": MatrixLayout(Store.Q8_MIN, 16),
    "Q4_0": MatrixLayout(Store.Q4, 32),
    "Q4_1": MatrixLayout(Store.Q4, 32),
    "Q4_K": MatrixLayout(Store.Q4, 32),
    "MXFP4": MatrixLayout(Store.E2M1, 32),
    "E2M1_16": MatrixLayout(Store.E2M1, 16),
}
"""GGUF type to the store that holds its numbers as they are. Other quantized types become plain numbers."""
EMBEDDING, LM_HEAD, ROUTER = "model.embed_tokens.weight", "lm_head.weight", ".mlp.gate.weight"
LAYER_TABLE, LAYER_PROJECTION = (
    "model.embed_tokens_per_layer.weight",
    "model.per_layer_model_projection.weight",
)
OWN_INPUT = ".per_layer_input_gate.weight", ".per_layer_projection.weight"
"""What tokens' own inputs of a layer pass, and a projection of the embedding to those of all layers."""
LOOKED_UP = EMBEDDING, LM_HEAD, LAYER_TABLE
"""As large as the vocabulary: a few rows are read at once."""
_FORMATS = {Store.F32: "fp32", Store.BF16: "bf16", Store.Q8: "int8", Store.Q8_MIN: "int8", Store.Q4: "int4"}
_E2M1_FORMATS = {32: "mxfp4", 16: "nvfp4"}


class WeightLayouts:
    """The layout of every matrix of a checkpoint.

    Parameters
    ----------
    checkpoint : what will be packed.
    dtype : of matrices that are not quantized: float32 or bfloat16.
    quantization : `auto` leaves numbers that the file quantizes as they are, `none` turns them into plain
        ones, `int8` quantizes all matrices, `int4` those of the layers that the file has in more than 4 bits.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: np.dtype[Any], quantization: Quantization) -> None:
        self.plain = PLAIN_LAYOUTS[dtype]
        self.quantization = quantization
        self._source = checkpoint
        self._config = checkpoint.config
        # Rows of 16 gates and 16 ups lie in turn, and a scale is shared by 32 inputs of the next matrix.
        multiple = INT8_LAYOUT.group if quantization in ("int8", "int4") else 16
        experts = self._config.experts
        self._multiple = 32 if self._config.widens_sharers else multiple
        widest = 0 if experts is None else max(experts.intermediate_size, experts.shared_size)
        self.expert_size = -(-widest // multiple) * multiple
        """Width of an expert, padded with zeros; 0 without any."""

    def mlp_size(self, layer_index: int) -> int:
        """Return the width of a layer's feed-forward, padded with zeros."""
        return -(-self._config.mlp_size(layer_index) // self._multiple) * self._multiple

    def quantized_rows(self, name: str) -> QuantizedRows | None:
        """Return a parameter as the file has it, where it is packed so."""
        if self.quantization == "none":
            return None
        rows = self._source.quantized_rows(name)
        if rows is None or rows.type_name not in NATURAL_LAYOUTS:
            return None
        natural = NATURAL_LAYOUTS[rows.type_name]
        is_wide = self.quantization == "int4" and natural.store not in (Store.Q4, Store.E2M1)
        return None if is_wide or (self.quantization == "int8" and natural != INT8_LAYOUT) else rows

    def layouts(self, names: Sequence[str]) -> tuple[MatrixLayout, ...]:
        """Return how a matrix of some parameters may be kept, best first.

        Parts that the file quantizes differently go into a store of 8 bits with the narrower group: one
        without minima where no part has any, else one with them, which holds every part as it is. A part of a
        type without a store makes all of them plain numbers.
        """
        if names[0].endswith(ROUTER):
            return (self.plain,)  # small, and a coarse number would choose another expert
        if self.quantization == "int8" or (self.quantization == "int4" and names[0] in LOOKED_UP):
            return (INT8_LAYOUT,)
        rows = [self.quantized_rows(name) for name in names]
        found = {NATURAL_LAYOUTS[part.type_name] for part in rows if part is not None}
        if self.quantization == "int4" and (None in rows or len(found) > 1):
            return (INT4_LAYOUT,)
        if None in rows or not found:
            return (self.plain,)
        if len(found) == 1:
            return (*found, self.plain)
        group = min(layout.group for layout in found)
        return (MatrixLayout(Store.Q8, group), MatrixLayout(Store.Q8_MIN, group))

    def split(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Return which of some parameters, one below the other, are a matrix together.

        As few matrices as there can be with each part in the store that it would have alone: K-quant mixtures
        keep values in more bits than queries and keys, and no store holds both.
        """
        runs = groupby(names, key=lambda name: self.layouts([name])[0].store)
        return [tuple(run) for _, run in runs]

    def plain_names(self) -> list[str]:
        """Return the parameters of matrices that are kept as plain numbers."""
        return [name for names in self._matrices() for name in names if self.layouts(names)[0] == self.plain]

    @property
    def are_any_quantized(self) -> bool:
        """Whether a matrix is kept in 8 bits or less."""
        return any(layout.group for layout in self._sizes(self._matrices()))

    def num_bytes(self) -> int:
        """Return about how many bytes the matrices take."""
        return math.ceil(sum(self._sizes(self._matrices()).values()))

    def number_format(self) -> str:
        """Return the number format of most weights of the layers, as step-time models call it."""
        sizes = self._sizes(names for names in self._matrices() if names[0] not in LOOKED_UP)
        return _format(max(sizes, key=lambda layout: sizes[layout]))

    def embedding_format(self) -> str:
        """Return the number format of the LM head, likewise."""
        return _format(self.layouts([EMBEDDING if self._config.tie_word_embeddings else LM_HEAD])[0])

    def _sizes(self, matrices: Iterable[tuple[str, ...]]) -> dict[MatrixLayout, float]:
        """Return the bytes of some matrices by their layout."""
        shapes = parameter_shapes(self._config)
        totals: dict[MatrixLayout, float] = {}
        for names in matrices:
            layout = self.layouts(names)[0]
            size = sum(math.prod(shapes[name]) for name in names) * layout.bytes_per_number
            totals[layout] = totals.get(layout, 0.0) + size
        return totals

    def _matrices(self) -> list[tuple[str, ...]]:
        """Return the names of the parameters that make up each packed matrix."""
        matrices: list[tuple[str, ...]] = [(EMBEDDING,)]
        if has_inputs := self._config.layer_input_size > 0:
            matrices += [(LAYER_TABLE,), (LAYER_PROJECTION,)]
        for index in range(self._config.num_layers):
            prefix = f"model.layers.{index}"
            inputs, output = projections(self._config, index)
            matrices += [*self.split([f"{name}.weight" for name in inputs]), (f"{output}.weight",)]
            matrices += [(f"{prefix}{name}",) for name in OWN_INPUT if has_inputs]
            blocks, experts = [f"{prefix}.mlp"], self._config.experts
            if experts is not None and self._config.has_experts(index):
                shared = (f"{prefix}.mlp.shared_expert",) if experts.shared_size else ()
                matrices.append((f"{prefix}{ROUTER}", *(f"{name}_gate.weight" for name in shared)))
                blocks = blocks if experts.is_beside else []
                blocks += [f"{prefix}.mlp.experts.{expert}" for expert in range(experts.num_experts)]
                blocks += shared
            for block in blocks:
                matrices += [
                    tuple(f"{block}.{part}_proj.weight" for part in inner_parts(self._config)),
                    (f"{block}.down_proj.weight",),
                ]
        if not self._config.tie_word_embeddings:
            matrices.append((LM_HEAD,))
        return matrices


def _format(layout: MatrixLayout) -> str:
    return _E2M1_FORMATS[layout.group] if layout.store == Store.E2M1 else _FORMATS[layout.store]
