"""A rank's part of a model, ready to run steps together with the other ranks."""

from __future__ import annotations

from onbeat.engine.forward import TorchForward
from onbeat.engine.models.registry import build_model
from onbeat.engine.parallel.group import RankGroup
from onbeat.engine.parallel.layers import SplitAmongRanks
from onbeat.engine.parallel.messages import RankJob
from onbeat.engine.parallel.shards import ShardedCheckpoint
from onbeat.engine.weights import Checkpoint


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
        dtype=job.device.dtype,
        device=job.device.device,
        ranks=SplitAmongRanks(group, checkpoint.config.vocab_size),
    )
    return TorchForward(model, num_blocks=job.num_blocks, block_size=job.block_size)
