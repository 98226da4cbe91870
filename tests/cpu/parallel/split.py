"""A forward pass that is split among threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from onbeat.core.errors import EngineDead
from onbeat.core.options import make
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.forward import ForwardPass
from onbeat.engine.parallel.group import RankGroup
from onbeat.engine.parallel.layers import load_part
from onbeat.engine.parallel.leader import LeadingForward
from onbeat.engine.parallel.messages import RankJob, ToRank
from onbeat.engine.parallel.rank import serve_steps
from onbeat.engine.torch_types import numpy_dtype
from onbeat.engine.weights import Checkpoint
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.forwards import MakeForward
from tests.cpu.parallel.threads import run_ranks

MakeSplit = Callable[[str, int], MakeForward]
"""From a family's name and how many ranks there are to what makes forward passes."""


class ThreadFollowers:
    """The ranks after the first, in threads; they end when the connections are closed."""

    def __init__(self, forwards: Sequence[ForwardPass]) -> None:
        self.forwards = forwards
        self._pool = ThreadPoolExecutor(len(forwards))
        self._connections: list[Connection] = []
        self._futures: list[Future[None]] = []
        for forward in forwards:
            ours, theirs = Pipe()
            self._connections.append(ours)
            self._futures.append(self._pool.submit(serve_steps, theirs, forward))

    def send(self, message: ToRank) -> None:
        for connection in self._connections:
            connection.send(message)

    def give_up(self, error: Exception) -> EngineDead:
        return EngineDead(f"rank 0 failed: {error}")

    def check_alive(self) -> None:
        assert not any(future.done() for future in self._futures)

    def close(self) -> None:
        for connection, future in zip(self._connections, self._futures, strict=True):
            connection.close()
            assert isinstance(future.exception(), EOFError)
        self._pool.shutdown()


def split_forward(
    checkpoint: Checkpoint, size: int, *, dtype: torch.dtype, num_blocks: int, block_size: int
) -> LeadingForward:
    """Return a forward pass that runs on ranks in threads; close it when it is done."""
    config = make(
        EngineConfig, model=ModelFiles(kind="hf", path=Path("none"), name="tiny"), tensor_parallel_size=size
    )
    device = DeviceConfig(CPU, numpy_dtype(dtype), 1)

    def load(group: RankGroup) -> ForwardPass:
        job = RankJob(config, device, group.shard, Path("none"), num_blocks, block_size)
        return load_part(job, checkpoint, group)

    first, *others = run_ranks(size, load)
    return LeadingForward(first, ThreadFollowers(others), size=size, block_size=block_size)
