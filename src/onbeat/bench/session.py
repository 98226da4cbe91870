"""One command's measurements: probe the server, then run after run against it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol

import aiohttp

from onbeat.bench.bench_config import BenchConfig
from onbeat.bench.bench_load import TEXT_DATASETS, BenchLoad, PromptTools, RunConfig, Workload, workload_of
from onbeat.bench.client import CountTokens, Endpoint, StreamingClient, open_session
from onbeat.bench.jobs import JobOffer
from onbeat.bench.objectives import choose_transport
from onbeat.bench.payload import PayloadBuilder
from onbeat.bench.probe import choose_model, server_pool, wait_until_ready
from onbeat.bench.record import SentRequest, Status
from onbeat.bench.result import BenchRun, build_result
from onbeat.bench.runner import LoadOutcome, LoadRunner, OnEnd, Send
from onbeat.bench.speculation import drafts_since, look_at_drafts
from onbeat.core.errors import ConfigError
from onbeat.core.protocols import Tokenizer
from onbeat.core.settled_memory import settled_memory
from onbeat.metrics.jobs import JobSummary
from onbeat.workload.load import JOB_LOADS
from onbeat.workload.prompts import PromptWriter, WordPool, estimated_pool, tokenizer_pool

BATCH = 64


class PlannedRequest(NamedTuple):
    """A prompt on its way to the server, and the record that goes with it."""

    prompt: str
    record: SentRequest


class PromptFeed:
    """Hands out the requests of a workload in order, to any number of tasks.

    The first `lookahead` prompts are made before the run, so that short runs are not disturbed at all;
    longer ones are topped up in a thread while the run goes on. Prompts are let go once handed out.

    Parameters
    ----------
    lookahead : prompts that are made before the run.
    limit : hand out this many requests only.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        lookahead: int = 4096,
        limit: int | None = None,
    ) -> None:
        self._workload = workload
        self._lookahead = lookahead
        self._indices: Iterator[int] = iter(range(len(workload) if limit is None else limit))
        self._ready: deque[PlannedRequest] = deque()
        self._is_exhausted = False
        self._lock = asyncio.Lock()
        self._refill: asyncio.Task[None] | None = None

    async def fill(self) -> None:
        """Make the first prompts; call before the clock starts."""
        while not self._is_exhausted and len(self._ready) < self._lookahead:
            await self._make_batch()

    def __aiter__(self) -> PromptFeed:
        return self

    async def __anext__(self) -> PlannedRequest:
        while not self._ready:
            if self._is_exhausted:
                raise StopAsyncIteration
            await self._make_batch()
        offered = self._ready.popleft()
        is_low = len(self._ready) < self._lookahead // 2
        if is_low and not self._is_exhausted and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self.fill())
        return offered

    async def _make_batch(self) -> None:
        async with self._lock:  # one batch at a time keeps the order
            batch = await asyncio.to_thread(self._make, list(islice(self._indices, BATCH)))
            self._is_exhausted = len(batch) < BATCH
            self._ready.extend(batch)

    def _make(self, indices: list[int]) -> list[PlannedRequest]:
        return [self._offer(index) for index in indices]

    def _offer(self, index: int) -> PlannedRequest:
        workload = self._workload
        record = SentRequest.of(workload.load, index)
        record.group = None if workload.groups is None else workload.groups[index]
        return PlannedRequest(workload.prompts.text(index), record)


class Offer(Protocol):
    """What a run offers to a server."""

    num_prompts: int
    """As the run counts what it offers: requests, or jobs."""
    num_requests: int
    """That it sends at most."""
    needs_answers: bool
    """Whether later prompts contain what was answered, so that records must have the texts of answers."""

    async def prepare(self) -> None:
        """Make what should be ready before the clock starts."""
        ...

    async def run(
        self,
        send: Send,
        on_end: OnEnd,
        stop: asyncio.Event,
        *,
        limit: int | None = None,
    ) -> LoadOutcome:
        """Offer it, or the first so many of its prompts; when `stop` is set, return what is there."""
        ...

    def jobs(self, records: Sequence[SentRequest]) -> Mapping[str, JobSummary]:
        """Return what became of each kind of job; nothing where there are none."""
        ...


class RequestOffer:
    """Requests that stand for themselves."""

    needs_answers = False

    def __init__(self, workload: Workload, max_concurrency: int | None) -> None:
        self._workload, self._max_concurrency = workload, max_concurrency
        self.num_prompts = self.num_requests = len(workload)
        self._feed: PromptFeed | None = None

    @classmethod
    def make(cls, bench: BenchConfig, load: BenchLoad, tools: PromptTools) -> RequestOffer:
        """Return the requests of a run."""
        workload = workload_of(load, bench.slo_classes, tools)
        return cls(workload, load.max_concurrency)

    async def prepare(self) -> None:
        """Make the first prompts."""
        self._feed = PromptFeed(self._workload)
        await self._feed.fill()

    async def run(
        self,
        send: Send,
        on_end: OnEnd,
        stop: asyncio.Event,
        *,
        limit: int | None = None,
    ) -> LoadOutcome:
        """Send the requests, or the first so many, which are then held to no objectives."""
        feed = self._feed
        if feed is None:
            free = replace(self._workload.load, classes=(), class_ids=None)
            feed = PromptFeed(replace(self._workload, load=free), limit=limit)
        offsets = self._workload.load.arrivals
        runner = LoadRunner(send, offsets=offsets, max_concurrency=self._max_concurrency, on_end=on_end)

        async def begin(planned: PlannedRequest, due: float) -> None:
            planned.record.scheduled = None if offsets is None else due
            await runner.serve(*planned)

        return await runner.run(feed, begin, stop)

    def jobs(self, records: Sequence[SentRequest]) -> Mapping[str, JobSummary]:  # noqa: ARG002
        """Return nothing."""
        return {}


class Progress(Protocol):
    """What the caller shows while runs go on."""

    def on_phase(self, text: str) -> None:
        """Say what is being done before and between runs."""
        ...

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
    progress: Progress,
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
    session: aiohttp.ClientSession, bench: BenchConfig, tokenizer: Tokenizer | None, progress: Progress
) -> _Server:
    target = bench.target
    progress.on_phase(f"asking {target.root}")
    offered = await wait_until_ready(session, target)
    model = choose_model(target, offered)
    transport = choose_transport(bench.send_slo, is_onbeat=offered.is_onbeat, asks_to_shed=bench.asks_to_shed)
    objectives = replace(transport, names_classes=bench.names_classes)
    pool: WordPool | None
    if tokenizer is not None:
        pool = tokenizer_pool(tokenizer)
    else:
        pool = await server_pool(session, target, model)
    return _Server(
        session=session,
        endpoint=Endpoint(
            url=target.url,
            payload=PayloadBuilder(api=target.api, model=model, extra=bench.extra_body),
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


def _estimate_tokens(text: str) -> int:
    """Return about how many tokens English text has: one for every four characters."""
    return max(1, round(len(text) / 4))


async def _run(
    bench: BenchConfig,
    run: RunConfig,
    position: int,
    server: _Server,
    progress: Progress,
    stop: asyncio.Event,
) -> BenchRun:
    load = run.load.named()
    # Every run of a sweep has its own words: else the second would find the first one's prefixes cached.
    tools = PromptTools(
        writer=PromptWriter(server.pool, f"{load.salt}/{position}"),
        count_tokens=server.count_tokens or _estimate_tokens,
    )
    progress.on_phase(f"making prompts ({load.dataset_name})")
    make: type[JobOffer | RequestOffer] = JobOffer if load.dataset_name in JOB_LOADS else RequestOffer
    offer: Offer = await asyncio.to_thread(make.make, bench, load, tools)
    client = StreamingClient(
        server.session,
        server.endpoint,
        count_tokens=server.count_tokens,
        keep_text=bench.keep_text or offer.needs_answers,
    )
    if load.num_warmups:
        progress.on_phase(f"warming up with {load.num_warmups} requests")
        await _warm_up(bench, load, make, client.send, tools, stop)
    await offer.prepare()
    drafts_before = await look_at_drafts(server.session, bench.target)
    progress.on_start(run, offer.num_requests)
    with settled_memory():
        outcome = await offer.run(client.send, progress.on_request, stop)
    outcome.drafts = await drafts_since(drafts_before, server.session, bench.target)
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
        jobs=offer.jobs(outcome.records),
    )


async def _warm_up(
    bench: BenchConfig,
    load: BenchLoad,
    make: type[JobOffer | RequestOffer],
    send: Send,
    tools: PromptTools,
    stop: asyncio.Event,
) -> None:
    """Send requests of the run's own kind, but with other words, and forget them.

    Raises
    ------
    ConfigError : every one failed: the run would only repeat that.
    """
    tools = replace(tools, writer=replace(tools.writer, salt=f"{tools.writer.salt}/warm-up"))
    closed = load.closed(min(load.num_warmups, load.max_concurrency or load.num_warmups))
    offer: Offer = await asyncio.to_thread(make.make, bench, closed, tools)
    outcome = await offer.run(send, lambda _record: None, stop, limit=load.num_warmups)
    failures = [record for record in outcome.records if record.status is Status.FAILED]
    if failures and len(failures) == len(outcome.records):
        raise ConfigError(
            f"all {len(failures)} warm-up requests failed: {failures[0].cause}: {failures[0].detail}"
        )
