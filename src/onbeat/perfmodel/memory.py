"""How much KV cache fits beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.device_spec import CPU, DeviceSpec
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline_terms import check_parallelism, kv_share

CONTEXT_BYTES = 1 * 2**30
"""What a device's runtime, libraries and captured graphs take; a CPU has none of it."""
_ACTIVATION_COPIES = 2
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCapacity:
    """The memory of the device that has least room, bytes, and the blocks that all of them hold."""

    num_blocks: int
    block_size: int
    """Tokens."""
    usable_bytes: float
    """Device memory times the share that may be used."""
    weight_bytes: float
    activation_bytes: float
    """Largest of one step, the runtime's own memory included."""
    kv_bytes: float
    """Left for KV."""
    block_bytes: float
    """Of one block, on one device."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size


def kv_capacity(  # noqa: PLR0913 - each is a flag of its own
    model: ModelSpec,
    device: DeviceSpec,
    *,
    parallelism: Parallelism | None = None,
    precision: Precision | None = None,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    gpu_memory_utilization: float = 0.9,
) -> KVCapacity:
    """Return the KV blocks of one replica.

    Parameters
    ----------
    block_size : tokens of one block.
    max_num_batched_tokens : most tokens of one step; activations are sized for them.
    gpu_memory_utilization : share of the device's memory that may be used, in (0, 1].

    Raises
    ------
    ConfigError : weights and activations do not fit; the message says by how much and what helps.
    """
    parallelism, precision = parallelism or Parallelism(), precision or Precision()
    _check(block_size, max_num_batched_tokens, gpu_memory_utilization)
    check_parallelism(model, parallelism)
    usable = device.memory_bytes * gpu_memory_utilization
    weights = _weight_bytes(model, parallelism, precision)
    activations = _activation_bytes(model, parallelism, precision, max_num_batched_tokens)
    if device.id != CPU:
        activations += CONTEXT_BYTES
    block_bytes = (
        model.kv_bytes_per_token(precision)
        * _most_layers(model, parallelism)
        / model.num_layers
        * kv_share(model, parallelism.tensor)
        * block_size
    )
    left = usable - weights - activations
    if left < block_bytes:
        raise ConfigError(
            f"{model.name} does not fit {device.name} ({parallelism}, {precision}): {weights / _GIB:.1f} GiB "
            f"of weights and {activations / _GIB:.1f} GiB of activations and runtime leave nothing for KV of "
            f"the {usable / _GIB:.1f} GiB usable a device ({gpu_memory_utilization:.0%} of "
            f"{device.memory_bytes / _GIB:.1f}). {_cure(weights, usable, parallelism, precision)}"
        )
    return KVCapacity(
        num_blocks=int(left // block_bytes),
        block_size=block_size,
        usable_bytes=usable,
        weight_bytes=weights,
        activation_bytes=activations,
        kv_bytes=left,
        block_bytes=block_bytes,
    )


def _check(block_size: int, max_num_batched_tokens: int, utilization: float) -> None:
    for name, value in (("block_size", block_size), ("max_num_batched_tokens", max_num_batched_tokens)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if not 0 < utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization is {utilization}; it must be above 0 and at most 1")


def _most_layers(model: ModelSpec, parallelism: Parallelism) -> int:
    """Layers of the longest stage."""
    return -(-model.num_layers // parallelism.pipeline)


def _weight_bytes(model: ModelSpec, parallelism: Parallelism, precision: Precision) -> float:
    """Of one device of the fullest stage: the longest, with the embedding or the LM head."""
    layers = (
        model.layer_parameters * precision.weight_bytes * _most_layers(model, parallelism) / model.num_layers
    )
    both_ends = parallelism.pipeline == 1 and not model.ties_embeddings
    embeddings = model.embedding_parameters * precision.embedding_bytes * (2 if both_ends else 1)
    return (layers + embeddings) / parallelism.tensor


def _activation_bytes(
    model: ModelSpec, parallelism: Parallelism, precision: Precision, num_tokens: int
) -> float:
    """Hidden states and the widest inner activations of one layer, in and out; float32 logits of a batch."""
    width = 2 * model.hidden_size + model.inner_width / parallelism.tensor
    logits = min(num_tokens, 256) * model.vocab_size * 4
    return _ACTIVATION_COPIES * num_tokens * width * precision.activation_bytes + logits


def _cure(weights: float, usable: float, parallelism: Parallelism, precision: Precision) -> str:
    needed = parallelism.tensor
    while weights * parallelism.tensor / needed > 0.8 * usable:
        needed *= 2
    needed = max(needed, 2 * parallelism.tensor)
    narrower = "" if precision.weight_bytes <= 1 else " or weights in fp8, int8 or int4,"
    return f"Use a tensor-parallel degree of {needed} or more,{narrower} or a device with more memory"
