"""Jobs that the load client sends: their order, their prompts, and what the server is told of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import orjson
import pytest

from onbeat.bench.bench_config import SLOTransport
from onbeat.bench.bench_load import BenchLoad, PromptTools, RunConfig
from onbeat.bench.record import Conversation, JobOfCall, PayloadBuilder, Prompt, SentRequest, Status
from onbeat.bench.runner import LoadRunner
from onbeat.bench.session import JobOffer, summarise
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.workload.job import Call, Job
from onbeat.workload.job_kinds import job_load
from onbeat.workload.load import Load
from onbeat.workload.prompts import PromptWriter, estimated_pool

WRITER = PromptWriter(estimated_pool(), "salt")
FIRST = Call(input_tokens=20, output_tokens=8)
CALLS = (
    FIRST,
    Call(input_tokens=5, output_tokens=8, think=0.02, continues=0),
    Call(input_tokens=5, output_tokens=8, text="an own text"),
    Call(input_tokens=5, output_tokens=8, quotes=(1, 2), schema={"type": "object"}),
)


class Server:
    """Answers each call with its number, or not at all."""

    def __init__(self, *, seconds: float = 0.005, failing: int = -1) -> None:
        self.got: dict[int, Conversation] = {}
        self.records: list[SentRequest] = []
        self.num_open = self.peak = 0
        self._seconds, self._failing = seconds, failing

    async def send(self, prompt: Prompt, record: SentRequest) -> SentRequest:
        assert isinstance(prompt, Conversation)
        self.got[record.index] = prompt
        self.records.append(record)
        clock = asyncio.get_running_loop().time
        record.sent, self.num_open = clock(), self.num_open + 1
        self.peak = max(self.peak, self.num_open)
        await asyncio.sleep(self._seconds)
        self.num_open -= 1
        record.text, record.end, record.num_output_tokens = f"answer {record.index}", clock(), 8
        record.status = Status.FAILED if record.index == self._failing else Status.COMPLETED
        return record


async def run(
    server: Server, *jobs: Job, starts: list[float] | None = None, max_concurrency: int | None = None
) -> list[SentRequest]:
    load = job_load("jobs", jobs, None if starts is None else np.array(starts))
    clock = asyncio.get_running_loop().time
    offer = JobOffer(load, WRITER)
    runner = LoadRunner(server.send, offsets=offer.starts, max_concurrency=max_concurrency, clock=clock)
    outcome = await runner.run(await offer.items(), offer.begin, asyncio.Event())
    assert load.jobs is not None
    server.kinds = summarise(load.jobs, outcome.records)  # type: ignore[attr-defined]
    return sorted(outcome.records, key=lambda record: record.index)


async def test_calls_come_in_their_order_with_the_answers_that_they_need() -> None:
    server = Server()
    records = await run(server, Job(calls=CALLS, system_tokens=10, deadline=9.0, kind="agent"))
    first, second, third, last = (server.got[index].messages for index in range(4))
    assert [each.role for each in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first
    assert second[2].text == "answer 0"
    assert third[-1].text == "an own text"
    assert last[-1].text.startswith("answer 1\n\nanswer 2\n\n")
    assert server.got[3].schema == {"type": "object"}
    assert records[1].sent >= records[0].end + 0.02
    assert records[3].sent >= max(records[1].end, records[2].end)
    assert [record.job and record.job.calls_left for record in records] == [2, 1, 1, 0]
    assert len({record.job and record.job.job_id for record in records}) == 1
    assert all(record.text is None for record in records), "answers are let go with their job"
    assert server.kinds["agent"].attainment == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("server", "job", "sent"),
    [
        (Server(failing=0), Job(calls=CALLS), [0, 2]),
        (Server(seconds=0.03), Job(calls=CALLS[:2], deadline=0.04), [0]),
    ],
)
async def test_a_call_that_fails_and_a_deadline_end_a_job(server: Server, job: Job, sent: list[int]) -> None:
    records = await run(server, job)
    assert [record.index for record in records] == sent
    assert server.kinds["job"].lost == 1  # type: ignore[attr-defined]


async def test_jobs_start_at_their_times_and_calls_wait_for_slots() -> None:
    server = Server(seconds=0.02)
    job = Job(calls=(FIRST, FIRST))
    records = await run(server, job, replace(job, kind="other"), starts=[0.0, 0.05], max_concurrency=1)
    assert server.peak == 1
    assert records[2].scheduled is not None
    assert records[0].scheduled is not None
    assert records[2].scheduled - records[0].scheduled == pytest.approx(0.05)
    assert records[1].slot_wait >= 0.015


def test_the_same_flags_make_the_same_jobs_as_in_a_simulation() -> None:
    load = BenchLoad(dataset_name="agents", max_concurrency=2, num_prompts=5, seed=3)
    tools = PromptTools(writer=WRITER, count_tokens=len)
    offer = JobOffer.make(RunConfig(load=load), tools)
    simulated = Load(dataset_name="agents", max_concurrency=2, num_prompts=5, seed=3).offered()
    assert (offer.num_prompts, len(offer.load)) == (5, len(simulated))
    assert offer.load.num_prompt_tokens.tolist() == simulated.num_prompt_tokens.tolist()


def test_the_server_is_told_of_the_job_in_the_body_or_by_headers() -> None:
    record = SentRequest(index=0, num_prompt_tokens=1, max_tokens=1)
    record.job = JobOfCall("j", 2.5, 3, "agent")
    assert SLOTransport(how="body").body(record) == {
        "slo": {"job": {"id": "j", "e2e_ms": 2500.0, "class": "agent", "calls_left": 3}}
    }
    assert SLOTransport(how="headers").headers(record)["x-slo-job-calls-left"] == "3"
    assert SLOTransport(how="none").body(record) == {}
    record.slo = SLO(ttft=0.5)
    assert SLOTransport(how="body").body(record)["slo"]["ttft_ms"] == 500.0


def test_a_conversation_is_messages_or_one_text() -> None:
    talk = Conversation(())._replace(schema={"type": "object"})
    body = orjson.loads(PayloadBuilder(api="chat", model="m").build(talk, 5))
    assert body["messages"] == []
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    body = orjson.loads(PayloadBuilder(api="completions", model="m").build("a b", 5))
    assert (body["prompt"], "response_format" in body) == ("a b", False)


def test_a_deadline_of_jobs_needs_jobs() -> None:
    with pytest.raises(ConfigError, match="--job-deadline-ms"):
        BenchLoad(job_deadline=3.0).named()
