"""Servers that tests share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import httpx
import pytest

from tests.cpu.e2e.program import MODEL, SMALL, ServerProgram, serving
from tests.cpu.e2e.tiny_directory import write_tiny_directory

SMOLLM2_FLAGS = (*SMALL, "--dtype", "float32", "--served-model-name", "smollm2", "--max-num-seqs", "16")


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Each `httpx.get` would make its own, plain HTTP or not, for 25 ms; tests that wait ask often."""
    with pytest.MonkeyPatch.context() as patch:
        made = cache(httpx.create_ssl_context)
        patch.setattr("httpx._transports.default.create_ssl_context", made, raising=False)
        yield


@pytest.fixture(scope="session")
def smollm2_server(smollm2_gguf: Path) -> Iterator[ServerProgram]:
    """The embedded model behind the real program, for tests that leave it as they found it."""
    with serving(smollm2_gguf, *SMOLLM2_FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def flags(tiny_directory: Path) -> Sequence[str | Path]:
    """Two front ends, before engines that give 50 tokens a second: to pass them on is little work."""
    slow = ("--load-format", "stand-in", "--device", "l40s", "--max-model-len", "4096")
    return (MODEL, "--tokenizer", tiny_directory, *slow, "--front-ends", "2")


@pytest.fixture(scope="module")
def server(flags: Sequence[str | Path]) -> Iterator[ServerProgram]:
    """Those front ends with two engines."""
    with serving(*flags, "--replicas", "2") as program:
        yield program


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without weights; a request may run for a minute."""
    return write_tiny_directory(tmp_path_factory.mktemp("models") / "tiny")
