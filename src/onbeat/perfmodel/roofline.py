"""Step time from data sheets: whichever of arithmetic and memory takes longer, plus launches and links.

Williams, Waterman and Patterson, "Roofline", CACM 2009, per part of a step: matrices, LM head, attention of
chunks, attention of decodes, element-wise operations, all-reduces, transfers between stages. The parts of a
step depend on each other, so their times add up. A decode row that verifies drafts reads its context once
and computes with it for each of its tokens. Where a device's matrix products were measured by their rows, the
arithmetic of matrices and LM head follows these rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import seconds_of_each
from onbeat.files import packaged
from onbeat.perfmodel import shapes as column
from onbeat.perfmodel.device_spec import SMOOTHNESS, DeviceSpec, Link, Parallelism, row_costs
from onbeat.perfmodel.model_spec import ModelSpec
from onbeat.perfmodel.precision import SIXTEEN_BIT, Precision
from onbeat.perfmodel.runs import RunSeconds, StepSeconds
from onbeat.typed import Count, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnDevices:
    """What computes the steps of a replica."""

    model: ModelSpec
    device: DeviceSpec
    precision: Precision = field(default_factory=Precision)
    parallelism: Parallelism = field(default_factory=Parallelism)


def check_parallelism(model: ModelSpec, parallelism: Parallelism) -> None:
    """Raise ConfigError where a model cannot be cut that way."""
    if model.num_heads % parallelism.tensor:
        raise ConfigError(
            f"{model.name} has {model.num_heads} query heads; a tensor-parallel degree of "
            f"{parallelism.tensor} does not divide them. Choose one that does"
        )
    if parallelism.pipeline > model.num_layers:
        raise ConfigError(
            f"{model.name} has {model.num_layers} layers; they cannot make {parallelism.pipeline} stages"
        )


def kv_share(model: ModelSpec, tensor: int) -> float:
    """Return the share of a token's KV that one device of a stage holds: whole heads, copied if too few."""
    return -(-model.num_kv_heads // tensor) / model.num_kv_heads


def attention_dtype(device: DeviceSpec, precision: Precision) -> str:
    """Return the format that attention and LM head compute in: 16 bits where the matrices use fewer."""
    if precision.compute in SIXTEEN_BIT or precision.compute == "fp32":
        return precision.compute
    return next((dtype for dtype in SIXTEEN_BIT if dtype in device.peak_flops), precision.compute)


def _link(device: DeviceSpec, parallelism: Parallelism) -> Link:
    """Return what joins all devices of a replica; of one device, what sends nothing in no time."""
    if parallelism.num_devices == 1:
        return Link(inf, 0.0)
    link = device.link(parallelism.num_devices)
    if link is None:
        raise ConfigError(
            f"{device.name} has no link to a second device; {parallelism} needs one. Use TP 1, PP 1"
        )
    return link


Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RooflineParameters:
    """How much of the peaks is reached, and what a step costs beside them. All are above 0."""

    gemm_efficiency: float = 0.75
    """Of peak arithmetic, in large matrix products."""
    attention_efficiency: float = 0.5
    """Of peak arithmetic, in the attention of chunks."""
    weight_bandwidth_efficiency: float = 0.8
    """Of peak memory bandwidth, reading weights."""
    kv_bandwidth_efficiency: float = 0.7
    """Of peak memory bandwidth, reading KV."""
    elementwise_passes: float = 4.0
    """How often activations are read or written between matrices."""
    layer_seconds: float = 8e-6
    """Launches and gaps of one layer."""
    step_seconds: float = 2e-4
    """What a step costs once."""
    link_latency: float = 1e-5
    """Of one all-reduce or transfer between devices."""
    link_efficiency: float = 0.6
    """Of the links' peak bandwidth in one direction."""
    tile_tokens: float = 64.0
    """Rows of a matrix product that are computed in vain: half a tile of 128, on average. Without meaning
    where the rates of products were measured by their rows."""
    smoothness: float = SMOOTHNESS
    """Exponent p of the soft maximum (a^p + b^p)^(1/p) of arithmetic and memory; the maximum at infinity."""


def default_parameters(device: DeviceSpec, precision: Precision) -> RooflineParameters:
    """Return what kernels reach on a device of this architecture, without a measurement of its own."""
    found = dict(_reached().get(device.architecture, {}))
    narrow, four_bit = found.pop("narrow", {}), found.pop("nvfp4", {})
    if precision.is_narrow:
        found |= narrow | (four_bit if precision.compute == "nvfp4" else {})
    return RooflineParameters(**found)


@cache
def _reached() -> Mapping[str, Mapping[str, Any]]:
    return packaged(dict[str, dict[str, Any]], "onbeat.perfmodel", "architectures.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coefficients:
    """What one unit of a batch's sums costs through all layers of all stages, seconds."""

    fixed: float
    """Of a step."""
    token: float
    """Of each new token, beside the matrices."""
    gemm_token: float
    """Arithmetic of the layers' matrices, per new token."""
    tile_tokens: float
    row_costs: Sequence[float]
    """Of 0, 1, ... rows, in rows at the peak rate; empty without measured rates."""
    row_cost: float
    """Of each row where there are more than in `row_costs`."""
    dense_weights: float
    """Reading the weights that every step reads."""
    expert_weights: float
    """Reading the weights of all experts."""
    expert_miss: float
    """Probability that a token passes a given expert by; 0 without experts."""
    head_row: float
    """Arithmetic of the LM head, per row."""
    head_weights: float
    """Reading the LM head's weights."""
    pair: float
    """Attention arithmetic, per query-key pair."""
    decode_pair: float
    """The same in decodes."""
    kv: float
    """Reading the KV of one token."""
    decode_kv: float
    window: float
    """Most tokens that a windowed layer attends to; infinite without windows."""
    windowed_share: float
    """Share of the KV in layers with a window."""
    windowed_pairs: float
    """Share of the attention arithmetic there."""
    state: float
    """Reading and writing what a row keeps beside KV."""
    smoothness: float


def _coefficients(target: ModelOnDevices, parameters: RooflineParameters | None) -> _Coefficients:
    """Return what the work of a batch costs on one device of each stage.

    Raises
    ------
    ConfigError : degrees that the model cannot be cut into, a number format that the device cannot compute
        in, or devices without a link.
    """
    model, device, precision, parallelism = target.model, target.device, target.precision, target.parallelism
    check_parallelism(model, parallelism)
    reached = parameters or default_parameters(device, precision)
    by_weight, by_kv = 1 / reached.weight_bandwidth_efficiency, 1 / reached.kv_bandwidth_efficiency
    tensor, num_sends = parallelism.tensor, parallelism.pipeline - 1
    peak, bandwidth = device.peak(precision.compute), device.memory_bandwidth
    peak_16 = device.peak(attention_dtype(device, precision))
    head, experts = model.embedding_parameters, model.expert_bytes(precision)
    hidden_bytes = model.hidden_size * precision.activation_bytes
    link = _link(device, parallelism)
    within = device.link(tensor) or link
    num_all_reduces = 2 * model.num_layers if tensor > 1 else 0
    # Reading or writing the activations between matrices once.
    activations = (
        model.num_layers
        * (model.hidden_size + model.inner_width / tensor)
        * precision.activation_bytes
        / bandwidth
    )
    # A ring sends 2 (n - 1) / n of the data (Patarasuk and Yuan, 2009).
    all_reduces = 2 * model.num_layers * hidden_bytes * 2 * (tensor - 1) / tensor / within.bandwidth
    sends = num_sends * hidden_bytes / link.bandwidth
    kv = model.kv_bytes_per_token(precision) * kv_share(model, tensor) / bandwidth * by_kv
    decode_pairs = model.decode_pair_width or model.pair_products
    decode_pair = 2 * decode_pairs / tensor / peak_16 / reached.attention_efficiency
    costs = row_costs(device.product_rates, peak)
    return _Coefficients(
        fixed=reached.step_seconds
        + model.num_layers * reached.layer_seconds
        + num_all_reduces * max(reached.link_latency, within.start_seconds)
        + num_sends * reached.link_latency,
        token=activations * reached.elementwise_passes * by_weight
        + (all_reduces + sends) / reached.link_efficiency,
        gemm_token=2 * model.active_layer_parameters / tensor / peak / reached.gemm_efficiency,
        tile_tokens=0.0 if costs else reached.tile_tokens,
        row_costs=costs,
        row_cost=costs[-1] / (len(costs) - 1) if costs else 1.0,
        dense_weights=model.dense_bytes(precision) / tensor / bandwidth * by_weight,
        expert_weights=experts / tensor / bandwidth * by_weight,
        expert_miss=1 - model.num_experts_per_token / model.num_experts if experts else 0.0,
        head_row=2 * head / tensor / peak_16 / reached.gemm_efficiency,
        head_weights=head * precision.embedding_bytes / tensor / bandwidth * by_weight,
        pair=2 * model.pair_products / tensor / peak_16 / reached.attention_efficiency,
        decode_pair=decode_pair,
        kv=kv,
        decode_kv=max(kv, decode_pair),  # a decode is one query: a pair for each token that is read
        window=inf if model.sliding_window is None else float(model.sliding_window),
        windowed_share=model.sliding_share(model.sliding_kv_width, model.kv_width),
        windowed_pairs=model.sliding_share(model.sliding_pair_width, model.pair_width),
        state=2 * model.state_bytes / tensor / bandwidth * by_kv,
        smoothness=reached.smoothness,
    )


def make_roofline(target: ModelOnDevices, parameters: RooflineParameters | None = None) -> StepSeconds:
    """Return a function from a batch's sums to seconds through all stages; an empty batch takes none.

    Parameters
    ----------
    parameters : `default_parameters` if not given.

    Raises
    ------
    ConfigError : degrees, formats or links that model or device do not have.
    """
    at = _coefficients(target, parameters)
    seconds = _closure(at)
    return StepSeconds(seconds, _run_closure(at, seconds))


_NUM_KEPT = 1 << 12
"""Numbers of tokens, or of rows, whose time is kept: a scheduler comes back to the same few."""
Paces = tuple[tuple[Count, Positive], ...]
"""(new tokens of a step, how many times as long it took), rising."""


def at_paces(roofline: StepSeconds, paces: Paces) -> StepSeconds:
    """Return times as many times as long as a step of few tokens and one of many took.

    Between them the factor goes with the logarithm of the tokens: few rows read the weights, many compute.
    """
    one, run, ((few, first), (many, last)) = roofline.of_one, roofline.of_run, (paces[0], paces[-1])

    @lru_cache(maxsize=_NUM_KEPT)
    def pace(tokens: int) -> float:
        share = math.log(max(tokens, few) / few) / math.log(many / few) if many > few else 1.0
        return float(first * (last / first) ** min(share, 1.0))

    return StepSeconds(
        lambda shape: one(shape) * pace(shape.num_new_tokens),
        lambda shape, contexts: [each * pace(shape.num_new_tokens) for each in run(shape, contexts)],
    )


def _linear_layers(at: _Coefficients) -> Callable[[int], float]:
    """Return the time of what depends on the tokens of a step alone, not on their context."""

    @lru_cache(maxsize=_NUM_KEPT)
    def seconds(tokens: int) -> float:
        unit, weights = at.gemm_token, at.dense_weights
        if tokens < len(at.row_costs):
            products = at.row_costs[tokens] * unit
        else:
            products = unit * at.tile_tokens + tokens * (unit * at.row_cost)
        if at.expert_weights:
            weights += at.expert_weights * (1 - at.expert_miss**tokens)
        return at.fixed + tokens * at.token + _longer(products, weights, at.smoothness)

    return seconds


def _head(at: _Coefficients) -> Callable[[int], float]:
    """Return the time of the LM head by its rows."""

    @lru_cache(maxsize=_NUM_KEPT)
    def seconds(rows: int) -> float:
        unit = at.head_row
        products = at.row_costs[rows] * unit if rows < len(at.row_costs) else rows * (unit * at.row_cost)
        return _longer(products, at.head_weights, at.smoothness)

    return seconds


def _longer(a: float, b: float, p: float) -> float:
    """Return the longer of two times, both above 0, and a little more where they are near each other."""
    return float(a * (1 + (b / a) ** p) ** (1 / p) if a > b else b * (1 + (a / b) ** p) ** (1 / p))


def _closure(at: _Coefficients) -> Callable[[BatchShape], float]:
    """Written flat, on local floats: a simulator asks it a million times, a scheduler in every step."""
    linear_seconds, head_seconds = _linear_layers(at), _head(at)
    pair, kv, decode_pair, decode_kv = at.pair, at.kv, at.decode_pair, at.decode_kv
    window, share, shared_pairs = at.window, at.windowed_share, at.windowed_pairs
    state, p = at.state, at.smoothness

    def seconds(shape: BatchShape) -> float:
        context: float
        pairs: float
        cached: float
        tokens = shape.num_new_tokens
        if tokens == 0:
            return 0.0
        total = linear_seconds(tokens) + shape.num_sequences * state
        if rows := shape.num_lm_head_rows:
            total += head_seconds(rows)
        decodes, context = shape.num_decodes, shape.decode_context_tokens
        if share and context > decodes * window:
            context -= share * (context - decodes * window)
        total += context * decode_kv
        if drafts := shape.num_draft_tokens:
            verifying = shape.num_verify_rows
            queries = 1 + drafts / verifying  # of a row, on average
            total += context * verifying / decodes * (max(kv, queries * decode_pair) - decode_kv)
        if num_chunks := shape.num_chunks:
            in_chunks = tokens - decodes - drafts
            pairs, cached = shape.query_key_pairs, shape.chunk_cached_tokens
            if share:
                pairs -= shared_pairs * max(0.0, pairs - in_chunks * window)
                cached -= share * max(0.0, cached - num_chunks * window)
            a, b = pairs * pair, (cached + in_chunks) * kv  # the longer, as `_longer` has it
            total += a * (1 + (b / a) ** p) ** (1 / p) if a > b else b * (1 + (a / b) ** p) ** (1 / p)
        return total

    return seconds


def _run_closure(at: _Coefficients, seconds: Callable[[BatchShape], float]) -> RunSeconds:
    """Add what `_closure` adds, in its order: the times are equal to the last digit."""
    decode_kv = at.decode_kv

    def of_run(shape: BatchShape, contexts: Sequence[int]) -> list[float]:
        if at.windowed_share or shape.num_chunks or shape.num_draft_tokens:
            return seconds_of_each(seconds, shape, contexts)
        before, shape.decode_context_tokens = shape.decode_context_tokens, 0
        rest = seconds(shape)
        shape.decode_context_tokens = before
        return [rest + context * decode_kv for context in contexts]

    return of_run


def roofline_seconds(
    matrix: Vector, target: ModelOnDevices, parameters: RooflineParameters | None = None
) -> Vector:
    """Return the same as `make_roofline`'s function for many batches at once.

    Parameters
    ----------
    matrix : rows of `shapes.shape_matrix`: [N, F].

    Returns
    -------
    Seconds: [N].

    Raises
    ------
    ConfigError : degrees, formats or links that model or device do not have.
    """
    at = _coefficients(target, parameters)
    tokens, rows = matrix[:, column.NEW_TOKENS], matrix[:, column.LM_HEAD_ROWS]
    weights = at.dense_weights + at.expert_weights * (1 - at.expert_miss**tokens)
    total = (
        at.fixed
        + tokens * at.token
        + _soft_max((_row_costs(tokens, at) + at.tile_tokens) * at.gemm_token, weights, at.smoothness)
    )
    total += np.where(
        rows > 0,
        _soft_max(_row_costs(rows, at) * at.head_row, np.full_like(rows, at.head_weights), at.smoothness),
        0,
    )
    total += _attention(matrix, at) + matrix[:, column.SEQUENCES] * at.state
    return np.where(tokens > 0, total, 0.0)


def _row_costs(rows: Vector, at: _Coefficients) -> Vector:
    if not at.row_costs:
        return rows
    listed = np.asarray(at.row_costs)[np.minimum(rows, len(at.row_costs) - 1).astype(np.int64)]
    return np.where(rows < len(at.row_costs), listed, rows * at.row_cost)


def _attention(matrix: Vector, at: _Coefficients) -> Vector:
    decodes, context = matrix[:, column.DECODES], matrix[:, column.DECODE_CONTEXT_TOKENS]
    drafts, verifying = matrix[:, column.DRAFT_TOKENS], matrix[:, column.VERIFY_ROWS]
    in_chunks = matrix[:, column.NEW_TOKENS] - decodes - drafts
    pairs, cached = matrix[:, column.QUERY_KEY_PAIRS], matrix[:, column.CHUNK_CACHED_TOKENS]
    if at.windowed_share:
        context = context - at.windowed_share * np.maximum(0, context - decodes * at.window)
        pairs = pairs - at.windowed_pairs * np.maximum(0, pairs - in_chunks * at.window)
        num_chunks = matrix[:, column.CHUNKS]
        cached = cached - at.windowed_share * np.maximum(0, cached - num_chunks * at.window)
    chunks = _soft_max(pairs * at.pair, (cached + in_chunks) * at.kv, at.smoothness)
    queries = 1 + drafts / np.maximum(verifying, 1)
    verified = context * verifying / np.maximum(decodes, 1)
    return (
        context * at.decode_kv
        + verified * (np.maximum(at.kv, queries * at.decode_pair) - at.decode_kv)
        + np.where(matrix[:, column.CHUNKS] > 0, chunks, 0)
    )


def _soft_max(a: Vector, b: Vector, p: float) -> Vector:
    high, low = np.maximum(a, b), np.minimum(a, b)
    ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    return np.asarray(high * (1 + ratio**p) ** (1 / p))
