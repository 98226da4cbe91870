"""The first rank: it has the other ranks run every step beside it, and alone gets the logits."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Protocol

import torch

from onbeat.core.errors import EngineDead
from onbeat.engine.attention.base import IntArray
from onbeat.engine.device import Device, DeviceConfig
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.forward import ForwardPass, RowProducts, StepLogits
from onbeat.engine.input_batch import StepInputs
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.owned_folder import OwnedFolder
from onbeat.engine.parallel.group import RankGroup, RanksUnreachable
from onbeat.engine.parallel.layers import load_part
from onbeat.engine.parallel.messages import Loaded, RankJob, Scrub, Started, ToRank, inputs_for_ranks
from onbeat.engine.parallel.shards import Shard
from onbeat.engine.parallel.workers import Workers
from onbeat.engine.weights import Checkpoint


class Followers(Protocol):
    """The other ranks, as the first one sees them; see `Workers`."""

    def send(self, message: ToRank) -> None: ...

    def give_up(self, error: Exception) -> EngineDead: ...

    def check_alive(self) -> None: ...

    def close(self) -> None: ...


class LeadingForward:
    """A forward pass that is split among ranks, of which this process is the first.

    The other ranks get a step's input, not its plan: tokens and block tables as the model runner lays them
    out. So sampled tokens need not be sent to them, and nothing above this seam knows of ranks.

    Parameters
    ----------
    own : this rank's part.
    followers : the other ranks.
    size : how many ranks there are, this one included.
    block_size : tokens of a KV block.
    """

    def __init__(self, own: ForwardPass, followers: Followers, *, size: int, block_size: int) -> None:
        self._own = own
        self._followers = followers
        self._size = size
        self._block_size = block_size
        self._close = weakref.finalize(self, followers.close)

    @property
    def config(self) -> ModelConfig:
        """The model as this rank sees it; its vocabulary is the whole one."""
        return self._own.config

    @property
    def device(self) -> Device:
        return self._own.device

    @property
    def settings(self) -> Mapping[str, str]:
        return {**self._own.settings, "backend": f"torch-tp{self._size}"}

    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        """Run one step on all ranks; see `ForwardPass.run`.

        Raises
        ------
        EngineDead : a rank has failed or ended; no later step can run.
        """
        self._followers.send(inputs_for_ranks(inputs, self._block_size))
        try:
            return self._own.run(inputs, wants_logits=wants_logits)
        except Exception as error:
            # Whatever it was, the other ranks are now somewhere within this step.
            raise self._followers.give_up(error) from error

    def touch_ahead(self) -> bool:
        """Return False: ranks compute with torch, which takes all memory at start."""
        return False

    def products(self) -> RowProducts:
        """Return products by all threads in this process: what all ranks together reach at best."""
        return _AllThreads(self._own.products(), self._size * torch.get_num_threads())

    def scrub(self, block_ids: IntArray) -> None:
        """Make stored values of KV blocks finite, on all ranks."""
        self._followers.send(Scrub(block_ids))
        self._own.scrub(block_ids)

    def check_alive(self) -> None:
        """Raise `EngineDead` if a rank has failed or ended; no step may run meanwhile."""
        self._followers.check_alive()

    def close(self) -> None:
        """End the other ranks' processes; no step may run any more. Being forgotten does the same."""
        self._close()


class _AllThreads:
    """Products with the threads of all ranks, in this process."""

    def __init__(self, products: RowProducts, num_threads: int) -> None:
        self.flops_per_row, self.num_bytes = products.flops_per_row, products.num_bytes
        self._products = products
        self._own_threads = torch.get_num_threads()
        torch.set_num_threads(num_threads)

    def run(self, num_rows: int) -> float:
        return self._products.run(num_rows)

    def close(self) -> None:
        torch.set_num_threads(self._own_threads)
        self._products.close()


def start_ranks(
    config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig, *, num_blocks: int, block_size: int
) -> LeadingForward:
    """Start the processes of the other ranks, and load the model, each its part.

    Parameters
    ----------
    config : its `tensor_parallel_size` must divide the model (`check_degree`).
    checkpoint : of the whole model.
    device : type and threads of each rank.
    num_blocks, block_size : of the KV cache, the same on each rank.

    Raises
    ------
    ModelLoadError : a weight is missing or cannot be read.
    EngineDead : a rank has failed or ended.
    """
    torch.set_num_threads(device.num_threads)
    size = config.tensor_parallel_size
    with OwnedFolder() as folder:
        meeting_file = folder / "meeting"
        first, *others = (
            RankJob(config, device, Shard(rank, size), meeting_file, num_blocks, block_size)
            for rank in range(size)
        )
        workers = Workers(others)
        try:
            own = _load_together(first, checkpoint, workers)
        except BaseException:
            workers.kill()
            raise
    return LeadingForward(own, workers, size=size, block_size=block_size)


def _load_together(job: RankJob, checkpoint: Checkpoint, workers: Workers) -> ForwardPass:
    workers.wait_for(Started)  # one that cannot even start is noticed before the others wait for it
    try:
        own = load_part(job, checkpoint, RankGroup(job.shard, job.meeting_file))
    except RanksUnreachable as error:
        raise workers.give_up(error) from error
    workers.wait_for(Loaded)
    return own
