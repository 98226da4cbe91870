"""The work of a batch on a replica, as seconds at the device's peak rates: what the roofline scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.device_spec import DeviceSpec, Link
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import SIXTEEN_BIT, Precision
from onbeat.perfmodel.product_rates import row_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineTerms:
    """Seconds per unit of a batch's sums, through all layers of all stages, on one device of each stage."""

    num_layers: int
    gemm_token: float
    """Arithmetic of the layers' matrices, per new token."""
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
    kv_token: float
    """Reading the KV of one token."""
    state: float
    """Reading and writing what a row keeps beside KV."""
    elementwise_token: float
    """Reading or writing the activations between matrices once, per new token."""
    num_all_reduces: int
    all_reduce_start: float
    """Of one all-reduce, at least."""
    all_reduce_token: float
    """All of a step's all-reduces, per new token, on the links' peak rate."""
    num_sends: int
    send_token: float
    """All transfers between stages, per new token."""
    window: float
    """Most tokens that a windowed layer attends to; infinite without windows."""
    windowed_share: float
    """Share of the KV in layers with a window."""
    windowed_pairs: float
    """Share of the attention arithmetic there."""
    row_costs: Sequence[float]
    """See `product_rates.row_costs`."""


def roofline_terms(
    model: ModelSpec, device: DeviceSpec, *, parallelism: Parallelism, precision: Precision
) -> RooflineTerms:
    """Return the terms of a model on devices.

    Raises
    ------
    ConfigError : degrees that the model cannot be cut into, a number format that the device cannot compute
        in, or devices without a link.
    """
    check_parallelism(model, parallelism)
    tensor = parallelism.tensor
    peak = device.peak(precision.compute)
    peak_16 = device.peak(attention_dtype(device, precision))
    bandwidth = device.memory_bandwidth
    head = model.embedding_parameters
    experts = model.expert_bytes(precision)
    hidden_bytes = model.hidden_size * precision.activation_bytes
    link = _link(device, parallelism)
    within = device.link(tensor) or link
    return RooflineTerms(
        num_layers=model.num_layers,
        gemm_token=2 * model.active_layer_parameters / tensor / peak,
        dense_weights=model.dense_bytes(precision) / tensor / bandwidth,
        expert_weights=experts / tensor / bandwidth,
        expert_miss=1 - model.num_experts_per_token / model.num_experts if experts else 0.0,
        head_row=2 * head / tensor / peak_16,
        head_weights=head * precision.embedding_bytes / tensor / bandwidth,
        pair=2 * model.pair_products / tensor / peak_16,
        decode_pair=2 * (model.decode_pair_width or model.pair_products) / tensor / peak_16,
        kv_token=model.kv_bytes_per_token(precision) * kv_share(model, tensor) / bandwidth,
        state=2 * model.state_bytes / tensor / bandwidth,
        elementwise_token=model.num_layers
        * (model.hidden_size + model.inner_width / tensor)
        * precision.activation_bytes
        / bandwidth,
        num_all_reduces=2 * model.num_layers if tensor > 1 else 0,
        # A ring sends 2 (n - 1) / n of the data (Patarasuk and Yuan, 2009).
        all_reduce_token=2 * model.num_layers * hidden_bytes * 2 * (tensor - 1) / tensor / within.bandwidth,
        all_reduce_start=within.start_seconds,
        num_sends=parallelism.pipeline - 1,
        send_token=(parallelism.pipeline - 1) * hidden_bytes / link.bandwidth,
        window=float("inf") if model.sliding_window is None else float(model.sliding_window),
        windowed_share=model.sliding_share(model.sliding_kv_width, model.kv_width),
        windowed_pairs=model.sliding_share(model.sliding_pair_width, model.pair_width),
        row_costs=row_costs(device.product_rates, peak),
    )


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
