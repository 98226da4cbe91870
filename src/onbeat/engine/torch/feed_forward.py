"""Feed-forwards: the one of most layers, and those of which each token passes a few.

The second are a mixture of experts (Shazeer et al., 2017; as in Mixtral and Qwen 3).

Legend: T tokens, D model width, F feed-forward width, E experts, K experts of a token, R rows of one expert.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onbeat.engine.model_config import Activation, Experts
from onbeat.engine.torch.kernels import Kernels, Multiply


class FeedForward(NamedTuple):
    """`down(activation(gate(x)) * up(x))`."""

    gate_up_FD: Tensor
    """All of the gate, then all of up: [2 F, D]."""
    down_DF: Tensor

    def run(self, x_TD: Tensor, activation: Activation, kernels: Kernels, multiply: Multiply) -> Tensor:
        """Return the result, [T, D]."""
        gate_up_TF2 = multiply(x_TD, self.gate_up_FD, None)
        del x_TD  # a long prompt's largest tensors are wanted again as soon as nobody reads them
        activated_TF = gate_up_TF2.new_empty(len(gate_up_TF2), gate_up_TF2.shape[1] // 2)
        kernels.act_mul(gate_up_TF2, activation, activated_TF)
        del gate_up_TF2
        return multiply(activated_TF, self.down_DF, None)


class SparseFeedForward(NamedTuple):
    """The sum of a token's experts, weighted by a router. The host waits to learn which they are."""

    router_ED: Tensor
    experts: Sequence[FeedForward]
    sizes: Experts

    def run(self, x_TD: Tensor, activation: Activation, kernels: Kernels, multiply: Multiply) -> Tensor:
        """Return the result, [T, D]."""
        weights_TK, experts_TK = self.route(multiply(x_TD, self.router_ED, None))
        # Rows of an expert come together, so that its weights are read once.
        order = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=len(self.experts)).tolist()
        weights = weights_TK.flatten()
        out_TD = torch.zeros_like(x_TD)
        for expert, chosen in zip(self.experts, torch.split(order, counts), strict=True):
            if len(chosen):
                tokens_R = chosen // self.sizes.num_per_token
                out_RD = expert.run(x_TD[tokens_R], activation, kernels, multiply)
                out_TD.index_add_(0, tokens_R, out_RD * weights[chosen, None])
        return out_TD

    def route(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts in the model's type, and which they are: [T, K] each."""
        probabilities_TE = torch.softmax(scores_TE, dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = probabilities_TE.topk(self.sizes.num_per_token, dim=-1)
        if self.sizes.normalizes:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK.to(scores_TE.dtype), experts_TK
