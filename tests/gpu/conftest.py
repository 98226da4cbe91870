"""The marker of these tests, for runs without the repository's configuration (`pytest -c /dev/null`)."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
