"""Root mean square normalisation.

Legend: D normalised width (last dimension).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """Normalise the last dimension in float32 and scale it.

    Parameters
    ----------
    weight_D : the scale, in the model's type.
    eps : added to the mean square.
    offset : added to the weight in float32 (Gemma stores `scale - 1`).
    rounds_once : the product is taken in float32 before rounding, as Gemma's and OLMo's references do, else
        after rounding, as Llama's does.
    """

    def __init__(
        self, weight_D: Tensor, eps: float, offset: float = 0.0, *, rounds_once: bool = False
    ) -> None:
        self.shape = tuple(weight_D.shape)
        self.eps = eps
        self.dtype = weight_D.dtype
        self.scale_D = weight_D.float() + offset if offset else weight_D
        self._apply = self._fused
        if self.dtype == torch.float64:
            self._apply = self._by_steps_once if rounds_once else self._by_steps
        elif rounds_once:
            self.scale_D = self.scale_D.float()
            self._apply = self._fused_float32

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(x)

    def _fused(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.shape, self.scale_D, self.eps)

    def _fused_float32(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.shape, self.scale_D, self.eps).to(self.dtype)

    # In float64 the reference implementations still normalise in float32. To agree with them to more digits
    # than float32 has, the same operators must run in the same order.
    def _by_steps(self, x: Tensor) -> Tensor:
        return self.scale_D * self._normalise_float32(x).to(self.dtype)

    def _by_steps_once(self, x: Tensor) -> Tensor:
        return (self._normalise_float32(x) * self.scale_D).to(self.dtype)

    def _normalise_float32(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
