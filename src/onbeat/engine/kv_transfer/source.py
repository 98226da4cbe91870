"""What one engine tells another, through whoever moves requests, so that it can copy blocks of KV."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.engine.kv_access import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedProcess:
    """How to read the memory of an engine process of this machine."""

    pid: int
    boot_id: str
    """Of the machine's run: two machines never share it."""
    pid_namespace: str
    """Numbers of processes mean something within one."""
    nonce: bytes
    """Random bytes in the process's memory: another process at this number has others."""
    nonce_address: int
    cells_address: int
    """Of `Leases.cells`: 8-byte numbers of leases."""
    regions: tuple[tuple[int, int], ...]
    """Address and bytes of a block, of each region of the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEndpoint:
    """Where an engine gives its blocks away."""

    layout: KVLayout
    shared: SharedProcess | None = None
    """None where `cma` is not served."""
    host: str | None = None
    """None where `tcp` is not served."""
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """Blocks of one request that may be copied while their lease lasts."""

    endpoint: KVEndpoint
    lease_id: str
    serial: int
    """Of the lease, never used twice by an engine."""
    cell: int
    """Which of the engine's cells has `serial` for as long as the lease lasts."""
    block_ids: tuple[int, ...]
    """Of the engine that gives them, in the order of the request's tokens."""
    checksums: tuple[int, ...] = ()
    """CRC-32 of each; without them nothing is copied."""
