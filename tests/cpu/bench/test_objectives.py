"""Objectives on their way to a server, and what comes back: verdicts and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.bench.bench_load import BenchLoad
from onbeat.core.slo import SLO
from onbeat.workload.slo_classes import SLOClass
from tests.cpu.bench.measure import measure
from tests.fake_openai import FakeOpenAI

CLASSES = (
    SLOClass(name="tight", slo=SLO(ttft=5.0, tbt=1.0), share=0.5, tenant="team a"),
    SLOClass(name="loose", slo=SLO(e2e=60.0), share=0.5),
)
CLOSED = BenchLoad(max_concurrency=2)


async def test_onbeat_is_told_class_and_objectives_of_each_request() -> None:
    fake = FakeOpenAI(owned_by="onbeat")

    result = await measure(fake, CLOSED, num_prompts=8, num_warmups=2, classes=CLASSES, shed=True)

    measured = fake.bodies[2:]
    sent = sorted((body["slo"] for body in measured), key=lambda slo: slo["class"])
    assert (
        sent
        == [{"e2e_ms": 60000.0, "class": "loose", "shed": True}] * 4
        + [{"ttft_ms": 5000.0, "tbt_ms": 1000.0, "class": "tight", "shed": True}] * 4
    )
    assert all("slo" not in body for body in fake.bodies[:2])  # warm-up promises nothing
    tenants = [headers.get("x-llm-d-inference-fairness-id") for headers in fake.headers[2:]]
    assert tenants == ["team a" if body["slo"]["class"] == "tight" else None for body in measured]
    assert result.values["slo_sent"] == "body"
    assert result.summary.score.attainment == 1.0


@pytest.mark.parametrize("send", ["auto", "none"])
async def test_other_servers_are_not_told(send: str) -> None:
    fake = FakeOpenAI(owned_by="somebody")

    result = await measure(fake, CLOSED, num_prompts=4, classes=CLASSES, send_slo=send)

    assert all("slo" not in body for body in fake.bodies)
    assert result.values["slo_sent"] == "none"
    assert result.summary.score.attainment == 1.0


async def test_headers_instead_of_the_body() -> None:
    fake = FakeOpenAI()

    await measure(
        fake,
        CLOSED,
        num_prompts=2,
        classes=(SLOClass(name="default", slo=SLO(ttft=5.0)),),
        send_slo="headers",
    )

    assert [headers.get("x-llm-d-slo-ttft-ms") for headers in fake.headers] == ["5000"] * 2
    assert all("x-llm-d-slo-tpot-ms" not in headers for headers in fake.headers)


async def test_the_verdict_of_the_last_chunk_is_kept_and_compared() -> None:
    fake = FakeOpenAI(verdict={"met": False, "ttft_ms": 1.5, "predicted_ttft_ms": 3.0, "relegated": True})

    result = await measure(fake, CLOSED, num_prompts=4, classes=CLASSES)

    assert [record.verdict is not None for record in result.records] == [True] * 4
    verdicts = result.values["server_verdicts"]
    assert (verdicts["agreement"], verdicts["only_client_good"], verdicts["relegated"]) == (0.0, 4, 4)
    assert verdicts["median_server_ttft_ms"] == pytest.approx(1.5)
    assert verdicts["median_predicted_ttft_error"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("faults", "key"),
    [
        ({"fault": "status:429", "fault_code": "slo_unattainable", "predicted_ttft_ms": 4000.0}, "rejected"),
        ({"fault": "status:503", "fault_code": "server_overloaded", "predicted_ttft_ms": 4000.0}, "rejected"),
        ({"fault": "status:504", "fault_code": "deadline_exceeded", "predicted_ttft_ms": 4000.0}, "expired"),
        ({"fault": "error", "fault_code": "deadline_exceeded"}, "expired"),
        ({"fault": "error", "fault_code": "slo_unattainable"}, "rejected"),
    ],
)
async def test_refusals_are_no_failures_and_are_sent_once(faults: dict[str, Any], key: str) -> None:
    fake = FakeOpenAI(fail_every=2, **faults)

    result = await measure(fake, CLOSED, num_prompts=10, classes=CLASSES)
    summary = result.values

    assert fake.num_completions == 10  # Retry-After or not: shed load is not offered twice
    assert (summary["completed"], summary[key], summary["failed"]) == (5, 5, 0)
    assert summary["attainment"] == 0.5
    assert summary["attainment_admitted"] == (1.0 if key == "rejected" else 0.5)
    times = "rejection" if key == "rejected" else "expiry"
    assert 0 < summary[f"p50_{times}_ms"] <= summary[f"max_{times}_ms"] < 1000
    if "predicted_ttft_ms" in faults:
        assert summary["median_rejected_predicted_ttft_ms"] == 4000.0
        assert summary["median_retry_after_ms"] == 1500.0
