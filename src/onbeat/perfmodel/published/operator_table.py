"""Step time as the sum of its operators' measured times.

The composition is that of Vidur (Agrawal et al., MLSys 2024): operators that see only the number of tokens;
attention of decodes by (sequences, mean context); attention of chunks as one equivalent chunk; communication
by bytes. Departures: times are interpolated, and extrapolated, in place of a random forest's look-up table;
the equivalent chunk keeps the exact number of query-key pairs; embedding and LM head, which Vidur leaves
out, can be counted. Rows that verify drafts, which Vidur does not know, read their context once, as decodes,
unless the arithmetic of all their tokens takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.published.interpolate import PiecewiseLinear
from onbeat.perfmodel.published.operator_curves import (
    EMBEDDING,
    LAYER_OPERATORS,
    UP_PROJECTION,
    read_attention,
    read_network_curve,
    read_token_curves,
)
from onbeat.perfmodel.published.operator_files import OperatorFiles, find_operator_files
from onbeat.perfmodel.shapes import draft_pairs

_ALL_REDUCES = 2  # a layer: after attention and after the MLP
_LONG_CHUNK = 4096
"""Tokens of a chunk whose attention is bound by arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTableOptions:
    """What is counted beside the measured layers."""

    counts_embedding: bool = True
    counts_lm_head: bool = True
    """As the measured up-projection, scaled by the number of weights."""
    decode_batching_overhead: float = 0.1
    """Share on top of decode attention where several sequences run together (Vidur's)."""
    chunk_batching_overhead: float = 0.1
    """The same for several chunks."""
    all_reduce_launch: float = 2e-5
    """Seconds on top of the measured time of each all-reduce (Vidur's)."""


VIDUR_OPTIONS = OperatorTableOptions(counts_embedding=False, counts_lm_head=False)
"""What Vidur counts."""


def operator_table_closure(
    path: Path, *, model: ModelSpec, parallelism: Parallelism, options: OperatorTableOptions | None = None
) -> Callable[[BatchShape], float]:
    """Return the step time of a model by the profiles of its operators.

    Parameters
    ----------
    path : see `find_operator_files`.

    Raises
    ------
    ConfigError : a file is missing or malformed, or was measured for another model or parallelism; a model
        with experts.
    """
    if model.is_moe:
        raise ConfigError(f"operator profiles know no experts, but {model.name} has {model.num_experts}")
    options = options or OperatorTableOptions()
    files = find_operator_files(path)
    curves = read_token_curves(files.mlp, model, parallelism.tensor)
    tokens = _token_seconds(curves, files, model, parallelism, options)
    lm_head = _lm_head_seconds(curves[UP_PROJECTION], model) if options.counts_lm_head else None
    decode, chunk = read_attention(files.attention, model, parallelism.tensor)
    layers = model.num_layers
    layers_of_decodes = layers * (1 + options.decode_batching_overhead)
    layers_of_chunks = layers * (1 + options.chunk_batching_overhead)
    pair_seconds = chunk(_LONG_CHUNK, 0) / (_LONG_CHUNK * (_LONG_CHUNK + 1) / 2)

    def seconds(shape: BatchShape) -> float:
        total = tokens(shape.num_new_tokens)
        if decodes := shape.num_decodes:
            # A decode's context counts its own token, a profile's cache does not.
            cached = shape.decode_context_tokens / decodes - 1
            attention = decode(decodes, cached)
            if shape.num_draft_tokens:
                pairs = shape.decode_context_tokens + draft_pairs(shape)
                attention = max(attention, pairs * pair_seconds)
            total += (layers_of_decodes if decodes > 1 else layers) * attention
        if chunks := shape.num_chunks:
            length = math.sqrt(shape.sum_chunk_squares)
            cached = max(0.0, shape.query_key_pairs / length - (length + 1) / 2)
            total += (layers_of_chunks if chunks > 1 else layers) * chunk(length, cached)
        if lm_head is not None and shape.num_lm_head_rows:
            total += lm_head(shape.num_lm_head_rows)
        return total

    return seconds


def _token_seconds(
    curves: dict[str, PiecewiseLinear],
    files: OperatorFiles,
    model: ModelSpec,
    parallelism: Parallelism,
    options: OperatorTableOptions,
) -> PiecewiseLinear:
    """Return all that depends on the number of new tokens alone, of all layers and stages, as one curve."""
    layers = model.num_layers
    parts = [(layers, curves[name]) for name in LAYER_OPERATORS if name in curves]
    constant = 0.0
    if options.counts_embedding:
        parts.append((1, curves[EMBEDDING]))
    if parallelism.tensor > 1:
        reduce = read_network_curve(files.all_reduce, "all_reduce", parallelism.tensor, model.hidden_size)
        parts.append((_ALL_REDUCES * layers, reduce))
        constant = _ALL_REDUCES * layers * options.all_reduce_launch
    if parallelism.pipeline > 1:
        send = read_network_curve(files.send_recv, "send_recv", 2, model.hidden_size)
        parts.append((parallelism.pipeline - 1, send))
    return _sum_of(parts, constant)


def _sum_of(parts: Sequence[tuple[int, PiecewiseLinear]], constant: float) -> PiecewiseLinear:
    """Return the weighted sum as one curve: a step then costs one look-up, not one for each operator."""
    sizes = sorted({size for _, curve in parts for size in curve.sizes if size >= 1} | {1.0})
    # The sum goes on with the slope of its own upper half; points far out hand it the slopes of its parts.
    sizes += [2 * sizes[-1], 4 * sizes[-1]]
    values = [constant + sum(weight * curve(size) for weight, curve in parts) for size in sizes]
    return PiecewiseLinear(sizes, values)


def _lm_head_seconds(up_projection: PiecewiseLinear, model: ModelSpec) -> PiecewiseLinear:
    """Return the LM head by its rows; its matrix has the vocabulary where that of the MLP has its width."""
    num_matrices = 2 if model.is_gated_mlp else 1
    scale = model.vocab_size / (num_matrices * model.intermediate_size)
    sizes = up_projection.sizes
    return PiecewiseLinear(sizes, [scale * up_projection(size) for size in sizes])
