"""Loads of embeddings: one delivery for each, no output, the same objectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.bench.bench_load import BenchLoad
from onbeat.core.slo import SLO
from onbeat.workload.slo_classes import SLOClass
from tests.cpu.bench.background import SMALL, Background, bench, load
from tests.cpu.bench.measure import measure
from tests.fake_openai import FakeOpenAI

CLASSES = (
    SLOClass(name="tight", slo=SLO(ttft=0.02), share=0.5),
    SLOClass(name="loose", slo=SLO(ttft=60.0), share=0.5),
)


async def test_an_embedding_has_one_delivery_and_is_held_to_its_ttft() -> None:
    fake = FakeOpenAI(owned_by="onbeat", first_token_delay=0.05, verdict={"met": True, "ttft_ms": 50.0})
    result = await measure(
        fake,
        BenchLoad(max_concurrency=4),
        num_prompts=8,
        classes=CLASSES,
        target={"backend": "openai-embeddings"},
    )
    assert all(body.keys() == {"model", "input", "slo"} for body in fake.bodies)
    assert {body["slo"]["ttft_ms"] for body in fake.bodies} == {20.0, 60_000.0}
    assert {headers["Accept"] for headers in fake.headers} == {"application/json"}
    counts = result.summary.counts
    assert (counts.num_completed, counts.num_output_tokens) == (8, 0)
    assert counts.num_prompt_tokens == sum(1 + len(body["input"].split()) for body in fake.bodies)
    assert {name: each.score.attainment for name, each in result.summary.classes.items()} == {
        "tight": 0.0,
        "loose": 1.0,
    }
    saved = result.values
    assert saved["median_ttft_ms"] == pytest.approx(saved["median_e2el_ms"])
    assert saved["median_ttft_ms"] >= 50
    assert saved["server_verdicts"]["only_server_met"] == 4
    assert not any("ended before" in each or "usage" in each for each in result.warnings)


@pytest.mark.parametrize(
    ("fault", "cause"), [("status:429", "HTTP 429"), ("status:500", "HTTP 500"), ("empty", "no embedding")]
)
async def test_what_goes_wrong_is_named(fault: str, cause: str) -> None:
    fake = FakeOpenAI(fail_every=2, fault=fault)
    result = await measure(fake, BenchLoad(), num_prompts=4, target={"backend": "openai-embeddings"})
    (group,) = result.errors
    assert (group["cause"], group["count"]) == (cause, 2)
    assert result.summary.counts.num_completed == 2


@pytest.mark.parametrize(
    "flags",
    [["--endpoint", "embeddings"], ["--endpoint", "/v1/embeddings"], ["--backend", "openai-embeddings"]],
)
def test_the_command_prints_and_saves_it(
    server: Background, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "r.json", tmp_path / "r.html"
    assert (
        bench(server, *SMALL, *flags, "--num-prompts", "3", "--json", str(path), "--report", str(page)) == 0
    )
    saved = load(path)
    assert (saved["completed"], saved["total_output_tokens"]) == (3, 0)
    assert "TTFT" in capsys.readouterr().out
    assert all("temperature" not in body for body in server.fake.bodies)


def test_nothing_is_sampled(server: Background, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, *SMALL, "--endpoint", "embeddings", "--top-k", "0") == 2
    assert "--top-k" in capsys.readouterr().err
