"""One command's measurements: probe the server, then run after run against it.

A run offers requests that stand for themselves, or jobs. A call of a job is sent once those that it needs
have ended, with their answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol

import aiohttp

from onbeat.bench.bench_config import BenchConfig, choose_transport
from onbeat.bench.bench_load import TEXT_DATASETS, BenchLoad, PromptTools, RunConfig, prompts_of
from onbeat.bench.client import CountTokens, Endpoint, StreamingClient, open_session
from onbeat.bench.probe import choose_model, server_pool, wait_until_ready
from onbeat.bench.record import Conversation, JobOfCall, Message, PayloadBuilder, SentRequest, Status
from onbeat.bench.result import BenchRun, build_result
from onbeat.bench.runner import LoadRunner, Send
from onbeat.bench.speculation import look_at_drafts
from onbeat.core.errors import ConfigError
from onbeat.core.settled_memory import settled_memory
from onbeat.core.tokenizer import Tokenizer
from onbeat.metrics.jobs import JobSummary
from onbeat.workload.job import Call, Job
from onbeat.workload.job_kinds import summarise_calls
from onbeat.workload.load import JOB_LOADS
from onbeat.workload.offered import JobRows, OfferedLoad
from onbeat.workload.prompts import PromptSource, PromptWriter, WordPool, estimated_pool, tokenizer_pool


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
    def make(cls, run: RunConfig, tools: PromptTools) -> JobOffer:
        """Return the jobs of a run."""
        offered = run.load.offered(run.classes, count_tokens=tools.count_tokens)
        if not offered.num_output_tokens.all():
            raise ConfigError(
                "a job of this load has a call that embeds a text (output_tokens 0), and bench sends none; "
                "leave such calls out, or simulate the load"
            )
        return cls(offered, tools.writer, keeps_text=tools.keeps_text)

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
            record.job = JobOfCall(state.job_id, job.deadline, job.calls_left[index], job.kind)
        return record


async def _each(numbers: Iterable[int]) -> AsyncIterator[int]:
    for number in numbers:
        yield number


def summarise(rows: JobRows, records: Sequence[SentRequest]) -> Mapping[str, JobSummary]:
    """Return what became of each kind of job."""
    calls = {record.index: record for record in records if record.status is not Status.INTERRUPTED}
    return summarise_calls(rows, calls)


BATCH = 64
LOOKAHEAD = 64 * BATCH
"""Prompts that are made before a run, so that short runs are not disturbed at all."""


class PlannedRequest(NamedTuple):
    """A prompt on its way to the server, and the record that goes with it."""

    prompt: str
    record: SentRequest


class RequestOffer:
    """Requests that stand for themselves.

    Parameters
    ----------
    prompts : called when a prompt is needed, which is let go once handed out.
    """

    def __init__(self, load: OfferedLoad, prompts: PromptSource) -> None:
        self.load, self.prompts = load, prompts
        self.num_prompts = len(load)
        self.starts = load.arrivals

    @classmethod
    def make(cls, run: RunConfig, tools: PromptTools) -> RequestOffer:
        """Return the requests of a run: lengths depend on the seed alone, words on the salt of `tools`.

        Raises
        ------
        ConfigError : see `Load.offered`.
        """
        load = run.load.offered(run.classes, count_tokens=tools.count_tokens)
        return cls(load, prompts_of(run.load, load, tools.writer))

    async def items(self, limit: int | None = None) -> AsyncIterator[PlannedRequest]:
        """Return the requests, or the first so many, in order.

        The first `LOOKAHEAD` prompts are made by then; of more, as many as are taken are made in a thread.
        """
        one_at_a_time = asyncio.Lock()

        async def make(indices: range) -> list[PlannedRequest]:
            async with one_at_a_time:
                return await asyncio.to_thread(lambda: [self._plan(index) for index in indices])

        indices = range(self.num_prompts)[:limit]
        batches = (indices[first : first + BATCH] for first in range(0, len(indices), BATCH))
        making = (asyncio.create_task(make(batch)) for batch in batches)
        ahead = deque(islice(making, LOOKAHEAD // BATCH))
        await asyncio.gather(*ahead)

        async def take() -> AsyncIterator[PlannedRequest]:
            while ahead:
                batch = await ahead.popleft()
                ahead.extend(islice(making, 1))
                for planned in batch:
                    yield planned

        return take()

    def _plan(self, index: int) -> PlannedRequest:
        return PlannedRequest(self.prompts(index), SentRequest.of(self.load, index))

    async def begin(self, runner: LoadRunner, planned: PlannedRequest, due: float) -> None:
        """Send a request."""
        planned.record.scheduled = None if self.starts is None else due
        await runner.serve(*planned)


class BenchObserver(Protocol):
    """What the caller shows while runs go on."""

    def on_phase(self, text: str) -> None:
        """Say what is being done before and between runs."""

    def on_start(self, run: RunConfig, num_requests: int) -> None: ...

    def on_request(self, record: SentRequest) -> None: ...

    def on_result(self, result: BenchRun) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """The server under test, probed."""

    session: aiohttp.ClientSession
    endpoint: Endpoint
    model: str
    pool: WordPool
    count_tokens: CountTokens | None


async def run_bench(
    bench: BenchConfig,
    runs: Sequence[RunConfig],
    *,
    tokenizer: Tokenizer | None,
    progress: BenchObserver,
    stop: asyncio.Event,
) -> list[BenchRun]:
    """Do the runs one after another; when `stop` is set, return what has been measured.

    Raises
    ------
    ConfigError : the server does not answer, or a data set is bad.
    """
    async with open_session(bench.target.request_timeout) as session:
        server = await _probe(session, bench, tokenizer, progress)
        results: list[BenchRun] = []
        for position, run in enumerate(runs):
            if stop.is_set():
                break
            result = await _run(bench, run, position, server, progress, stop)
            if result.records or not result.is_interrupted:
                results.append(result)
                progress.on_result(result)
        return results


async def _probe(
    session: aiohttp.ClientSession, bench: BenchConfig, tokenizer: Tokenizer | None, progress: BenchObserver
) -> _Server:
    target = bench.target
    progress.on_phase(f"asking {target.root}")
    offered = await wait_until_ready(session, target)
    model = choose_model(target, offered)
    transport = choose_transport(bench.send_slo, is_onbeat=offered.is_onbeat, asks_to_shed=bench.shed)
    # A plan's server knows the objectives, not the names.
    objectives = replace(transport, names_classes=bench.check_plan is None)
    pool: WordPool | None
    if tokenizer is not None:
        pool = tokenizer_pool(tokenizer)
    else:
        pool = await server_pool(session, target, model)
    return _Server(
        session=session,
        endpoint=Endpoint(
            url=target.url,
            payload=PayloadBuilder(api=target.api, model=model, extra=bench.sampling.body(target.api)),
            headers=dict(target.headers),
            objectives=objectives,
            timeout=target.request_timeout,
        ),
        model=model,
        pool=pool or estimated_pool(),
        count_tokens=None if tokenizer is None else _output_counter(tokenizer),
    )


def _output_counter(tokenizer: Tokenizer) -> CountTokens:
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


async def _run(
    bench: BenchConfig,
    run: RunConfig,
    position: int,
    server: _Server,
    progress: BenchObserver,
    stop: asyncio.Event,
) -> BenchRun:
    load = run.load.named()
    # Every run of a sweep has its own words: else the second would find the first one's prefixes cached.
    tools = PromptTools(
        writer=PromptWriter(server.pool, f"{load.salt}/{position}"),
        # English text has about one for every four characters.
        count_tokens=server.count_tokens or (lambda text: max(1, round(len(text) / 4))),
        keeps_text=bench.output.save_detailed,
    )
    progress.on_phase(f"making prompts ({load.dataset_name})")
    run = replace(run, load=load)
    offer = await _make_offer(run, tools)
    client = StreamingClient(
        server.session,
        server.endpoint,
        count_tokens=server.count_tokens,
        keep_text=tools.keeps_text or offer.load.jobs is not None,  # later calls quote answers
    )
    if load.num_warmups:
        progress.on_phase(f"warming up with {load.num_warmups} requests")
        await _warm_up(load, client.send, tools, stop)
    runner = LoadRunner(
        client.send,
        offsets=offer.starts,
        max_concurrency=load.max_concurrency,
        on_end=progress.on_request,
    )
    items = await offer.items()
    drafts_before = await look_at_drafts(server.session, bench.target)
    progress.on_start(run, len(offer.load))
    with settled_memory():
        outcome = await runner.run(items, offer.begin, stop)
    drafts = await look_at_drafts(server.session, bench.target)
    if drafts_before and drafts:
        drafts.subtract(drafts_before)
        outcome.drafts = drafts
    run = replace(run, load=replace(load, num_prompts=offer.num_prompts))
    is_measured = server.count_tokens is not None or load.dataset_name not in TEXT_DATASETS
    length_source = server.pool.source if is_measured else "estimate"
    return build_result(
        bench,
        run,
        outcome,
        model=server.model,
        length_source=length_source,
        slo_sent=server.endpoint.objectives.how,
        jobs=None if offer.load.jobs is None else summarise(offer.load.jobs, outcome.records),
    )


async def _make_offer(run: RunConfig, tools: PromptTools) -> JobOffer | RequestOffer:
    kind: type[JobOffer | RequestOffer] = JobOffer if run.load.dataset_name in JOB_LOADS else RequestOffer
    return await asyncio.to_thread(kind.make, run, tools)


async def _warm_up(
    load: BenchLoad,
    send: Send,
    tools: PromptTools,
    stop: asyncio.Event,
) -> None:
    """Send requests of the run's own kind, but with other words and held to nothing, and forget them.

    Raises
    ------
    ConfigError : every one failed: the run would only repeat that.
    """
    tools = replace(tools, writer=replace(tools.writer, salt=f"{tools.writer.salt}/warm-up"))
    closed = load.closed(min(load.num_warmups, load.max_concurrency or load.num_warmups))
    offer = await _make_offer(RunConfig(load=closed), tools)
    runner = LoadRunner(send, offsets=offer.starts, max_concurrency=closed.max_concurrency)
    outcome = await runner.run(await offer.items(load.num_warmups), offer.begin, stop)
    failures = [record for record in outcome.records if record.status is Status.FAILED]
    if failures and len(failures) == len(outcome.records):
        raise ConfigError(
            f"all {len(failures)} warm-up requests failed: {failures[0].cause}: {failures[0].detail}"
        )
