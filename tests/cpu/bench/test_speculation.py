"""Acceptance of a run, from a server's metrics or its answers."""

from __future__ import annotations

import pytest

from onbeat.bench.bench_load import BenchLoad
from tests.cpu.bench.measure import measure
from tests.fake_openai import FakeOpenAI

DETAILS = {"reasoning_tokens": 0, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}


def exposition(num_drafts: int, num_drafted: int, accepted_at: tuple[int, ...]) -> str:
    start, labels = "vllm:spec_decode_num_", 'engine="0",model_name="fake"'
    lines = [
        f"{start}drafts_total{{{labels}}} {num_drafts}",
        f"{start}draft_tokens_total{{{labels}}} {num_drafted}",
        f"{start}accepted_tokens_total{{{labels}}} {sum(accepted_at)}",
        *(
            f'{start}accepted_tokens_per_pos_total{{{labels},position="{j}"}} {number}'
            for j, number in enumerate(accepted_at)
        ),
    ]
    return "\n".join(lines) + "\n"


async def test_counters_are_read_before_and_after_the_run() -> None:
    fake = FakeOpenAI(
        metrics=[exposition(10, 40, (10, 5)), exposition(30, 120, (26, 13, 1))], details=DETAILS
    )
    result = await measure(fake, BenchLoad(max_concurrency=4))
    summary = result.values
    assert (summary["spec_decode_num_drafts"], summary["spec_decode_draft_tokens"]) == (20, 80)
    assert summary["spec_decode_acceptance_length"] == 1 + 25 / 20
    assert summary["spec_decode_acceptance_rate"] == pytest.approx(100 * 25 / 80)
    assert summary["spec_decode_per_position_acceptance_rates"] == [0.8, 0.4, 0.05]


@pytest.mark.parametrize("metrics", [[], ["up 1\n"], ["no metrics\n"]])
async def test_usage_stands_in_for_metrics(metrics: list[str]) -> None:
    fake = FakeOpenAI(details=DETAILS, metrics=metrics)
    result = await measure(fake, BenchLoad(max_concurrency=4))
    assert result.values["spec_decode_draft_tokens"] == 4 * len(result.records)
    assert result.values["spec_decode_acceptance_rate"] == 75.0
    assert result.values["spec_decode_source"] == "usage"


async def test_a_server_that_does_not_speculate_has_no_acceptance() -> None:
    result = await measure(FakeOpenAI(), BenchLoad(max_concurrency=4))
    assert not [key for key in result.values if key.startswith("spec_decode")]
