"""What all tests share. Imports nothing heavy: the pure tier starts in a blink and runs without torch."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import register_profiles

# Engine process and tests share few cores; threads of both on the same cores cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton settles when it is first imported whether it interprets its kernels; other tests may import it first.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Who runs the tests in the background of a script has the shell ignore Ctrl-C, which programs inherit; ours
# are tested for what they do about it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Until all is collected, next to nothing becomes garbage, and rounds to look for it take seconds.
gc.disable()

register_profiles()

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def comparators() -> Iterator[None]:
    """Let tables of the scheduler have the published rules that benchmarks compare with."""
    from benchmarks.policies.tables import ADDED

    with pytest.MonkeyPatch.context() as patch:
        for table, entries in ADDED:
            for name, entry in entries.items():
                patch.setitem(table, name, entry)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a CUDA device where there is none."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_cuda() if gpu_items else None
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of garbage collection.

    These are a million and a half objects. A round over them takes a second, and each bench and server that a
    test runs in this process begins with one.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    pytest.MonkeyPatch().setattr(gc, "unfreeze", lambda: None)  # as those do at their end


def _why_no_cuda() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no CUDA device"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct: ONBEAT_TEST_SMOLLM2, else the cache's. Downloads nothing."""
    from onbeat.core.errors import ModelLoadError
    from onbeat.hub.resolve import resolve_model

    if override := os.environ.get("ONBEAT_TEST_SMOLLM2"):
        return Path(override)
    try:
        return resolve_model(SMOLLM2, offline=True).path
    except ModelLoadError as error:
        pytest.skip(f"SmolLM2 is not at hand (`onbeat models fetch {SMOLLM2}` gets it): {error}")
