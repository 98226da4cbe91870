"""Access to the bytes of KV blocks, so that another replica can copy them; what two replicas compare first.

A block is the same bytes on every replica of one `KVLayout`, however its back end lays them out: whoever
moves blocks copies bytes and knows nothing of what they mean.

A `KVSource` is what one engine tells another, through whoever moves requests, so that it can copy blocks.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol, runtime_checkable

from onbeat.core.errors import KVUnavailable


class KVRegion(NamedTuple):
    """A part of the KV cache in host memory: block after block, each in one piece."""

    address: int
    """Of block 0."""
    block_bytes: int
    """That a block has here."""


@runtime_checkable
class GivesKV(Protocol):
    """A forward pass whose KV lies in this process."""

    def kv_regions(self) -> list[KVRegion]:
        """Return where a block's parts lie, in the order in which they make up the block.

        Valid as long as the forward pass is not closed.

        Raises
        ------
        ConfigError : it does not lie in host memory.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What the bytes of a block depend on: replicas that agree on all of it may copy one another's blocks."""

    model: str
    weights: str
    """Number format of the weights: KV of other numbers is that of another model."""
    dtype: str
    block_size: int
    """Tokens of a block."""
    block_bytes: int
    backend: str
    """Whose order the bytes are in."""
    activations: str = ""
    """What quantized weights are multiplied with, where there are any."""
    state_bytes: int = 0
    """Of a request's state beside its blocks."""

    def check_same(self, other: KVLayout) -> None:
        """Raise `KVUnavailable` that names the first difference, unless the blocks of both are the same."""
        for field in fields(self):
            own, theirs = getattr(self, field.name), getattr(other, field.name)
            if own != theirs:
                raise KVUnavailable(
                    f"KV blocks differ in {field.name}: {own!r} here, {theirs!r} there; start the replicas "
                    "with the same settings"
                )


class States(NamedTuple):
    """The states of an engine's requests, of a model that keeps one of each; the id of slot n is ~n."""

    regions: Sequence[KVRegion]
    num_slots: int
    slot_of: Callable[[str], int]
    """Of a request that the model runner knows."""


class BlockMemory:
    """The bytes of the KV blocks of one engine, and of states.

    Parameters
    ----------
    forward : whose KV it is; it must not be closed before the last use.
    layout : of its blocks; `block_bytes` as `region_bytes` says.
    num_blocks : ids 0 to `num_blocks` - 1.
    states : None where the model keeps none.
    """

    def __init__(
        self, forward: GivesKV, layout: KVLayout, *, num_blocks: int, states: States | None = None
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.regions = tuple(forward.kv_regions())
        self.states = states or States((), 0, lambda _: 0)
        self._forward = forward  # the memory is its own
        assert region_bytes(self.regions) == layout.block_bytes, "blocks have other bytes"

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    def state_of(self, request_id: str) -> tuple[int, ...]:
        """Return the id of a request's state; nothing where the model keeps none."""
        return (~self.states.slot_of(request_id),) if self.states.num_slots else ()

    def views(self, block_id: int) -> Iterator[memoryview]:
        """Yield the parts of a block or state, in their order; writing to them writes it.

        Raises
        ------
        KVUnavailable : there is no such block.
        """
        self.check_ids((block_id,))
        regions, index = (self.states.regions, ~block_id) if block_id < 0 else (self.regions, block_id)
        for address, num_bytes in regions:
            start = address + index * num_bytes
            yield memoryview((ctypes.c_char * num_bytes).from_address(start)).cast("B")

    def checksum(self, block_id: int) -> int:
        """Return the CRC-32 of a block's bytes.

        Raises
        ------
        KVUnavailable : there is no such block.
        """
        crc = 0
        for part in self.views(block_id):
            crc = zlib.crc32(part, crc)
        return crc

    def check_ids(self, block_ids: Sequence[int]) -> None:
        """Raise `KVUnavailable` unless all blocks are there: whoever asks for one may be another process."""
        if block_ids and not -self.states.num_slots <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise KVUnavailable(
                f"blocks {min(block_ids)} to {max(block_ids)} were asked for, but there are {self.num_blocks}"
            )


def region_bytes(regions: Iterable[KVRegion]) -> int:
    """Return the bytes of one block, or of one state."""
    return sum(region.block_bytes for region in regions)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEndpoint:
    """Where an engine gives its blocks away."""

    layout: KVLayout
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """Blocks of one request that may be copied while their lease lasts."""

    endpoint: KVEndpoint
    lease_id: str
    serial: int
    """Of the lease, never used twice by an engine."""
    block_ids: tuple[int, ...]
    """Of the engine that gives them, in the order of the request's tokens."""
    state: tuple[int, ...] = ()
    """Id of the request's state, once it stands still, of a model that keeps one."""
    checksums: tuple[int, ...] = ()
    """CRC-32 of each, the state's last; without them nothing is copied."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All that is lent."""
        return self.block_ids + self.state
