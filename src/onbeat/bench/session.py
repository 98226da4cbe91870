"""One command's measurements: probe the server, then run after run against it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol

import aiohttp

from onbeat.bench.bench_config import BenchConfig
from onbeat.bench.bench_load import TEXT_DATASETS, BenchLoad, PromptTools, RunConfig, Workload, workload_of
from onbeat.bench.client import CountTokens, Endpoint, StreamingClient, open_session
from onbeat.bench.jobs import JobOffer, summarise
from onbeat.bench.objectives import choose_transport
from onbeat.bench.payload import PayloadBuilder
from onbeat.bench.probe import choose_model, server_pool, wait_until_ready
from onbeat.bench.record import SentRequest, Status
from onbeat.bench.result import BenchRun, build_result
from onbeat.bench.runner import LoadRunner, Send
from onbeat.bench.speculation import look_at_drafts
from onbeat.core.errors import ConfigError
from onbeat.core.protocols import Tokenizer
from onbeat.core.settled_memory import settled_memory
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


class RequestOffer:
    """Requests that stand for themselves."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self.load = workload, workload.load
        self.num_prompts = len(workload)
        self.starts = self.load.arrivals

    @classmethod
    def make(cls, bench: BenchConfig, load: BenchLoad, tools: PromptTools) -> RequestOffer:
        """Return the requests of a run."""
        return cls(workload_of(load, bench.slo_classes, tools))

    async def items(self, limit: int | None = None) -> PromptFeed:
        """Return the requests, or the first so many, of which the first prompts are made."""
        feed = PromptFeed(self._workload, limit=limit)
        await feed.fill()
        return feed

    async def begin(self, runner: LoadRunner, planned: PlannedRequest, due: float) -> None:
        """Send a request."""
        planned.record.scheduled = None if self.starts is None else due
        await runner.serve(*planned)


class BenchObserver(Protocol):
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
    progress: BenchObserver,
    stop: asyncio.Event,
) -> BenchRun:
    load = run.load.named()
    # Every run of a sweep has its own words: else the second would find the first one's prefixes cached.
    tools = PromptTools(
        writer=PromptWriter(server.pool, f"{load.salt}/{position}"),
        count_tokens=server.count_tokens or _estimate_tokens,
    )
    progress.on_phase(f"making prompts ({load.dataset_name})")
    offer = await _make_offer(bench, load, tools)
    client = StreamingClient(
        server.session,
        server.endpoint,
        count_tokens=server.count_tokens,
        keep_text=bench.keep_text or offer.load.jobs is not None,  # later calls quote answers
    )
    if load.num_warmups:
        progress.on_phase(f"warming up with {load.num_warmups} requests")
        await _warm_up(bench, load, client.send, tools, stop)
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


async def _make_offer(bench: BenchConfig, load: BenchLoad, tools: PromptTools) -> JobOffer | RequestOffer:
    kind: type[JobOffer | RequestOffer] = JobOffer if load.dataset_name in JOB_LOADS else RequestOffer
    return await asyncio.to_thread(kind.make, bench, load, tools)


async def _warm_up(
    bench: BenchConfig,
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
    offer = await _make_offer(
        replace(bench, slo_classes=(), send_slo="none", asks_to_shed=False), closed, tools
    )
    runner = LoadRunner(send, offsets=offer.starts, max_concurrency=closed.max_concurrency)
    outcome = await runner.run(await offer.items(load.num_warmups), offer.begin, stop)
    failures = [record for record in outcome.records if record.status is Status.FAILED]
    if failures and len(failures) == len(outcome.records):
        raise ConfigError(
            f"all {len(failures)} warm-up requests failed: {failures[0].cause}: {failures[0].detail}"
        )
