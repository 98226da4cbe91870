"""The load client against a small real server: loops, timing, counts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from onbeat.bench.bench_config import BenchConfig, OutputOptions, SamplingConfig, TargetConfig
from onbeat.bench.bench_load import BenchLoad, RunConfig
from onbeat.bench.session import run_bench
from onbeat.core.errors import ConfigError
from tests.cpu.bench.measure import Watcher, measure
from tests.fake_openai import FakeOpenAI, serving


async def test_closed_loop_keeps_exactly_the_asked_number_of_requests_open() -> None:
    fake = FakeOpenAI(first_token_delay=0.01, token_delay=0.002)

    result = await measure(fake, BenchLoad(max_concurrency=4))

    assert fake.peak_open == 4
    assert result.summary.counts.num_completed == 20
    assert result.summary.max_concurrent_requests == 4
    assert result.summary.counts.num_output_tokens == 20 * 6
    assert result.summary.counts.num_prompt_tokens == 20 * 12
    assert result.values["token_count_source"] == "usage"
    assert result.timing_origin == "send"
    assert result.values["max_client_queue_time_ms"] == 0


async def test_a_closed_loop_reuses_its_connections() -> None:
    fake = FakeOpenAI()

    await measure(fake, BenchLoad(max_concurrency=3), num_prompts=30)

    # The probe's tokenizer questions may leave some more connections behind.
    assert len(fake.connections) <= 8


async def test_latencies_are_those_of_the_server() -> None:
    fake = FakeOpenAI(first_token_delay=0.08, token_delay=0.02)

    result = await measure(fake, BenchLoad(max_concurrency=2), num_prompts=6)

    assert 80 <= result.values["median_ttft_ms"] < 120
    assert 20 <= result.values["median_tpot_ms"] < 35
    assert result.values["median_e2el_ms"] == pytest.approx(
        result.values["median_ttft_ms"] + 5 * result.values["median_tpot_ms"], rel=0.1
    )


async def test_open_loop_does_not_wait_for_answers_and_times_from_the_schedule() -> None:
    fake = FakeOpenAI(first_token_delay=0.05, num_slots=1)  # serves 20 a second, one at a time

    result = await measure(fake, BenchLoad(request_rate=100, arrivals="constant"), num_prompts=20)

    # Request k arrives at (k + 1) / 100 and is served at 0.05 k: the last waits about 0.8 s.
    assert fake.peak_open >= 14
    assert result.timing_origin == "scheduled arrival"
    assert result.values["max_ttft_ms"] > 600


async def test_the_wait_for_a_slot_counts_but_is_no_client_lateness() -> None:
    fake = FakeOpenAI(first_token_delay=0.05)
    load = BenchLoad(request_rate=200, arrivals="constant", max_concurrency=1)

    result = await measure(fake, load, num_prompts=10)

    assert fake.peak_open == 1 == result.summary.max_concurrent_requests
    assert result.values["max_client_queue_time_ms"] > 300
    assert result.values["max_ttft_ms"] > 350
    assert result.values["p99_dispatch_lag_ms"] < 100


async def test_a_trace_is_replayed_in_its_own_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-01-01 00:00:00.0,7,2\n2024-01-01 00:00:00.4,8,4\n2024-01-01 00:00:00.8,9,3\n"
    )
    fake = FakeOpenAI()

    result = await measure(
        fake,
        BenchLoad(arrivals="replay", rate_scale=2.0),
        num_prompts=None,
        dataset={"dataset_name": "azure", "dataset_path": path},
    )

    starts = [record.arrival - result.start for record in result.records]
    np.testing.assert_allclose(starts, [0.0, 0.2, 0.4], atol=0.02)
    assert [body["max_tokens"] for body in fake.bodies] == [2, 4, 3]
    assert [fake.count(body) for body in fake.bodies] == [7, 8, 9]


async def test_replay_needs_recorded_times(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n5,5\n")

    with pytest.raises(ConfigError, match="arrival times"):
        await measure(
            FakeOpenAI(),
            BenchLoad(arrivals="replay"),
            num_prompts=None,
            dataset={"dataset_name": "lengths", "dataset_path": path},
        )


async def test_everything_at_once_without_rate_and_limit() -> None:
    fake = FakeOpenAI(first_token_delay=0.2)

    result = await measure(fake, BenchLoad(), num_prompts=25)

    assert fake.peak_open == 25
    assert result.header.arrivals == "all at once"


async def test_chat_api_and_tokens_per_chunk() -> None:
    fake = FakeOpenAI(tokens_per_chunk=3)

    result = await measure(
        fake, BenchLoad(max_concurrency=2), target={"backend": "openai-chat"}, num_prompts=4
    )

    assert "messages" in fake.bodies[0]
    assert result.summary.counts.num_output_tokens == 24
    assert result.values["tokens_per_chunk"] == 3
    assert len(result.records[0].delivery_times) == 2


async def test_without_usage_chunks_are_counted_and_that_is_said() -> None:
    result = await measure(FakeOpenAI(sends_usage=False), BenchLoad(max_concurrency=2), num_prompts=4)

    assert result.values["token_count_source"] == "chunks"
    assert result.summary.counts.num_output_tokens == 24
    assert any("no usage" in warning for warning in result.warnings)


async def test_without_tokenize_lengths_are_estimates_and_that_is_said() -> None:
    fake = FakeOpenAI(has_tokenize=False)

    result = await measure(fake, BenchLoad(max_concurrency=2), num_prompts=4)

    assert result.values["prompt_length_source"] == "estimate"
    assert any("by estimate" in warning for warning in result.warnings)
    assert fake.count(fake.bodies[0]) == 1 + 12  # the fake's special token is not known of


async def test_warm_up_requests_are_sent_but_not_counted() -> None:
    fake = FakeOpenAI()

    result = await measure(fake, BenchLoad(max_concurrency=2), num_prompts=5, num_warmups=3)

    assert fake.num_completions == 8
    assert result.summary.counts.num_completed == 5
    prompts = [body["prompt"] for body in fake.bodies]
    assert len(set(prompts)) == 8


async def test_warm_up_that_fails_altogether_ends_the_run() -> None:
    with pytest.raises(ConfigError, match=r"2 warm-up.*HTTP 500"):
        await measure(FakeOpenAI(fail_every=1), BenchLoad(max_concurrency=2), num_warmups=2)


async def test_goodput_and_sampling_fields_reach_their_ends() -> None:
    fake = FakeOpenAI(first_token_delay=0.05)
    result = await measure(
        fake,
        BenchLoad(max_concurrency=2),
        num_prompts=4,
        output=OutputOptions(goodput=("ttft:10",)),
        sampling=SamplingConfig(temperature=0.5, ignore_eos=True),
        target={"header": (("X-Team", "a"),)},
    )

    assert result.summary.score.request_goodput == 0
    assert fake.bodies[0]["temperature"] == 0.5
    assert fake.bodies[0]["ignore_eos"] is True
    assert fake.headers[0]["X-Team"] == "a"


async def test_stop_leaves_a_partial_result_that_says_so() -> None:
    fake = FakeOpenAI(first_token_delay=0.02)

    result = await measure(fake, BenchLoad(max_concurrency=4), num_prompts=400, watcher=Watcher(stop_after=8))

    assert result.is_interrupted is True
    assert 8 <= result.summary.counts.num_completed < 30
    assert result.summary.counts.num_failed == 0
    assert result.num_interrupted_requests <= 4
    assert len(result.records) == result.summary.counts.num_completed


async def test_the_model_is_the_one_that_the_server_lists() -> None:
    fake = FakeOpenAI()

    result = await measure(fake, BenchLoad(max_concurrency=1), num_prompts=1)

    assert fake.bodies[0]["model"] == "fake" == result.header.model_id


async def test_no_server_is_a_clear_error() -> None:
    async with serving(FakeOpenAI()) as url:
        pass  # closed again: the port is free

    with pytest.raises(ConfigError, match=url):
        await measure_url(url)


async def measure_url(url: str) -> None:
    watcher = Watcher()
    run = RunConfig(load=BenchLoad(max_concurrency=1, num_prompts=1))
    bench = BenchConfig(target=TargetConfig(base_url=url))
    await run_bench(bench, [run], tokenizer=None, progress=watcher, stop=watcher.stop)


async def test_infinite_rate_is_written_as_other_tools_write_it() -> None:
    result = await measure(FakeOpenAI(), BenchLoad(request_rate=math.inf, max_concurrency=1), num_prompts=1)

    assert result.values["request_rate"] == "inf"


async def test_jobs_are_sent_call_by_call_and_reported_as_jobs() -> None:
    fake = FakeOpenAI(owned_by="onbeat")
    result = await measure(
        fake,
        BenchLoad(request_rate=50.0),
        num_prompts=3,
        dataset={"dataset_name": "retrieval-chain", "job_deadline": 30.0},
        target={"backend": "openai-chat"},
        num_warmups=1,
    )
    summary = result.values["jobs"]["retrieval-chain"]
    assert (summary["offered"], summary["kept"], summary["prompt_computed_twice_share"]) == (3, 3, None)
    assert result.header.num_prompts == 3
    sent = fake.bodies[-1]
    assert sent["slo"]["job"]["calls_left"] == 0
    assert sent["messages"][-2]["role"] == "assistant"
    assert sent["messages"][-2]["content"], "the answer that the server gave"
