"""How graphs are captured, by what is called of torch; it captures on GPUs alone: tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from onbeat.core.errors import ConfigError
from onbeat.engine.cuda.graphs import CudaGraphs, GraphKey


class Recorder:
    """Stands for `torch.cuda`, and notes what is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name, stand_in in (
            ("Stream", Stream),
            ("current_stream", Stream),
            ("graph_pool_handle", lambda: "pool"),
            ("CUDAGraph", lambda: Graph(self.calls)),
            ("device", self.inside),
            ("stream", self.inside),
            ("synchronize", lambda: None),
            ("empty_cache", lambda: self.calls.append("empty")),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextmanager
    def inside(self, _: object) -> Iterator[None]:
        yield


class Stream:
    def wait_stream(self, _: object) -> None:
        """Wait for nothing."""


class Graph:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        self._calls.append("begin")

    def capture_end(self) -> None:
        self._calls.append("end")


def prepare(recorder: Recorder, *keys: GraphKey, broken: GraphKey | None = None) -> None:
    def run(key: GraphKey) -> None:
        recorder.calls.append(f"run {key.size}")
        if key == broken:
            raise RuntimeError("no such kernel\nand more")

    graphs: Any = CudaGraphs(torch.device("cpu"))
    graphs.prepare(keys, run, lambda key: recorder.calls.append(f"plan {key.size}"))


def test_the_largest_is_captured_first_and_unused_memory_goes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    prepare(recorder, GraphKey(2), GraphKey(8))
    captures = [[f"plan {size}", f"run {size}", "begin", f"run {size}", "end"] for size in (8, 2)]
    assert recorder.calls == ["empty", *captures[0], *captures[1], "empty"]


def test_what_cannot_be_captured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    with pytest.raises(ConfigError, match=r"1.*64.*--enf"):
        prepare(recorder, GraphKey(64, 1), broken=GraphKey(64, 1))
    with pytest.raises(ConfigError, match=r"32.*5.*--enf"):
        prepare(recorder, GraphKey(32, width=5), broken=GraphKey(32, width=5))
