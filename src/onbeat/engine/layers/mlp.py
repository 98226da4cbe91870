"""Gated feed-forward layer.

Legend: T tokens, D model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional

from onbeat.engine.layers.linear import Linear
from onbeat.engine.model_config import Activation


def _silu(x: Tensor) -> Tensor:
    return functional.silu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu_pytorch_tanh": _gelu_tanh,
}


class GatedMLP:
    """`down(activation(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(self.activation(gate_TF).mul_(up_TF))
