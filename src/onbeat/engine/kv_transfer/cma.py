"""Blocks copied straight out of another process's memory, on one machine: `process_vm_readv`.

The source takes no part in it and spends no time. The kernel asks for the same user, one namespace of process
numbers, and, where Yama restricts tracing (`ptrace_scope` 1), the source's consent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_ssize_t, c_ulong, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

from onbeat.core.errors import KVUnavailable
from onbeat.engine.kv_access import BlockMemory
from onbeat.engine.kv_transfer.base import blocks_to_copy
from onbeat.engine.kv_transfer.leases import CELL_BYTES, Leases
from onbeat.engine.kv_transfer.source import KVEndpoint, KVSource, SharedProcess

_NONCE_BYTES = 16
_MOST_PIECES = 1024
"""Pieces of memory that one call copies (IOV_MAX)."""
_MOST_BYTES = 16 << 20
"""That one call copies: the kernel holds locks of the source's memory meanwhile."""
_SET_PTRACER = 0x59616D61
"""PR_SET_PTRACER: whom Yama lets read this process."""

Piece = tuple[int, int]
"""Address and bytes of something in an engine's memory."""


class _IOVec(ctypes.Structure):
    _fields_ = (("base", c_void_p), ("length", c_size_t))


class CmaTransport:
    """Cross-memory attach (CMA): the kernel copies from process to process."""

    name = "cma"

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        readv = self._libc.process_vm_readv
        readv.restype = c_ssize_t
        readv.argtypes = (c_int, c_void_p, c_ulong, c_void_p, c_ulong, c_ulong)
        self._readv: Any = readv
        self._served: list[Any] = []
        """What other processes read, kept in place."""

    def serve(self, memory: BlockMemory, leases: Leases, endpoint: KVEndpoint) -> KVEndpoint:
        """See `KVTransport.serve`. Processes that share our parent may read this one from now on."""
        self._libc.prctl(_SET_PTRACER, c_ulong(os.getppid()), 0, 0, 0)  # fails where there is no Yama
        nonce = ctypes.create_string_buffer(secrets.token_bytes(_NONCE_BYTES), _NONCE_BYTES)
        self._served += [nonce, leases.cells, memory]
        shared = SharedProcess(
            pid=os.getpid(),
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            nonce=nonce.raw,
            nonce_address=ctypes.addressof(nonce),
            cells_address=ctypes.addressof(leases.cells),
            regions=tuple((region.address, region.block_bytes) for region in memory.regions),
        )
        return replace(endpoint, shared=shared)

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """Try to read; see `KVTransport.obstacle`."""
        shared = endpoint.shared
        if shared is None:
            return "the source does not serve it"
        if shared.boot_id != _boot_id():
            return "the source is on another machine"
        if shared.pid_namespace != _pid_namespace():
            return "the source is in another container"
        try:
            self._check_process(shared)
        except KVUnavailable as error:
            return str(error)
        return None

    def pull(self, source: KVSource, first_block: int, memory: BlockMemory, into: Sequence[int]) -> int:
        """See `KVTransport.pull`."""
        blocks = blocks_to_copy(source, first_block, memory, into)
        shared = source.endpoint.shared
        if shared is None:
            raise KVUnavailable("the source does not let others read its memory (cma)")
        self._check_process(shared)
        self._check_lease(shared, source)
        ours, theirs = _pieces(memory.regions, into), _pieces(shared.regions, blocks)
        num_bytes = 0
        most = max(1, min(_MOST_PIECES, _MOST_BYTES // max(memory.block_bytes // len(memory.regions), 1)))
        for start in range(0, len(ours), most):
            num_bytes += self._read(shared.pid, ours[start : start + most], theirs[start : start + most])
        self._check_lease(shared, source)  # else the blocks may have been another's already
        return num_bytes

    def close(self) -> None:
        """Let go of what was served; see `KVTransport.close`."""
        self._served.clear()

    def _check_process(self, shared: SharedProcess) -> None:
        if self._read_bytes(shared, shared.nonce_address, _NONCE_BYTES) != shared.nonce:
            raise KVUnavailable(f"process {shared.pid} is not the engine that it was; that one has ended")

    def _check_lease(self, shared: SharedProcess, source: KVSource) -> None:
        address = shared.cells_address + CELL_BYTES * source.cell
        if int.from_bytes(self._read_bytes(shared, address, CELL_BYTES), "little") != source.serial:
            raise KVUnavailable(f"the lease of the KV of {source.lease_id!r} has ended")

    def _read_bytes(self, shared: SharedProcess, address: int, num_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(num_bytes)
        self._read(shared.pid, [(ctypes.addressof(buffer), num_bytes)], [(address, num_bytes)])
        return buffer.raw

    def _read(self, pid: int, ours: list[Piece], theirs: list[Piece]) -> int:
        """Copy pieces of another process's memory; ours and theirs have the same lengths."""
        local = (_IOVec * len(ours))(*(_IOVec(*piece) for piece in ours))
        remote = (_IOVec * len(theirs))(*(_IOVec(*piece) for piece in theirs))
        wanted = sum(length for _, length in ours)
        copied = int(self._readv(pid, local, len(ours), remote, len(theirs), 0))
        if copied == wanted:
            return copied
        raise KVUnavailable(_reason(pid, ctypes.get_errno() if copied < 0 else errno.EFAULT))


def _pieces(regions: Sequence[Piece], block_ids: Sequence[int]) -> list[Piece]:
    """Return each part of each block, region after region; a region has the address and bytes of block 0."""
    return [
        (address + block_id * block_bytes, block_bytes)
        for address, block_bytes in regions
        for block_id in block_ids
    ]


def _reason(pid: int, number: int) -> str:
    match number:
        case errno.EPERM:
            return (
                f"the system does not let this process read the memory of {pid}: it has another user, or "
                "/proc/sys/kernel/yama/ptrace_scope is above 1"
            )
        case errno.ESRCH:
            return f"process {pid} has ended"
        case errno.EFAULT:
            return f"process {pid} has not the memory that it lent; it is ending, or is another one by now"
        case _:
            return f"the memory of process {pid} cannot be read: {os.strerror(number)}"


def _boot_id() -> str:
    return _text(Path("/proc/sys/kernel/random/boot_id"))


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
