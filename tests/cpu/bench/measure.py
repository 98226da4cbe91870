"""Runs a load test against the fake server, in one event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from onbeat.bench.bench_config import BenchConfig, TargetConfig
from onbeat.bench.bench_load import BenchLoad, RunConfig
from onbeat.bench.record import SentRequest
from onbeat.bench.result import BenchRun
from onbeat.bench.session import run_bench
from onbeat.workload.slo_classes import SLOClass
from tests.fake_openai import FakeOpenAI, serving


class Watcher:
    """A progress display that only counts, and can stop the run after some requests."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop = asyncio.Event()
        self.num_ended = 0
        self.num_started = 0
        self._stop_after = stop_after

    def on_phase(self, text: str) -> None: ...

    def on_start(self, run: RunConfig, num_requests: int) -> None:
        self.num_started += 1

    def on_request(self, record: SentRequest) -> None:
        self.num_ended += 1
        if self.num_ended == self._stop_after:
            self.stop.set()

    def on_result(self, result: BenchRun) -> None: ...


async def measure(
    fake: FakeOpenAI,
    load: BenchLoad,
    *,
    num_prompts: int | None = 20,
    num_warmups: int = 0,
    dataset: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    watcher: Watcher | None = None,
    classes: tuple[SLOClass, ...] = (),
    **bench_options: Any,
) -> BenchRun:
    """Measure one run of small requests, or of a data set; `bench_options` go to `BenchConfig`."""
    watcher = watcher or Watcher()
    asked = {"input_len": 12, "output_len": 6} if dataset is None else dataset
    load = replace(load, num_prompts=num_prompts, num_warmups=num_warmups, **asked)
    run = RunConfig(load=load, classes=classes)
    async with serving(fake) as url:
        bench = BenchConfig(target=TargetConfig(base_url=url, **(target or {})), **bench_options)
        results = await run_bench(bench, [run], tokenizer=None, progress=watcher, stop=watcher.stop)
    return results[0]
