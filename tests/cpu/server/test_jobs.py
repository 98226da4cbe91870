"""Calls of jobs: what they are held to, what their answers say, and what is refused."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from onbeat.core.request import Request
from onbeat.jobs import table
from onbeat.server import shared
from tests.cpu.server.asking import CHAT, TEXT, ask_chat, ask_text, check
from tests.cpu.server.running import HELLO, Served, parse_events
from tests.fakes_engine import FakeEngine

JOB = {"id": "order-7781", "e2e_ms": 20_000, "calls_left": 1, "class": "agent"}


@pytest.fixture
def engine() -> KeepingEngine:
    return KeepingEngine()


class KeepingEngine(FakeEngine):
    """Keeps the requests that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Request] = []

    def generate(self, request: Request) -> Any:
        self.got.append(request)
        return super().generate(request)


async def test_calls_get_shares_and_the_last_says_how_the_job_ended(
    served: Served, engine: KeepingEngine
) -> None:
    first = await ask_chat(served, slo={"job": JOB, "ttft_ms": 5000})
    assert first["slo"]["job"].keys() == {
        *("id", "calls", "elapsed_ms", "in_calls_ms", "remaining_ms", "share_ms", "replica", "moved", "met")
    }
    assert (first["slo"]["job"]["calls"], first["slo"]["job"]["met"]) == (1, None)
    last = await ask_text(served, slo={"job": JOB | {"calls_left": 0, "e2e_ms": None}})
    assert (last["slo"]["met"], last["slo"]["job"]["calls"], last["slo"]["job"]["met"]) == (True, 2, True)
    one, other = (request.slo for request in engine.got)
    assert one is not None
    assert (one.ttft, other is not None and one.e2e is not None and other.e2e is not None) == (5.0, True)
    assert 19.0 < other.e2e <= 20.0, "the last call may take what is left"  # type: ignore[union-attr, operator]
    text = (await served.get("/metrics")).body.decode()
    for line in ("onbeat_jobs_open 0.0", 'onbeat_jobs_total{outcome="kept"} 1.0', 'part="in_calls"'):
        assert line in text


async def test_a_stream_and_headers_say_the_same(served: Served) -> None:
    headers = {"x-slo-job-id": "a", "x-slo-job-deadline-ms": f"{(time.time() + 9) * 1e3:.0f}"}
    headers |= {"x-slo-job-calls-left": "0", "x-slo-job-class": "agent"}
    answer = await served.post(CHAT, {"messages": HELLO, "stream": True}, headers=headers)
    events = parse_events(answer.body)
    job = events[-2]["slo"]["job"]
    assert (job["id"], job["met"]) == ("a", True)
    assert 0 < job["remaining_ms"] <= 9000


async def test_a_stream_that_breaks_off_does_not_end_its_job(served: Served, engine: KeepingEngine) -> None:
    last = {"job": JOB | {"calls_left": 0}}
    engine.script.error_after = 2
    events = await served.events(CHAT, {"messages": HELLO, "slo": last})
    assert events[-2]["error"]["code"] == "engine_error"
    assert "onbeat_jobs_open 1.0" in (await served.get("/metrics")).body.decode()
    engine.script.error_after = None
    again = await ask_chat(served, slo=last)
    assert (again["slo"]["job"]["calls"], again["slo"]["job"]["met"]) == (2, True)


async def test_metadata_of_responses_says_the_same(served: Served) -> None:
    own = {"slo_job_id": "17", "slo_job_e2e_ms": "5000", "slo_job_calls_left": "0"}
    answer = await served.post("/v1/responses", {"input": "x", "metadata": own})
    assert answer.status == 200, answer.body
    assert answer.json["slo"]["job"]["id"] == "17"


@pytest.mark.parametrize(
    ("job", "param", "words"),
    [
        ({**JOB, "id": "x" * 10_000}, "slo.job.id", "at most 128"),
        ({"e2e_ms": 5}, "slo.job.id", "is missing"),
        ({**JOB, "calls_left": -1}, "slo.job.calls_left", "-1"),
        ({**JOB, "deadline": 5}, "slo.job.deadline", "deadline_ms"),
        ({"id": "a"}, "slo.job", "this call states no deadline"),
        ({"id": "a", "deadline_ms": 1000}, "slo.job.deadline_ms", "state a time to come"),
    ],
)
async def test_a_bad_job_is_told_in_a_sentence(
    served: Served, job: dict[str, Any], param: str, words: str
) -> None:
    answer = await served.post(TEXT, {"prompt": "x", "slo": {"job": job}})
    assert answer.status == 400
    assert words in answer.error["message"]
    assert len(answer.error["message"]) < 300
    assert answer.error["param"] == param


async def test_a_deadline_is_meant_by_the_clock_as_it_is(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that slept, or whose clock was set, is not an hour late for ever."""

    async def remaining(now: float) -> float:
        clock = SimpleNamespace(time=lambda: now, monotonic=time.monotonic)
        monkeypatch.setattr(shared, "time", clock)
        answer = await ask_text(served, slo={"job": {"id": str(now), "deadline_ms": (now + 50) * 1e3}})
        left: float = answer["slo"]["job"]["remaining_ms"]
        return left

    now = time.time()
    for each in (now, now + 3600, now - 3600):
        assert 0 < await remaining(each) <= 50_001


async def test_calls_of_a_job_state_one_deadline(served: Served) -> None:
    await ask_text(served, slo={"job": JOB})
    answer = await served.post(TEXT, {"prompt": "x", "slo": {"job": JOB | {"e2e_ms": 30_000}}})
    message = check(answer, 400, "invalid_value", "slo.job.e2e_ms")
    assert "first call" in message


@pytest.mark.parametrize(
    ("headers", "wrong"),
    [
        ({"x-slo-job-e2e-ms": "5000"}, "x-slo-job-id"),
        ({"x-slo-job-id": "a", "x-slo-job-e2e-ms": "soon"}, "x-slo-job-e2e-ms"),
        ({"x-slo-job-id": "a", "x-slo-job-e2e-ms": "0"}, "x-slo-job-e2e-ms"),
        ({"x-slo-job-id": "a", "x-slo-job-calls-left": "0.5"}, "x-slo-job-calls-left"),
        ({"x-slo-job-id": "", "x-slo-job-e2e-ms": "5000"}, "x-slo-job-id"),
        ({"x-slo-job-id": "a", "x-slo-job-class": "x" * 200}, "x-slo-job-class"),
    ],
)
async def test_bad_headers_are_named(served: Served, headers: dict[str, str], wrong: str) -> None:
    answer = await served.post(TEXT, {"prompt": "x"}, headers=headers)
    assert (answer.status, answer.error["param"]) == (400, wrong)
    assert f"header {wrong} is " in answer.error["message"]


async def test_a_job_that_cannot_be_done_in_time_is_refused_at_its_first_call(served: Served) -> None:
    await ask_text(served, slo={"job": JOB | {"calls_left": 0}})
    hopeless = {"id": "b", "e2e_ms": 1, "calls_left": 9000, "class": JOB["class"]}
    answer = await served.post(TEXT, {"prompt": "x", "slo": {"job": hopeless, "shed": True}})
    assert (answer.status, answer.error["code"]) == (429, "job_unattainable")
    assert answer.error["predicted_job_ms"] > 1
    assert "Retry-After" in answer.headers
    late = await ask_text(served, slo={"job": hopeless, "shed": False})
    assert late["slo"]["job"]["met"] is None


@pytest.mark.parametrize("served", [{"api_keys": ("one", "other")}], indirect=True)
async def test_a_key_learns_nothing_of_anothers_calls_of_the_same_class(
    served: Served, engine: KeepingEngine
) -> None:
    """What `other` asks takes long; `one` has the time that its own calls leave it, and is not refused."""

    async def share(key: str, name: str, **stated: Any) -> float:
        job = {"id": name, "e2e_ms": 20_000, "calls_left": 3, "class": "support"} | stated
        body = {"prompt": "x", "max_tokens": 8, "slo": {"job": job, "shed": True}}
        answer = await served.post(TEXT, body, headers={"authorization": f"Bearer {key}"})
        assert answer.status == 200, answer.body
        got: float = answer.json["slo"]["job"]["share_ms"]
        return got

    await share("one", "a")
    before = await share("one", "b")
    engine.script.first_delay = 0.7
    for _ in range(3):
        await share("other", "c", e2e_ms=86_000_000, calls_left=9000)
    engine.script.first_delay = 0.0
    assert await share("one", "d") == pytest.approx(before, rel=0.05)


async def test_a_new_class_is_not_refused_for_what_nobody_knows_of_it(
    served: Served, engine: KeepingEngine
) -> None:
    engine.script.first_delay = 0.2
    await ask_text(served, slo={"job": JOB | {"calls_left": 0}})
    job = {"id": "b", "e2e_ms": 5000, "calls_left": 3, "class": "new"}
    first = await ask_text(served, slo={"job": job, "shed": True})
    assert first["slo"]["job"]["calls"] == 1


async def test_whoever_opens_jobs_without_end_keeps_nobody_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MOST_JOBS", 20)
    for number in range(60):
        job = {"id": f"flood {number}", "e2e_ms": 86_400_000, "calls_left": 9}
        await ask_text(served, max_tokens=1, slo={"job": job})
        if number in (0, 10):
            await ask_text(served, slo={"job": JOB | {"calls_left": 3}})
        if number == 20:
            last = await ask_text(served, slo={"job": JOB | {"e2e_ms": None, "calls_left": 0}})
            assert (last["slo"]["job"]["calls"], last["slo"]["job"]["met"]) == (3, True)
    assert "onbeat_jobs_open 20.0" in (await served.get("/metrics")).body.decode()


async def test_an_embedding_is_no_call_of_a_job(served: Served) -> None:
    answer = await served.post("/v1/embeddings", {"input": "x", "slo": {"job": JOB}})
    assert answer.status == 400
