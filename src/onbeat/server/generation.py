"""Runs the choices of an answer on the engine and joins what comes of them; knows which are open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from onbeat.core.errors import Overloaded, RequestRejected, SLOUnattainable
from onbeat.core.protocols import EngineClient, Tokenizer
from onbeat.core.request import FinishReason
from onbeat.core.slo import ShedMode
from onbeat.metrics.tracker import RequestTracker
from onbeat.server.choices import Choice, ChoiceDelta, ChoiceText, TextOptions
from onbeat.server.errors import unattainable

BEGUN_TOKENS = 2**15
"""Prompt tokens of the choices of one request that are handed to the engine before others have their turn."""
BEGIN_COST_TOKENS = 2**10
"""What it takes to begin a choice, beside its prompt: as long as so many tokens of one."""
MOST_EMBEDDED = 256
"""Inputs of one request that the engine has at once, of those that become embeddings."""
ENDED_TASKS = 16
"""Choices that are given up before others have their turn."""


class Lifecycle:
    """Counts open generations; once draining, refuses new ones and says when the last has ended."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_open = 0
        """HTTP requests that are generating now."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._engine_ids: set[str] = set()

    @property
    def engine_request_ids(self) -> list[str]:
        """Ids of the engine requests that are open now."""
        return list(self._engine_ids)

    def start_draining(self) -> None:
        """Refuse new generations from now on."""
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        """Return when no generation is open."""
        await self._idle.wait()

    def check_open(self) -> None:
        """Raise `Overloaded` if the server is going down."""
        if self.is_draining:
            raise Overloaded(
                "the server is shutting down and takes no new requests; try another or later", code="draining"
            )

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Count one generation while the block runs.

        Raises
        ------
        Overloaded : the server is going down.
        """
        self.check_open()
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self._idle.set()

    @contextmanager
    def engine_request(self, request_id: str) -> Iterator[None]:
        """Remember an engine request while the block runs, so that shutting down can abort it."""
        self._engine_ids.add(request_id)
        try:
            yield
        finally:
            self._engine_ids.discard(request_id)


class Generator:
    """Runs choices on the engine.

    Parameters
    ----------
    engine : where tokens come from.
    tokenizer : the model's.
    lifecycle : knows what is open, for shutting down.
    tracker : keeps the records of requests, for metrics.
    """

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, lifecycle: Lifecycle, tracker: RequestTracker
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._lifecycle = lifecycle
        self._tracker = tracker

    async def run(self, choices: Sequence[Choice], options: TextOptions) -> AsyncGenerator[ChoiceDelta, None]:
        """Stream the deltas of all choices, as they come. Closing the generator aborts what still runs.

        Raises
        ------
        RequestRejected, EngineDead, EngineError : as the engine does; the other choices are aborted.
        """
        streams = [self._run_one(choice, options) for choice in choices]
        sizes = [len(choice.request.prompt_token_ids) + BEGIN_COST_TOKENS for choice in choices]
        most = MOST_EMBEDDED if choices[0].request.pooling is not None else len(streams)
        if len(streams) == 1:
            together = streams[0]
        elif any(choice.request.shed is ShedMode.REJECT for choice in choices):
            together = _held_until_all_begin(_merged(streams, sizes, most), len(streams))
        else:
            together = _merged(streams, sizes, most)
        async with aclosing(together) as deltas:
            async for delta in deltas:
                yield delta

    async def _run_one(self, choice: Choice, options: TextOptions) -> AsyncGenerator[ChoiceDelta, None]:
        request = choice.request
        text = ChoiceText(choice, self._tokenizer, options)
        last: ChoiceDelta | None = None
        end: float | None = None
        left = FinishReason.ABORT
        """How it ends without an end of its own."""
        choice.record = self._tracker.open(request, is_streamed=choice.is_streamed)
        try:
            with self._lifecycle.engine_request(request.request_id):
                async with aclosing(self._engine.generate(request)) as deliveries:
                    async for delivery in deliveries:
                        delta = text.take(delivery)
                        self._tracker.deliver(delivery.output, delivery.time, text.num_new_tokens)
                        if choice.finish_reason is not None:
                            last, end = delta, delivery.time
                            break
                        if delta is not None:
                            yield delta
        except RequestRejected as error:
            if choice.finish_reason is None:
                self._tracker.refuse(request.request_id, error, time.monotonic())
            if isinstance(error, SLOUnattainable):
                raise unattainable(error, request) from error
            raise
        except Exception:
            left = FinishReason.ERROR
            raise
        finally:
            self._tracker.close(
                request.request_id, choice.finish_reason or left, time.monotonic() if end is None else end
            )
        # Only now: after a stop string the engine must not go on while the client is slow to read.
        if last is not None:
            yield last


async def _merged(
    streams: Sequence[AsyncGenerator[ChoiceDelta, None]], sizes: Sequence[int], most: int
) -> AsyncGenerator[ChoiceDelta, None]:
    """Stream what several generators make, as it comes; the first error ends all of them.

    Parameters
    ----------
    sizes : tokens that it takes to begin each: a few choices begin at a time, so that others have their turn.
    most : that run at once.
    """
    # bounded: a client that reads slowly holds the choices back instead of filling memory
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(maxsize=len(streams))

    tasks: list[asyncio.Task[None]] = []

    places = asyncio.Semaphore(most)

    async def begin_all() -> None:
        async for index in _a_few_at_a_time(sizes):
            await places.acquire()
            task = asyncio.create_task(_pump(streams[index], queue))
            task.add_done_callback(lambda _: places.release())
            tasks.append(task)

    beginning = asyncio.create_task(begin_all())
    num_running = len(streams)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        await _end_all([beginning, *tasks])


async def _end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for them, a few at a time: each has to tell the engine."""
    try:
        for start in range(0, len(tasks), ENDED_TASKS):
            some = tasks[start : start + ENDED_TASKS]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    finally:  # should this wait be cancelled itself
        for task in tasks:
            task.cancel()


async def _pump(
    stream: AsyncGenerator[ChoiceDelta, None], queue: asyncio.Queue[ChoiceDelta | Exception | None]
) -> None:
    """Put what a generator makes in a queue, then how it ended: None, or the error."""
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put(delta)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def _a_few_at_a_time(sizes: Sequence[int]) -> AsyncIterator[int]:
    """Yield 0, 1, 2 and so on; wait for the event loop's next round whenever the sizes add up to much."""
    total = 0
    for index, size in enumerate(sizes):
        if total and total + size > BEGUN_TOKENS:
            await asyncio.sleep(0)
            total = 0
        total += size
        yield index


async def _held_until_all_begin(
    deltas: AsyncGenerator[ChoiceDelta, None], num_choices: int
) -> AsyncGenerator[ChoiceDelta, None]:
    """Stream deltas, the first one only when each choice has one.

    The engine may refuse a choice after it has begun another; the answer must not have its status by then.
    """
    held: list[ChoiceDelta] = []
    begun: set[int] = set()
    async with aclosing(deltas):
        async for delta in deltas:
            if len(begun) == num_choices:
                yield delta
                continue
            held.append(delta)
            begun.add(delta.choice.index)
            if len(begun) == num_choices:
                for each in held:
                    yield each
                held.clear()
