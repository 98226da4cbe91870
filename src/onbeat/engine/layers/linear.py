"""Matrix products with weights: the plain operator, or oneDNN's with weights repacked once at load.

Legend: T tokens, I input width, O output width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """`y_TO = x_TI @ weight_OI.T + bias_O`."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...


class PlainLinear:
    """`torch.nn.functional.linear` over the weight as it is stored."""

    kernel = "torch"
    """Name for logs."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        return functional.linear(x_TI, self.weight_OI, self.bias_O)


class PackedLinear:
    """oneDNN's product over a weight in the blocked layout its kernel reads.

    `functional.linear` repacks a bfloat16 weight in every call, which doubles the time of a decode step.
    """

    kernel = "onednn-packed"

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), 1)
        self.bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.weight_OI, self.bias_O, "none", [], "")
        return out_TO


def select_linear_kernel(dtype: torch.dtype, device: torch.device) -> type[PlainLinear] | type[PackedLinear]:
    """Return the fastest kernel that works here.

    The packed operator is private to torch, so it is tried on a small product before it is believed; a torch
    without it (or one whose result is off) gets the plain operator.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return PlainLinear
    return PackedLinear if _packed_linear_works() else PlainLinear


def _packed_linear_works() -> bool:
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(48, 32, generator=generator).to(torch.bfloat16)
    bias_O = torch.randn(48, generator=generator).to(torch.bfloat16)
    x_TI = torch.randn(5, 32, generator=generator).to(torch.bfloat16)
    expected_TO = functional.linear(x_TI.float(), weight_OI.float(), bias_O.float())
    try:
        actual_TO = PackedLinear(weight_OI, bias_O)(x_TI)
    except (AttributeError, RuntimeError):
        return False
    return bool(torch.allclose(actual_TO.float(), expected_TO, rtol=0.02, atol=0.1))
