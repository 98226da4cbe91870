"""Blocks copied by NIXL, NVIDIA's library for moving KV, over UCX: shared memory, TCP or RDMA.

UCX takes the quickest way that two machines have between them; `UCX_NET_DEVICES` and `UCX_TLS` narrow it.
Reads are one-sided: the source's step loop takes no part in them.

NIXL proves nobody's name: who reaches the port that UCX opens, and knows the addresses, reads the KV. An
engine that listens on loopback keeps UCX there, too; otherwise the network between replicas must be trusted.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

from onbeat.core.errors import KVUnavailable
from onbeat.engine.kv_access import BlockMemory
from onbeat.engine.kv_transfer.base import PULL_SECONDS, Piece, blocks_to_copy, check_cell, pieces_of
from onbeat.engine.kv_transfer.leases import CELL_BYTES, Leases
from onbeat.engine.kv_transfer.source import KVEndpoint, KVSource, NixlMemory

_STAGING_BYTES = 16 << 20
_LENDING_SECONDS = 1e-3
"""Between looks at what others ask for, while they may copy something. NIXL's own thread never rests, and so
takes a core; this one takes 1 to 2 % of one."""
_IDLE_SECONDS = 0.05
_READING_SECONDS = 2e-4
"""Between looks at a copy that is under way."""


class NixlTransport:
    """One NIXL agent, which lends and copies.

    Copies come by a buffer of their own: a read that was given up may still write to it, and then it is not
    used again.

    Parameters
    ----------
    host : address that the engine is reached at.

    Raises
    ------
    KVUnavailable : NIXL is not installed, or does not start here.
    """

    name = "nixl"

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        if ip_address(host).is_loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX is told by its environment alone
        try:
            from nixl import _api, _bindings  # an extra
        except ImportError as error:
            raise KVUnavailable(f"NIXL is not installed: pip install 'onbeat[nixl]' ({error})") from error
        logging.getLogger(_api.logger.name).setLevel(logging.WARNING)
        self._errors = tuple(
            value
            for name, value in vars(_bindings).items()
            if name.startswith("nixl") and name.endswith("Error")
        )
        config = _api.nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent: Any = _api.nixl_agent(f"onbeat-{secrets.token_hex(8)}", config)
        except self._errors as error:
            raise KVUnavailable(f"NIXL does not start here: {error}") from error
        self._registered: list[Any] = []
        self._turn = threading.Lock()
        self._staging = self._new_staging()
        self._given_up: list[Any] = []
        """Buffers that reads may still write to."""
        self._known: dict[bytes, str] = {}
        """Metadata of other agents -> their names."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def serve(self, memory: BlockMemory, leases: Leases, endpoint: KVEndpoint) -> KVEndpoint:
        """See `KVTransport.serve`."""
        assert self._thread is None
        cells = ctypes.addressof(leases.cells)
        lent = [(region.address, region.block_bytes * memory.num_blocks) for region in memory.regions]
        try:
            self._register([*lent, (cells, ctypes.sizeof(leases.cells))])
            metadata = bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise KVUnavailable(f"NIXL cannot lend this engine's memory: {error}") from error
        self._thread = threading.Thread(
            target=self._answer, args=(memory, leases), name="onbeat-nixl", daemon=True
        )
        self._thread.start()
        regions = tuple((region.address, region.block_bytes) for region in memory.regions)
        return replace(endpoint, nixl=NixlMemory(metadata=metadata, cells_address=cells, regions=regions))

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """See `KVTransport.obstacle`; whether the way works is found when it is used."""
        return None if endpoint.nixl is not None else "the source does not serve it"

    def pull(self, source: KVSource, first_block: int, memory: BlockMemory, into: Sequence[int]) -> int:
        """See `KVTransport.pull`."""
        blocks = blocks_to_copy(source, first_block, memory, into)
        theirs = source.endpoint.nixl
        if theirs is None:
            raise KVUnavailable("the source does not lend its memory to NIXL")
        end = time.monotonic() + PULL_SECONDS
        if not self._turn.acquire(timeout=PULL_SECONDS):
            raise KVUnavailable(f"the copy before has not ended in {PULL_SECONDS:g} s")
        try:
            name = self._name(theirs)
            ours = pieces_of(memory.regions, into)
            for pieces in _groups(zip(pieces_of(theirs.regions, blocks), ours, strict=True)):
                self._read(name, [piece for piece, _ in pieces], end)
                self._scatter(piece for _, piece in pieces)
            # Else the blocks may have been another's already.
            self._check_lease(name, theirs, source, end)
        except self._errors as error:
            self._forget(theirs)
            raise KVUnavailable(f"KV cannot be had from there by NIXL: {error}") from error
        finally:
            self._turn.release()
        return len(into) * memory.block_bytes

    def close(self) -> None:
        """See `KVTransport.close`."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(PULL_SECONDS)
        for each in self._registered:
            with suppress(*self._errors):
                self._agent.deregister_memory(each)

    def _register(self, pieces: Sequence[Piece]) -> None:
        self._registered.append(self._agent.register_memory([(*piece, 0, "") for piece in pieces], "DRAM"))

    def _new_staging(self) -> Any:
        staging = ctypes.create_string_buffer(_STAGING_BYTES)
        self._register([(ctypes.addressof(staging), _STAGING_BYTES)])
        return staging

    def _answer(self, memory: BlockMemory, leases: Leases) -> None:  # noqa: ARG002 - both are kept alive
        """Let UCX see to what others ask for: it has no thread of its own."""
        while not self._closed.wait(_LENDING_SECONDS if leases.num_lasting else _IDLE_SECONDS):
            self._agent.update_notifs()

    def _name(self, theirs: NixlMemory) -> str:
        name = self._known.get(theirs.metadata)
        if name is None:
            name = self._known[theirs.metadata] = self._agent.add_remote_agent(theirs.metadata)
        return name

    def _forget(self, theirs: NixlMemory) -> None:
        """Connect anew the next time."""
        name = self._known.pop(theirs.metadata, None)
        if name is not None:
            with suppress(*self._errors):
                self._agent.remove_remote_agent(name)

    def _check_lease(self, name: str, theirs: NixlMemory, source: KVSource, end: float) -> None:
        self._read(name, [(theirs.cells_address + CELL_BYTES * source.cell, CELL_BYTES)], end)
        check_cell(self._staging[:CELL_BYTES], source)

    def _read(self, name: str, pieces: Sequence[Piece], end: float) -> None:
        """Bring pieces of another engine's memory into the staging buffer, one behind the other."""
        agent = self._agent
        staged = [(*piece, 0) for piece in self._staged(length for _, length in pieces)]
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(staged, "DRAM"),
            agent.get_xfer_descs([(*piece, 0) for piece in pieces], "DRAM"),
            name,
        )
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > end:
                    self._given_up.append(self._staging)
                    self._staging = self._new_staging()
                    raise KVUnavailable(
                        f"the source has not answered NIXL for {PULL_SECONDS:g} s; it took too long"
                    )
                time.sleep(_READING_SECONDS)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise KVUnavailable(f"NIXL says that a copy is {state}")

    def _scatter(self, pieces: Iterable[Piece]) -> None:
        """Copy what is in the staging buffer to where it belongs."""
        kept = list(pieces)
        for (address, length), (staged, _) in zip(kept, self._staged(n for _, n in kept), strict=True):
            ctypes.memmove(address, staged, length)

    def _staged(self, lengths: Iterable[int]) -> Iterator[Piece]:
        address = ctypes.addressof(self._staging)
        for length in lengths:
            yield address, length
            address += length


def _groups(pairs: Iterable[tuple[Piece, Piece]]) -> Iterator[list[tuple[Piece, Piece]]]:
    """Yield as many pieces, with where they go, as the staging buffer holds."""
    group: list[tuple[Piece, Piece]] = []
    num_bytes = 0
    for (address, length), (into, _) in pairs:
        for start in range(0, length, _STAGING_BYTES):
            part = min(_STAGING_BYTES, length - start)
            if num_bytes + part > _STAGING_BYTES:
                yield group
                group, num_bytes = [], 0
            group.append(((address + start, part), (into + start, part)))
            num_bytes += part
    if group:
        yield group
