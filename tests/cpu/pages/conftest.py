"""The browser that all tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cpu.pages.browser import CHROMIUM, Browser, started


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A browser; each tab of it is another visitor's."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with started() as browser:
        yield browser
