"""How much KV cache fits beside the weights, and what helps where too little does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.kv_windows import KVGroups, KVWindows
from onbeat.perfmodel.device_spec import CPU, Parallelism
from onbeat.perfmodel.model_spec import ModelSpec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import ModelOnDevices, check_parallelism, kv_share

USUAL_BATCHED_TOKENS = 2048
"""Most tokens of a step, where nobody says otherwise."""
CONTEXT_BYTES = 1 * 2**30
"""What a device's runtime, libraries and captured graphs take; a CPU has none of it."""
SPREAD_OVER = 4096
"""Tokens of a request over which a state of linear attention is spread."""
_ACTIVATION_COPIES = 2
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCapacity:
    """The memory of the device that has least room, bytes, and the blocks that all of them hold."""

    num_blocks: int
    """Of each of the block tables."""
    block_size: int
    """Tokens."""
    weight_bytes: float
    activation_bytes: float
    """Largest of one step, the runtime's own memory included."""
    kv_bytes: float
    """Left for KV."""
    block_bytes: float
    """Of one block of all tables, on one device."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds in all layers."""
        return self.num_blocks * self.block_size


def kv_groups(model: ModelSpec) -> KVGroups:
    """Return how layers share KV blocks where windows give KV back."""
    layer = 2 * model.num_kv_heads * model.head_dim
    sliding = model.sliding_kv_width if model.kv_width else model.num_sliding_layers * layer
    return KVGroups.of((model.kv_width or model.num_layers * layer) - sliding, sliding, layer)


def kv_bytes_in_blocks(model: ModelSpec, precision: Precision, num_tables: int) -> float:
    """Return what KV blocks of so many tables take for each of their tokens."""
    whole = model.kv_width or 2 * model.num_layers * model.num_kv_heads * model.head_dim
    share = kv_groups(model).size * num_tables / whole if num_tables > 1 else 1
    return model.kv_bytes_per_token(precision) * share


def held_bytes_per_token(model: ModelSpec, precision: Precision, num_tables: int = 1) -> float:
    """Return what they take with a state."""
    return kv_bytes_in_blocks(model, precision, num_tables) + model.state_bytes / SPREAD_OVER


def kv_capacity(  # noqa: PLR0913 - each is a flag of its own
    target: ModelOnDevices,
    *,
    block_size: int = 16,
    max_num_batched_tokens: int = USUAL_BATCHED_TOKENS,
    gpu_memory_utilization: float = 0.9,
    least_tokens: int = 1,
    num_tables: int = 1,
    window_length: int = 0,
) -> KVCapacity:
    """Return the KV blocks of one replica.

    Parameters
    ----------
    block_size : tokens of one block.
    max_num_batched_tokens : most tokens of one step; activations are sized for them.
    gpu_memory_utilization : share of the device's memory that may be used, in (0, 1].
    least_tokens : that the KV cache must hold of one request.
    num_tables, window_length : where windows give KV back (`KVGroups.windows`).

    Raises
    ------
    DoesNotFit : so much KV does not fit beside weights and activations; `what_fits` finds what helps.
    ConfigError : an option out of range, or a model that cannot be cut that way.
    """
    model, device, parallelism, precision = target.model, target.device, target.parallelism, target.precision
    check_parallelism(model, parallelism)
    usable = device.memory_bytes * gpu_memory_utilization
    weights = _weight_bytes(model, parallelism, precision)
    activations = _activation_bytes(model, parallelism, precision, max_num_batched_tokens)
    if device.id != CPU:
        activations += CONTEXT_BYTES
    block_bytes = (
        held_bytes_per_token(model, precision, num_tables)
        * _most_layers(model, parallelism)
        / model.num_layers
        * kv_share(model, parallelism.tensor)
        * block_size
    )
    left = usable - weights - activations
    windows = KVWindows.of(num_tables, window_length + max_num_batched_tokens, block_size)
    kv_needed = windows.num_blocks(-(-least_tokens // block_size)) * block_bytes / num_tables
    if left < kv_needed:
        raise DoesNotFit(
            f"{model.name} does not fit {device.name} ({parallelism}, {precision}): a device needs "
            f"{(weights + activations + kv_needed) / _GIB:.1f} GiB of memory and has {usable / _GIB:.1f} "
            f"({gpu_memory_utilization:.0%} of {device.memory_bytes / _GIB:.1f}). It needs "
            f"{weights / _GIB:.1f} for weights, {activations / _GIB:.1f} for activations and runtime, "
            f"{kv_needed / _GIB:.2g} for KV of {least_tokens} token{'s' if least_tokens > 1 else ''}"
        )
    return KVCapacity(
        num_blocks=int(left // block_bytes),
        block_size=block_size,
        weight_bytes=weights,
        activation_bytes=activations,
        kv_bytes=left,
        block_bytes=block_bytes,
    )


def _most_layers(model: ModelSpec, parallelism: Parallelism) -> int:
    """Layers of the longest stage."""
    return -(-model.num_layers // parallelism.pipeline)


def _weight_bytes(model: ModelSpec, parallelism: Parallelism, precision: Precision) -> float:
    """Of one device of the fullest stage: the longest, with the embedding or the LM head."""
    layers = (model.dense_bytes(precision) + model.expert_bytes(precision)) * (
        _most_layers(model, parallelism) / model.num_layers
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


@dataclass(frozen=True, slots=True)
class Change:
    """Another way to run a model that does not fit as it is."""

    tensor: int
    pipeline: int
    weights: str
    """Number format, as the caller spells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What may be changed where a model does not fit, by the flags of whoever is told."""

    tensor: str = "--tp"
    pipeline: str | None = "--pp"
    """None: there are no stages."""
    weights: str = "--dtype"
    formats: Sequence[str] = ()
    """Narrower ones, the widest first."""
    most_devices: float = inf
    """Of one replica."""


def what_fits(now: Change, model: ModelSpec, choices: Choices, attempt: Callable[[Change], object]) -> str:
    """Return what helps where a model does not fit, as a sentence: each change was tried, and is the least.

    That is the smallest tensor-parallel degree, the fewest stages and the widest format, each alone; where
    none of them is enough, the widest format that fits with both degrees free, on the fewest devices.

    Parameters
    ----------
    now : what does not fit.
    attempt : tries one; raises ConfigError where it does not do.
    """

    def first(candidates: Iterator[Change] | Sequence[Change]) -> list[Change]:
        return next(([each] for each in candidates if _does(attempt, each)), [])

    degrees = [each for each in range(now.tensor, model.num_heads + 1) if model.num_heads % each == 0]
    stages = range(now.pipeline, model.num_layers + 1) if choices.pipeline else [now.pipeline]
    pairs = sorted(
        (
            (tensor, pipeline)
            for tensor in degrees
            for pipeline in stages
            if tensor * pipeline <= choices.most_devices
        ),
        key=lambda pair: (pair[0] * pair[1], pair[1]),
    )
    found = first([Change(t, p, now.weights) for t, p in pairs if p == now.pipeline and t > now.tensor])
    found += first([Change(t, p, now.weights) for t, p in pairs if t == now.tensor and p > now.pipeline])
    found += first([Change(now.tensor, now.pipeline, weights) for weights in choices.formats])
    found = found or first(
        Change(t, p, weights) for weights in (now.weights, *choices.formats) for t, p in pairs
    )
    if not found:
        return "No degree and no format of the weights that was tried fits: use a device with more memory"
    return f"What fits: {', or '.join(_spelled(now, each, choices) for each in found)}"


def _does(attempt: Callable[[Change], object], change: Change) -> bool:
    try:
        attempt(change)
    except ConfigError:
        return False
    return True


def _spelled(now: Change, change: Change, choices: Choices) -> str:
    flags = [
        f"{flag} {new}"
        for flag, old, new in (
            (choices.tensor, now.tensor, change.tensor),
            (choices.pipeline, now.pipeline, change.pipeline),
            (choices.weights, now.weights, change.weights),
        )
        if new != old
    ]
    return " ".join(flags)
