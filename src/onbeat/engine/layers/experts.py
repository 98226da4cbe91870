"""A feed-forward of which each token passes a few parts (Shazeer et al., 2017; as in Mixtral and Qwen 3).

Legend: T tokens, D (as an input: I) model width, E experts, K experts of a token, R rows of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onbeat.engine.layers.linear import Linear
from onbeat.engine.layers.mlp import GatedMLP
from onbeat.engine.model_config import Experts


class SparseMLP:
    """The sum of a token's experts, weighted by its router.

    Parameters
    ----------
    router : one number for each expert.
    experts : all of them.
    sizes : how many a token passes, and how they are weighted.
    """

    def __init__(self, router: Linear, experts: Sequence[GatedMLP], sizes: Experts) -> None:
        self.router = router
        self.experts = experts
        self.sizes = sizes

    def __call__(self, x_TI: Tensor) -> Tensor:
        weights_TK, experts_TK = self.route(x_TI)
        num_per_token = self.sizes.num_per_token
        # Rows of an expert come together, so that its weights are read once.
        order = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=len(self.experts)).tolist()
        weights = weights_TK.flatten()
        out_TD = torch.zeros_like(x_TI)
        for expert, chosen in zip(self.experts, torch.split(order, counts), strict=True):
            if len(chosen):
                tokens_R = chosen // num_per_token
                out_RD = expert(x_TI[tokens_R]) * weights[chosen, None]
                out_TD.index_add_(0, tokens_R, out_RD)
        return out_TD

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts in the model's type, and which they are: [T, K] each."""
        probabilities_TE = torch.softmax(self.router(x_TD), dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = probabilities_TE.topk(self.sizes.num_per_token, dim=-1)
        if self.sizes.normalizes:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK.to(x_TD.dtype), experts_TK
