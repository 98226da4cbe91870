"""The least time that a step can take: bytes over read bandwidth or operations over the matmul rate.

The parts of a step depend on each other, so each takes at least the larger of the two, and their times add up
(Williams, Waterman and Patterson, "Roofline", CACM 2009). Counted are weights and KV read and multiplied, and
nothing else: no activations, no writes, no norms.
"""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.perfmodel.model_sizes import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step of equal rows, each with the logits of its last token.

    A decode has one new token a row; a prefill is one row that has nothing cached.
    """

    batch: int
    new_tokens: int
    """Of each row."""
    context: int
    """Tokens that a row's last new token sees, itself included."""

    @classmethod
    def decode(cls, batch: int, context: int) -> Case:
        return cls(batch=batch, new_tokens=1, context=context)

    @classmethod
    def prefill(cls, num_tokens: int) -> Case:
        return cls(batch=1, new_tokens=num_tokens, context=num_tokens)

    @property
    def name(self) -> str:
        if self.new_tokens > 1:
            return f"prefill of {self.new_tokens} tokens"
        return f"decode, batch {self.batch}, context {self.context}"

    @property
    def num_tokens(self) -> int:
        return self.batch * self.new_tokens

    def pairs(self, window: float = float("inf")) -> float:
        """Return the query-key pairs of all rows; a token sees at most `window` tokens."""
        first = self.context - self.new_tokens + 1
        unlimited = int(min(max(window - first + 1, 0), self.new_tokens))
        row = unlimited * (2 * first + unlimited - 1) / 2
        if unlimited < self.new_tokens:
            row += (self.new_tokens - unlimited) * window
        return self.batch * row

    def kv_tokens(self, window: float = float("inf")) -> float:
        """Return the tokens whose keys and values are read, once for each row."""
        return self.batch * min(self.context, window + self.new_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """What the machine sustains."""

    read: float
    """Bytes per second."""
    multiply: float
    """Operations per second of a matrix product."""

    def __str__(self) -> str:
        return f"{self.read / 1e9:.1f} GB/s, {self.multiply / 1e9:.0f} GFLOP/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """What a step reads of the weights."""

    layers: float
    head: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds of the parts of a step."""

    layers: float
    """Matrix products of the layers."""
    head: float
    attention: float

    @property
    def total(self) -> float:
        return self.layers + self.head + self.attention


def floor_of(
    case: Case, model: ModelSpec, weights: WeightBytes, kv_bytes: float, rates: MachineRates
) -> Floor:
    """Return the least time of a step.

    Parameters
    ----------
    kv_bytes : of one number in the KV cache.
    """
    matrices = 2 * model.active_layer_parameters * case.num_tokens
    return Floor(
        layers=_larger(weights.layers, matrices, rates),
        head=_larger(weights.head, 2 * model.embedding_parameters * case.batch, rates),
        attention=_attention(case, model, kv_bytes, rates),
    )


def _attention(case: Case, model: ModelSpec, kv_bytes: float, rates: MachineRates) -> float:
    per_pair = 4 * model.num_heads * model.head_dim
    per_token = 2 * model.num_kv_heads * model.head_dim * kv_bytes
    windows = [(model.num_layers - model.num_sliding_layers, float("inf"))]
    if model.sliding_window is not None:
        windows.append((model.num_sliding_layers, float(model.sliding_window)))
    return sum(
        num_layers * _larger(per_token * case.kv_tokens(window), per_pair * case.pairs(window), rates)
        for num_layers, window in windows
    )


def _larger(num_bytes: float, operations: float, rates: MachineRates) -> float:
    return max(num_bytes / rates.read, operations / rates.multiply)
