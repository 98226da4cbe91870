"""What the process of an engine by vLLM has in its environment: PyTorch's OpenMP before all else, on CPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.vllm import environment
from onbeat.hub.files import ModelFiles


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where PyTorch's OpenMP library lies, of a PyTorch that has one, on a machine without GPUs."""
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    library = package / "lib" / "libgomp.so.1"
    library.touch()
    found = SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr(environment, "find_spec", lambda _: found)
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return library


def changes(**options: Any) -> dict[str, str]:
    model = ModelFiles(kind="hf", path=Path("model"), name="tiny")
    return environment.process_environment(EngineConfig(model=model, **options))


def test_the_library_of_pytorch_is_there_first_and_knows_its_threads(library: Path) -> None:
    expected = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "3"}
    assert changes(backend="vllm", threads=3) == expected
    assert changes(backend="vllm", threads=7, tensor_parallel_size=2) == expected, "of each worker"


def test_what_the_user_preloads_stays(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/libtcmalloc.so.4")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert changes(backend="vllm") == {
        "LD_PRELOAD": f"/lib/libtcmalloc.so.4:{library}",
        "OMP_NUM_THREADS": "1",
    }
    monkeypatch.setenv("LD_PRELOAD", "/lib/libiomp5.so")
    assert changes(backend="vllm") == {}, "it has an OpenMP of its own"


def test_nothing_changes_for_other_engines_devices_or_builds(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert changes() == changes(backend="torch") == changes(backend="vllm", device="cuda") == {}
    assert changes(backend="vllm", load_format="stand-in") == {}
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    assert changes(backend="vllm") == {}
    assert changes(backend="vllm", device="cpu")
    library.unlink()
    assert changes(backend="vllm", device="cpu") == {}
