"""Runs a load test against the fake server, in one event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from onbeat.bench.bench_config import BenchConfig, DatasetConfig, LoadConfig, RunConfig, TargetConfig
from onbeat.bench.record import RequestRecord
from onbeat.bench.result import BenchResult
from onbeat.bench.session import run_bench
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

    def on_request(self, record: RequestRecord) -> None:
        self.num_ended += 1
        if self.num_ended == self._stop_after:
            self.stop.set()

    def on_result(self, result: BenchResult) -> None: ...


async def measure(
    fake: FakeOpenAI,
    load: LoadConfig,
    *,
    num_prompts: int | None = 20,
    dataset: DatasetConfig | None = None,
    target: dict[str, Any] | None = None,
    watcher: Watcher | None = None,
    **bench_options: Any,
) -> BenchResult:
    """Measure one run; `bench_options` go to `BenchConfig`."""
    watcher = watcher or Watcher()
    run = RunConfig(
        dataset=dataset or DatasetConfig(input_len=12, output_len=6), load=load, num_prompts=num_prompts
    )
    async with serving(fake) as url:
        bench = BenchConfig(target=TargetConfig(base_url=url, **(target or {})), **bench_options)
        results = await run_bench(bench, [run], tokenizer=None, progress=watcher, stop=watcher.stop)
    return results[0]
