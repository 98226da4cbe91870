"""Loads of jobs against a server: a call is sent once those that it needs have ended, with their answers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from onbeat.bench.bench_config import BenchConfig
from onbeat.bench.bench_load import BenchLoad, PromptTools
from onbeat.bench.payload import Conversation, Message, Prompt
from onbeat.bench.record import JobOfCall, RequestRecord, Status
from onbeat.bench.runner import LoadOutcome, until_stopped
from onbeat.core.errors import ConfigError
from onbeat.metrics.jobs import CallTimes, JobSummary, summarise_jobs
from onbeat.workload.job import Call, Job
from onbeat.workload.job_load import job_outcomes
from onbeat.workload.offered import JobRows, OfferedLoad
from onbeat.workload.prompts import PromptWriter

SendPrompt = Callable[[Prompt, RequestRecord], Awaitable[RequestRecord]]


@dataclass(slots=True)
class _OpenJob:
    """A job under way."""

    number: int
    job: Job
    job_id: str
    start: float
    ended: list[asyncio.Future[bool]]
    """Of each call: whether it came to its end."""
    ends: dict[int, float] = field(default_factory=dict)
    talks: dict[int, tuple[Message, ...]] = field(default_factory=dict)
    """Of each call that has ended: its conversation, with its answer."""

    @property
    def deadline(self) -> float:
        return self.start + self.job.deadline


class JobRunner:
    """Sends the calls of jobs, each once.

    A call that does not come to its end ends its job, and so does the deadline: no other call is sent.
    Prompts contain the answers that the server gave, so that its prefix cache finds them.

    Parameters
    ----------
    send : sends one call and fills in its record, with the text of the answer; must not raise.
    load : the calls as rows; `arrivals` has the start of each job, None begins them as slots come free.
    writer : makes the words of inputs.
    max_concurrency : most calls open at once; None sets no limit.
    on_end : called after each call that ended by itself (for progress).
    keeps_text : whether answers stay in the records.
    """

    def __init__(  # noqa: PLR0913 - what is sent, how, and who hears of it
        self,
        send: SendPrompt,
        load: OfferedLoad,
        writer: PromptWriter,
        *,
        max_concurrency: int | None = None,
        on_end: Callable[[RequestRecord], None] = lambda _record: None,
        keeps_text: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert load.jobs is not None
        self._send, self._load, self._rows, self._writer = send, load, load.jobs, writer
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._on_end, self._keeps_text, self._clock = on_end, keeps_text, clock
        self._records: list[RequestRecord] = []
        # not those of another run with the same words: a server may still know these
        name = hashlib.blake2b(f"{writer.salt}/{time.time_ns()}".encode(), digest_size=8).hexdigest()
        self._name = name

    async def run(self, stop: asyncio.Event, *, limit: int | None = None) -> LoadOutcome:
        """Send all jobs, or the first so many; when `stop` is set, cancel what is open."""
        return await until_stopped(partial(self._offer, limit), self._records, stop, self._clock)

    async def _offer(self, limit: int | None, start: float) -> None:
        starts = self._load.arrivals
        async with asyncio.TaskGroup() as group:
            for number, first in enumerate(self._rows.firsts[:limit].tolist()):
                if starts is not None:
                    due = start + float(starts[first])
                    await asyncio.sleep(max(0.0, due - self._clock()))
                elif self._slots is not None:
                    await self._slots.acquire()  # a closed loop: a job begins where a call could be sent
                    self._slots.release()
                    due = self._clock()
                else:
                    due = start
                group.create_task(self._job(number, due))
                await asyncio.sleep(0)

    async def _job(self, number: int, start: float) -> None:
        job = self._rows.jobs[number]
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[bool]] = [loop.create_future() for _ in job.calls]
        state = _OpenJob(number, job, f"{self._name}-{number}", start, futures)
        async with asyncio.TaskGroup() as group:
            for index in range(len(job.calls)):
                group.create_task(self._call(state, index))

    async def _call(self, state: _OpenJob, index: int) -> None:
        call, ended = state.job.calls[index], state.ended[index]
        own = self._own_text(state, index)
        if not all([await state.ended[each] for each in call.needs]):
            ended.set_result(False)
            return
        due = max((state.ends[each] for each in call.needs), default=state.start) + call.think
        if due > state.deadline:
            ended.set_result(False)
            return
        await asyncio.sleep(max(0.0, due - self._clock()))
        talk = self._talk(state, call, own)
        record = self._record(state, index, due)
        if self._slots is None:
            await self._exchange(Conversation(talk, call.schema), record)
        else:
            asked = self._clock()
            async with self._slots:
                record.slot_wait = self._clock() - asked
                await self._exchange(Conversation(talk, call.schema), record)
        state.ends[index] = record.end
        state.talks[index] = (*talk, Message("assistant", record.text or ""))
        if not self._keeps_text:
            record.text = None
        ended.set_result(record.is_completed)

    async def _exchange(self, prompt: Conversation, record: RequestRecord) -> None:
        self._records.append(record)
        await self._send(prompt, record)
        self._on_end(record)

    def _own_text(self, state: _OpenJob, index: int) -> str:
        call = state.job.calls[index]
        if call.text is not None:
            return call.text
        return self._writer.text(call.input_tokens, "input", state.number, index)

    def _talk(self, state: _OpenJob, call: Call, own: str) -> tuple[Message, ...]:
        """Return the messages of a call: those before it, and one with the answers that it quotes."""
        before: tuple[Message, ...] = ()
        if call.continues is not None:
            before = state.talks[call.continues]
        elif state.job.system_tokens:
            text = self._writer.text(state.job.system_tokens, "system", state.job.kind)
            before = (Message("system", text),)
        quoted = [state.talks[each][-1].text for each in call.quotes]
        return (*before, Message("user", "\n\n".join([*quoted, own])))

    def _record(self, state: _OpenJob, index: int, due: float) -> RequestRecord:
        load, job = self._load, state.job
        record = RequestRecord.of(load, int(self._rows.firsts[state.number]) + index)
        record.scheduled = None if load.arrivals is None else due
        if job.deadline < inf:
            record.job = JobOfCall(
                state.job_id, job.deadline, job.calls_left[index] if job.says_calls_left else None, job.kind
            )
        return record


class JobOffer:
    """Jobs, as `onbeat simulate` makes them of the same flags."""

    needs_answers = True

    def __init__(
        self, load: OfferedLoad, writer: PromptWriter, *, max_concurrency: int | None, keeps_text: bool
    ) -> None:
        assert load.jobs is not None
        self._load, self._rows, self._writer = load, load.jobs, writer
        self._max_concurrency, self._keeps_text = max_concurrency, keeps_text
        self.num_prompts, self.num_requests = len(load.jobs.jobs), len(load)

    @classmethod
    def make(cls, bench: BenchConfig, load: BenchLoad, tools: PromptTools) -> JobOffer:
        """Return the jobs of a run."""
        offered = load.offered(bench.slo_classes, count_tokens=tools.count_tokens)
        if not offered.num_output_tokens.all():
            raise ConfigError(
                "a job of this load has a call that embeds a text (output_tokens 0), and bench sends none; "
                "leave such calls out, or simulate the load"
            )
        return cls(offered, tools.writer, max_concurrency=load.max_concurrency, keeps_text=bench.keep_text)

    async def prepare(self) -> None:
        """Do nothing: the words of a job are made as it begins, ahead of its calls."""

    async def run(
        self,
        send: SendPrompt,
        on_end: Callable[[RequestRecord], None],
        stop: asyncio.Event,
        *,
        limit: int | None = None,
    ) -> LoadOutcome:
        """Send the jobs, or the first so many."""
        runner = JobRunner(
            send,
            self._load,
            self._writer,
            max_concurrency=self._max_concurrency,
            on_end=on_end,
            keeps_text=self._keeps_text,
        )
        return await runner.run(stop, limit=limit)

    def jobs(self, records: Sequence[RequestRecord]) -> Mapping[str, JobSummary]:
        """Return what became of each kind of job."""
        return summarise(self._rows, records)


def summarise(rows: JobRows, records: Sequence[RequestRecord]) -> Mapping[str, JobSummary]:
    """Return what became of each kind of job."""
    calls = {
        record.index: CallTimes(
            record.arrival,
            record.end,
            record.is_completed,
            record.num_output_tokens,
            record.num_prompt_tokens,
            record.num_cached_tokens,
        )
        for record in records
        if record.status is not Status.INTERRUPTED
    }
    return summarise_jobs(job_outcomes(rows, calls))
