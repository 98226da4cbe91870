from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.cpu.server.running import Served, serving
from tests.fakes_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def served(engine: FakeEngine, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A server with the fake engine on a real socket; parametrize indirectly with ServerConfig fields."""
    fields: dict[str, Any] = getattr(request, "param", {})
    async with serving(engine, **fields) as running:
        yield running
