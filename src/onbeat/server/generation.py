"""Runs the choices of an answer on the engine and joins what comes of them; knows which are open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from onbeat.core.errors import Overloaded, RequestRejected, SLOUnattainable
from onbeat.core.protocols import Delivery, EngineClient
from onbeat.core.request import FinishReason
from onbeat.core.slo import ShedMode
from onbeat.core.tokenizer import Tokenizer
from onbeat.metrics.tracker import RequestTracker
from onbeat.server.choices import Choice, ChoiceDelta, ChoiceText, TextOptions, aborted_error
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
        """Whether new generations are refused from now on."""
        self.num_open = 0
        """HTTP requests that are generating now."""
        self.idle = asyncio.Event()
        """Set while no generation is open."""
        self.idle.set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._aborted: set[asyncio.Task[object]] = set()

    def check_open(self) -> None:
        """Raise `Overloaded` if the server is going down."""
        if self.is_draining:
            raise Overloaded(
                "the server is shutting down and takes no new requests; try another or later", code="draining"
            )

    def abort(self) -> None:
        """End all open generations now, whatever they wait for: each tells its client, then its engine."""
        self._aborted |= self._tasks
        for task in self._tasks:
            task.cancel()

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Count one generation while the block runs.

        Raises
        ------
        Overloaded : the server is going down, or `abort` has ended the block.
        """
        self.check_open()
        task = _this_task()
        self.num_open += 1
        self._tasks.add(task)
        self.idle.clear()
        try:
            with self.telling_abort():
                yield
        finally:
            self._tasks.discard(task)
            self._aborted.discard(task)
            self.num_open -= 1
            if self.num_open == 0:
                self.idle.set()

    @contextmanager
    def telling_abort(self) -> Iterator[None]:
        """Raise `Overloaded` where `abort` has cancelled what the block awaits, so that a client is told."""
        try:
            yield
        except asyncio.CancelledError:
            if (task := _this_task()) in self._aborted and task.uncancel() == 0:
                raise aborted_error() from None
            raise


def _this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


_Turn = tuple[Choice, Delivery, int, ChoiceDelta | None]
"""What a delivery brought a choice, on its way to whoever writes the answer: the tokens of it that are in the
answer, and what it adds to the text, None where all of that is held back. No named tuple, at one a token."""


MOST_ENDED = 256
"""Choices of one answer whose records are closed in one turn of the event loop."""


class Generator:
    """Runs choices on the engine.

    Parameters
    ----------
    engine : where tokens come from.
    tokenizer : the model's.
    tracker : keeps the records of requests, for metrics.
    """

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, tracker: RequestTracker) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._tracker = tracker

    async def run(
        self, choices: Sequence[Choice], options: TextOptions, clock: Callable[[], float] = time.monotonic
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Stream the deltas of all choices, as they come. Closing the generator aborts what still runs.

        A delivery counts from when its delta is taken here: whoever takes it writes it to the client at once.
        A whole answer ends when all of its choices have.

        Parameters
        ----------
        clock : by which deliveries are handed over, seconds.

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
        try:
            async with aclosing(together) as turns:
                async for choice, delivery, num_tokens, delta in turns:
                    now = clock()
                    self._tracker.deliver(delivery.output, now, num_tokens, made=delivery.time)
                    if delta is None:
                        continue
                    if delta.finish_reason is not None and choice.is_streamed:
                        self._tracker.close(choice.request.request_id, FinishReason(delta.finish_reason), now)
                    yield delta
                end = clock()
            for number, choice in enumerate(choices):  # what has ended is not closed twice
                if number % MOST_ENDED == MOST_ENDED - 1:
                    await asyncio.sleep(0)
                self._close(choice, end)
        finally:
            for choice in choices:
                self._close(choice, clock())

    def _close(self, choice: Choice, now: float) -> None:
        self._tracker.close(choice.request.request_id, choice.finish_reason or FinishReason.ABORT, now)

    async def _run_one(self, choice: Choice, options: TextOptions) -> AsyncGenerator[_Turn, None]:
        request = choice.request
        text = ChoiceText(choice, self._tokenizer, options)
        last: _Turn | None = None
        left = FinishReason.ABORT
        """How it ends without an end of its own."""
        choice.record = self._tracker.open(request, is_streamed=choice.is_streamed)
        try:
            async with aclosing(self._engine.generate(request)) as deliveries:
                async for delivery in deliveries:
                    delta = text.take(delivery)
                    turn = (choice, delivery, text.num_new_tokens, delta)
                    if choice.finish_reason is not None:
                        last = turn
                        break
                    yield turn
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
            if last is None:
                self._tracker.close(request.request_id, choice.finish_reason or left, time.monotonic())
        # Only now: after a stop string the engine must not go on while the client is slow to read.
        if last is not None:
            yield last


async def _merged(
    streams: Sequence[AsyncGenerator[_Turn, None]], sizes: Sequence[int], most: int
) -> AsyncGenerator[_Turn, None]:
    """Stream what several generators make, as it comes; the first error ends all of them.

    Parameters
    ----------
    sizes : tokens that it takes to begin each: a few choices begin at a time, so that others have their turn.
    most : that run at once.
    """
    # bounded: a client that reads slowly holds the choices back instead of filling memory
    queue: asyncio.Queue[_Turn | Exception | None] = asyncio.Queue(maxsize=len(streams))

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
    item: _Turn | Exception | None = None
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
        # an error refers to the frames that it came through: it and they would be garbage to be looked for
        item = None
        while not queue.empty():
            queue.get_nowait()


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


async def _pump(stream: AsyncGenerator[_Turn, None], queue: asyncio.Queue[_Turn | Exception | None]) -> None:
    """Put what a generator makes in a queue, then how it ended: None, or the error."""
    try:
        async with aclosing(stream):
            async for turn in stream:
                await queue.put(turn)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


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
    turns: AsyncGenerator[_Turn, None], num_choices: int
) -> AsyncGenerator[_Turn, None]:
    """Stream turns, the first one only when each choice has one.

    The engine may refuse a choice after it has begun another; the answer must not have its status by then.
    """
    held: list[_Turn] = []
    begun: set[int] = set()
    async with aclosing(turns):
        async for turn in turns:
            held.append(turn)
            begun.add(turn[0].index)
            if len(begun) == num_choices:
                for each in held:
                    yield each
                held.clear()
