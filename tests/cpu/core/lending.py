"""Helpers for transfers of KV blocks between processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from onbeat.engine import kv_handover, kv_transfer
from onbeat.engine.kv_access import KVSource
from tests.cpu.core.kv_engines import (
    REGION_BYTES,
    make_transfers,
)

BLOCK_BYTES = sum(REGION_BYTES)
WAIT = 30.0


def short_pulls(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (kv_transfer, kv_handover):
        monkeypatch.setattr(module, "PULL_SECONDS", seconds)


@contextmanager
def lending_source() -> Iterator[KVSource]:
    """Lend eight blocks as `r` over tcp."""
    _, lending = make_transfers(is_filled=True)
    lending.leases.grant("r", range(8))
    yield lending.summed(lending.leases.source("r", lending.endpoint)).result(WAIT)
    lending.close()
