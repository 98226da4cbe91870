"""Memory for tests of copies, and a process that lends its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from onbeat.engine.kv_access import BlockMemory, KVLayout, KVRegion, KVSource
from onbeat.engine.kv_handover import KVTransfers
from onbeat.engine.kv_transfer import TcpTransport
from onbeat.engine.torch.kv import region_of

NUM_BLOCKS = 24
REGION_BYTES = (4096, 1000)
"""Of a block, in each region: two, as a back end with a tensor for each layer has many."""
KEY = b"the key of a fleet, at least 32 bytes"


class Blocks:
    """A KV cache without a model: byte i of a block is (block * 7 + i) % 251, or 0."""

    def __init__(self, *, is_filled: bool) -> None:
        self.parts = [torch.zeros(NUM_BLOCKS, size, dtype=torch.uint8) for size in REGION_BYTES]
        if is_filled:
            for part in self.parts:
                for block in range(NUM_BLOCKS):
                    part[block] = content(block, part.shape[1])

    def kv_regions(self) -> list[KVRegion]:
        return [region_of(part) for part in self.parts]

    def holds(self, block: int, of_block: int) -> bool:
        """Whether a block has the content that a filled cache has in another."""
        return all(torch.equal(part[block], content(of_block, part.shape[1])) for part in self.parts)


def content(block: int, num_bytes: int) -> torch.Tensor:
    return ((torch.arange(num_bytes) + 7 * block) % 251).to(torch.uint8)


def layout(**changes: Any) -> KVLayout:
    values: dict[str, Any] = {
        "model": "m",
        "weights": "bf16",
        "dtype": "bfloat16",
        "block_size": 16,
        "block_bytes": sum(REGION_BYTES),
        "backend": "torch",
    }
    return KVLayout(**values | changes)


def make_transfers(
    *, is_filled: bool = False, key: bytes = KEY, **changes: Any
) -> tuple[Blocks, KVTransfers]:
    blocks = Blocks(is_filled=is_filled)
    memory = BlockMemory(blocks, layout(**changes), num_blocks=NUM_BLOCKS)
    return blocks, KVTransfers(memory, TcpTransport(key))


class LendingProcess:
    """A process of its own that lends ten blocks from 3 on as `r`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_lend, args=(other,), daemon=True)
        self.process.start()

    def lend(self) -> KVSource:
        self.connection.send("lend")
        source: KVSource = self.connection.recv()
        return source

    def revoke(self) -> None:
        self.connection.send("revoke")
        assert self.connection.recv() == "done"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop it, as one that hangs."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        yield
        os.kill(self.process.pid, signal.SIGCONT)


def _lend(connection: Connection) -> None:
    _, transfers = make_transfers(is_filled=True)
    while True:
        if connection.recv() == "lend":
            transfers.leases.grant("r", range(3, 13))
            connection.send(transfers.summed(transfers.leases.source("r", transfers.endpoint)).result())
        else:
            transfers.leases.revoke("r")
            connection.send("done")
