"""What one engine tells another, through whoever moves requests, so that it can copy blocks of KV."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.engine.kv_access import KVLayout


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
    checksums: tuple[int, ...] = ()
    """CRC-32 of each; without them nothing is copied."""
