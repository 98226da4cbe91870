"""Loads of jobs against a server: a call is sent once those that it needs have ended, with their answers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from onbeat.bench.bench_config import BenchConfig
from onbeat.bench.bench_load import BenchLoad, PromptTools
from onbeat.bench.payload import Conversation, Message
from onbeat.bench.record import JobOfCall, SentRequest, Status
from onbeat.bench.runner import LoadRunner
from onbeat.core.errors import ConfigError
from onbeat.metrics.jobs import JobSummary
from onbeat.workload.job import Call, Job
from onbeat.workload.job_load import summarise_calls
from onbeat.workload.offered import JobRows, OfferedLoad
from onbeat.workload.prompts import PromptWriter


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


class JobOffer:
    """Jobs, as `onbeat simulate` makes them of the same flags. Each call is sent once.

    A call that does not come to its end ends its job, and so does the deadline: no other call is sent.
    Prompts contain the answers that the server gave, so that its prefix cache finds them.

    Parameters
    ----------
    load : the calls as rows; `arrivals` has the start of each job, None begins them as slots come free.
    writer : makes the words of inputs.
    keeps_text : whether answers stay in the records.
    """

    def __init__(self, load: OfferedLoad, writer: PromptWriter, *, keeps_text: bool = False) -> None:
        assert load.jobs is not None
        self.load, self._rows, self._writer, self._keeps_text = load, load.jobs, writer, keeps_text
        self.num_prompts = len(load.jobs.jobs)
        self.starts = None if load.arrivals is None else load.arrivals[load.jobs.firsts]
        # not the ids of another run with the same words: a server may still know these
        salt = f"{writer.salt}/{time.time_ns()}"
        self._name = hashlib.blake2b(salt.encode(), digest_size=8).hexdigest()

    @classmethod
    def make(cls, bench: BenchConfig, load: BenchLoad, tools: PromptTools) -> JobOffer:
        """Return the jobs of a run."""
        offered = load.offered(bench.slo_classes, count_tokens=tools.count_tokens)
        if not offered.num_output_tokens.all():
            raise ConfigError(
                "a job of this load has a call that embeds a text (output_tokens 0), and bench sends none; "
                "leave such calls out, or simulate the load"
            )
        return cls(offered, tools.writer, keeps_text=bench.keep_text)

    async def items(self, limit: int | None = None) -> AsyncIterator[int]:
        """Return the numbers of the jobs, or of the first so many; words are made as a job begins."""
        return _each(range(self.num_prompts)[:limit])

    async def begin(self, runner: LoadRunner, number: int, start: float) -> None:
        """Send a job."""
        job, loop = self._rows.jobs[number], asyncio.get_running_loop()
        ended: list[asyncio.Future[bool]] = [loop.create_future() for _ in job.calls]
        state = _OpenJob(number, job, f"{self._name}-{number}", start, ended)
        async with asyncio.TaskGroup() as group:
            for index in range(len(job.calls)):
                group.create_task(self._call(runner, state, index))

    async def _call(self, runner: LoadRunner, state: _OpenJob, index: int) -> None:
        call, ended = state.job.calls[index], state.ended[index]
        own = self._own_text(state, index)
        if not all([await state.ended[each] for each in call.needs]):
            ended.set_result(False)
            return
        due = max((state.ends[each] for each in call.needs), default=state.start) + call.think
        if due > state.deadline:
            ended.set_result(False)
            return
        await asyncio.sleep(max(0.0, due - runner.clock()))
        talk = self._talk(state, call, own)
        record = self._record(state, index, due)
        await runner.serve(Conversation(talk, call.schema), record)
        state.ends[index] = record.end
        state.talks[index] = (*talk, Message("assistant", record.text or ""))
        if not self._keeps_text:
            record.text = None
        ended.set_result(record.is_completed)

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

    def _record(self, state: _OpenJob, index: int, due: float) -> SentRequest:
        load, job = self.load, state.job
        record = SentRequest.of(load, int(self._rows.firsts[state.number]) + index)
        record.scheduled = None if load.arrivals is None else due
        if job.deadline < inf:
            record.job = JobOfCall(
                state.job_id, job.deadline, job.calls_left[index] if job.says_calls_left else None, job.kind
            )
        return record


async def _each(numbers: Iterable[int]) -> AsyncIterator[int]:
    for number in numbers:
        yield number


def summarise(rows: JobRows, records: Sequence[SentRequest]) -> Mapping[str, JobSummary]:
    """Return what became of each kind of job."""
    calls = {record.index: record for record in records if record.status is not Status.INTERRUPTED}
    return summarise_calls(rows, calls)
