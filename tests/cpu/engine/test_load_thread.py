"""Loading keeps no thread: OpenMP has threads for each that used it, which would slow the steps down."""

from __future__ import annotations

from pathlib import Path
from threading import Thread, current_thread
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.engine.device import run_apart
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.loaded_model import LoadedModel
from onbeat.engine.profiling import measure, profiler
from onbeat.engine.profiling.measure import StepTimer
from onbeat.engine.start import prepare
from onbeat.hub.files import ModelFiles
from tests.cpu.e2e.tiny_directory import write_tiny_directory


def load(path: Path, threads: list[Thread], *, has_workers: bool = False) -> LoadedModel:
    """Load a tiny model; note which thread does."""
    files = ModelFiles(kind="hf", path=write_tiny_directory(path), name="tiny")
    loader = prepare(EngineConfig(model=files, load_format="dummy", backend="torch", device="cpu"))
    loader.backend.has_workers = has_workers
    start = loader.backend.start

    def noted(*arguments: Any) -> Any:
        threads.append(current_thread())
        return start(*arguments)

    loader.backend.start = noted  # type: ignore[method-assign, assignment]
    return loader.load(lambda _: None)


def test_what_loads_and_measures_has_ended_when_steps_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[Thread] = []
    loaded = load(tmp_path, threads)

    def note(*_: Any) -> None:
        threads.append(current_thread())

    monkeypatch.setattr(profiler, "cpu_limits", note)
    monkeypatch.setattr(measure, "_touch_cache", note)
    profiler.limits_of(loaded, "cpu", "fp32")
    timer = StepTimer(loaded.runner, num_blocks=1)
    timer.close()
    assert len(threads) == 3
    assert current_thread() not in threads
    assert not any(each.is_alive() for each in threads)
    loaded.runner.close()


def test_processes_that_end_with_a_thread_are_started_by_one_that_stays(tmp_path: Path) -> None:
    threads: list[Thread] = []
    load(tmp_path, threads, has_workers=True).runner.close()
    assert threads == [current_thread()]


def test_what_fails_there_is_raised_here() -> None:
    def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        run_apart(fail)
