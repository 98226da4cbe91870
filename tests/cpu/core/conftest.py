"""Fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cpu.core.kv_engines import (
    LendingProcess,
)


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    process = LendingProcess()
    yield process
    process.kill()
