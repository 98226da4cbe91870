"""The load client against a small real server."""

from __future__ import annotations

import asyncio
from typing import Any

from onbeat.bench.config import BenchConfig, DatasetConfig, LoadConfig, RunConfig, TargetConfig
from onbeat.bench.record import RequestRecord
from onbeat.bench.result import RunResult
from onbeat.bench.session import run_bench
from tests.fake_openai import FakeOpenAI, serving


class SilentProgress:
    def __init__(self) -> None:
        self.num_ended = 0

    def on_phase(self, text: str) -> None: ...

    def on_start(self, run: RunConfig, num_requests: int) -> None: ...

    def on_request(self, record: RequestRecord) -> None:
        self.num_ended += 1

    def on_result(self, result: RunResult) -> None: ...


async def measure(fake: FakeOpenAI, load: LoadConfig, *, num_prompts: int = 20, **options: Any) -> RunResult:
    dataset = options.pop("dataset", DatasetConfig(input_len=12, output_len=6))
    api = options.pop("api", "completions")
    timeout = options.pop("request_timeout", 30.0)
    async with serving(fake) as url:
        bench = BenchConfig(target=TargetConfig(base_url=url, api=api, request_timeout=timeout), **options)
        run = RunConfig(dataset=dataset, load=load, num_prompts=num_prompts)
        results = await run_bench(
            bench, [run], tokenizer=None, progress=SilentProgress(), stop=asyncio.Event()
        )
    return results[0]


async def test_closed_loop_keeps_exactly_the_asked_number_of_requests_open() -> None:
    fake = FakeOpenAI(first_token_delay=0.01, token_delay=0.002)

    result = await measure(fake, LoadConfig(max_concurrency=4))

    assert fake.peak_open == 4
    assert result.summary["completed"] == 20
    assert result.summary["max_concurrent_requests"] == 4
    assert result.summary["total_output_tokens"] == 20 * 6
    assert result.summary["total_input_tokens"] == 20 * 12
    assert result.summary["token_count_source"] == "usage"
