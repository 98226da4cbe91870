"""Fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cpu.bench.background import Background
from tests.fake_openai import FakeOpenAI


@pytest.fixture
def server() -> Iterator[Background]:
    with Background(FakeOpenAI()) as background:
        yield background
