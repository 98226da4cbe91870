"""What the tests of the engine share. Its imports wait, so that the tests of text or hub start quickly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from onbeat.engine.native.library import NativeLibrary
    from tests.cpu.engine.engines import TinyEngine


@pytest.fixture(scope="session")
def native_library() -> NativeLibrary:
    """The native engine's library; tests that need it are skipped where it is not built."""
    from onbeat.engine.native.library import NotLoaded, load_library

    library = load_library()
    if isinstance(library, NotLoaded):
        pytest.skip(f"the native engine is not here: {library.reason}")
    return library


@pytest.fixture(scope="session", params=["torch", "cuda", "native"])
def engine(request: pytest.FixtureRequest) -> TinyEngine:
    """Each way to run tiny models."""
    from tests.cpu.engine.engines import CudaEngine, NativeEngine, TorchEngine

    if request.param == "torch":
        return TorchEngine()
    if request.param == "cuda":
        return CudaEngine()
    return NativeEngine(request.getfixturevalue("native_library"))
