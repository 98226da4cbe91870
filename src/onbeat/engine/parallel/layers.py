"""A rank's part of a model, whose products are split among the ranks of a group.

Legend: T tokens or sampling rows, I input width, V vocabulary, W a rank's share of it, D model width.
"""

# ruff: noqa: N803, N806 -- tensor names carry shape suffixes

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from onbeat.engine.layers.linear import Linear
from onbeat.engine.models.model import build_model
from onbeat.engine.parallel.group import RankGroup
from onbeat.engine.parallel.messages import RankJob
from onbeat.engine.parallel.shards import ShardedCheckpoint, vocabulary_rows
from onbeat.engine.torch_backend import TorchForward
from onbeat.engine.torch_types import torch_device, torch_dtype
from onbeat.engine.weights import Checkpoint


class SplitAmongRanks:
    """Builds the split products of one rank's model; see `Ranks`.

    Parameters
    ----------
    group : the rank's connections.
    vocab_size : of the whole model.
    """

    def __init__(self, group: RankGroup, vocab_size: int) -> None:
        self._group = group
        self._vocab_size = vocab_size

    def sum_up(self, product: Linear) -> Linear:
        return SummedLinear(product, self._group)

    def join(self, product: Linear) -> Linear:
        return JoinedLinear(product, self._group, self._vocab_size)

    def vocabulary_part(self, weight_VD: Tensor) -> Tensor:
        return weight_VD[vocabulary_rows(self._vocab_size, self._group.shard)]


class SummedLinear:
    """A product whose inputs are split: each rank has some columns of the weight."""

    def __init__(self, partial: Linear, group: RankGroup) -> None:
        self.partial = partial
        self.group = group

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.group.sum_up(self.partial(x_TI))


class JoinedLinear:
    """An output head that is split by vocabulary. Its logits come together on the first rank, which samples.

    The head is a large share of a small model's work, so it is worth splitting. That the other ranks never
    see the logits saves them the sampling, and no two ranks can come to different tokens.
    """

    def __init__(self, part: Linear, group: RankGroup, vocab_size: int) -> None:
        self.part = part
        self.group = group
        self.vocab_size = vocab_size
        self.width = -(-vocab_size // group.shard.size)

    def __call__(self, x_TI: Tensor) -> Tensor:
        part_TW = self.part(x_TI)
        # Every rank sends as much, though the last ones may have fewer tokens.
        parts = self.group.gather(pad(part_TW, (0, self.width - part_TW.shape[1])).contiguous())
        if not self.group.shard.is_first:
            return part_TW
        logits_TV = part_TW.new_empty(len(part_TW), self.vocab_size)
        for start, part in zip(range(0, self.vocab_size, self.width), parts, strict=False):
            logits_TV[:, start : start + self.width] = part[:, : self.vocab_size - start]
        return logits_TV


def load_part(job: RankJob, checkpoint: Checkpoint, group: RankGroup) -> TorchForward:
    """Load one rank's weights and make its KV cache.

    Parameters
    ----------
    job : what to load.
    checkpoint : of the whole model.
    group : the rank's connections to the others; every step of the result needs all of them.

    Raises
    ------
    ModelLoadError : a weight is missing or cannot be read.
    """
    model = build_model(
        ShardedCheckpoint(checkpoint, job.shard),
        dtype=torch_dtype(job.device.dtype),
        device=torch_device(job.device.device),
        ranks=SplitAmongRanks(group, checkpoint.config.vocab_size),
    )
    return TorchForward(model, num_blocks=job.num_blocks, block_size=job.block_size)
