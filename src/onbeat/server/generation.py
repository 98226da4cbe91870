"""The choices of an answer: deliveries of the engine in, pieces of text out."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from onbeat.core.errors import EngineError, Overloaded, RequestRejected, SLOUnattainable
from onbeat.core.protocols import Delivery, EngineClient, Tokenizer
from onbeat.core.request import FinishReason, Request, RequestOutput, TokenLogprobs
from onbeat.core.slo import ShedMode
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.tracker import RequestTracker
from onbeat.server.errors import unattainable
from onbeat.server.lifecycle import Lifecycle
from onbeat.text.stream import TextStream, holds_text

BEGUN_TOKENS = 2**15
"""Prompt tokens of the choices of one request that are handed to the engine before others have their turn."""
BEGIN_COST_TOKENS = 2**10
"""What it takes to begin a choice, beside its prompt: as long as so many tokens of one."""
ENDED_TASKS = 16
"""Choices that are given up before others have their turn."""


@dataclass(slots=True)
class ChoiceDelta:
    """What one delivery adds to a choice: never nothing."""

    choice: Choice
    text: str
    tokens: list[ShownToken]
    token_ids: list[int]
    """The new output tokens, a stop token included."""
    finish_reason: str | None
    """`stop` or `length` on the last delta."""
    num_output_tokens: int = 0
    """Of the choice up to here: `choice` may be ahead of what is sent. So the next two."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class ShownToken:
    """A token of the answer. The stop token that ended it is not one."""

    token_id: int
    text_offset: int
    """Characters of the answer before it."""
    logprobs: TokenLogprobs | None

    @property
    def known_logprobs(self) -> TokenLogprobs:
        """Those of a token for which they were asked."""
        assert self.logprobs is not None, "the engine was asked for log-probabilities"
        return self.logprobs


@dataclass(slots=True, kw_only=True)
class Choice:
    """One choice of an answer while it is generated."""

    index: int
    prompt_index: int
    request: Request
    is_streamed: bool
    """Whether the caller sees each delivery."""
    delivery_times: array[float] = field(default_factory=lambda: array("d"))
    """When the engine delivered tokens, seconds of the monotonic clock."""
    delivery_sizes: array[int] = field(default_factory=lambda: array("I"))
    """Tokens of each delivery."""
    predicted_ttft: float | None = None
    """What the engine predicted at the arrival, seconds."""
    is_relegated: bool = False
    """Whether the engine has given its objectives up."""
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0
    """Draft tokens that the engine verified for it."""
    num_accepted_tokens: int = 0
    """Of the output tokens, those that were drafts: not those behind the end of the answer."""
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the caller's stop token, that ended it."""
    token_ids: list[int] = field(default_factory=list)
    """All output tokens."""
    record: RequestRecord | None = None
    """Its record while it is open and later; None before."""

    @property
    def num_untaken_tokens(self) -> int:
        """Tokens that the engine has delivered and nobody has taken."""
        return 0 if self.record is None else self.record.num_untaken_tokens

    @property
    def first_delivery(self) -> float | None:
        """When the first tokens came, seconds of the monotonic clock."""
        return self.delivery_times[0] if self.delivery_times else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become the text of an answer."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """No stop string ends the text within this many tokens."""
    continues_prompt: bool = False
    """Whether the answer goes on where the prompt ends, and is no text of its own."""


class _ChoiceText:
    """Turns the deliveries of one choice into deltas; holds tokens back with their text."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._choice = choice
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._include_stop = options.include_stop
        self._stream = TextStream(
            tokenizer,
            continues_text=options.continues_prompt
            and holds_text(choice.request.prompt_token_ids, tokenizer),
            stop=options.stop,
            include_stop=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
            min_tokens=options.min_tokens,
        )
        self._num_shown = 0
        self._num_sent = 0
        self._num_accepted = 0
        """Drafts that the engine has accepted, those behind the end of the answer included."""
        self._held: list[ShownToken] = []
        self.num_new_tokens = 0
        """Of the last delivery, tokens that are in the answer."""

    def take(self, delivery: Delivery) -> ChoiceDelta | None:
        """Return what a delivery adds, or None if all of its text is held back."""
        choice, output = self._choice, delivery.output
        if output.predicted_ttft is not None and math.isfinite(output.predicted_ttft):
            choice.predicted_ttft = output.predicted_ttft
        choice.finish_reason = output.finish_reason
        _check_alive(output, choice)
        choice.is_relegated |= output.is_relegated
        token_ids = output.new_token_ids
        if not choice.delivery_times:
            choice.num_cached_tokens = output.num_cached_tokens
        if token_ids:
            choice.delivery_times.append(delivery.time)
            choice.delivery_sizes.append(len(token_ids))
        num_before = choice.num_output_tokens
        choice.token_ids += token_ids
        choice.num_output_tokens += len(token_ids)
        if output.stop_token_id is not None:
            if output.stop_token_id not in self._eos:
                choice.stop_reason = output.stop_token_id
            if not self._include_stop:
                token_ids = token_ids[:-1]
        delta = self._delta(token_ids, output.logprobs)
        self.num_new_tokens = choice.num_output_tokens - num_before
        self._count_drafts(output)
        if delta is not None:
            delta.num_output_tokens = choice.num_output_tokens
            delta.num_drafted_tokens = choice.num_drafted_tokens
            delta.num_accepted_tokens = choice.num_accepted_tokens
        return delta

    def _count_drafts(self, output: RequestOutput) -> None:
        """Count what a delivery's drafts became; they come first in it, so one cut short has drafts alone."""
        num_new = output.num_accepted_tokens - self._num_accepted
        self._num_accepted = output.num_accepted_tokens
        self._choice.num_drafted_tokens = output.num_drafted_tokens
        self._choice.num_accepted_tokens += min(num_new, self.num_new_tokens)

    def _delta(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> ChoiceDelta | None:
        choice = self._choice
        piece = self._stream.push(token_ids, final=choice.finish_reason is not None)
        known: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
        self._held += map(ShownToken, token_ids, piece.token_offsets, known)
        if piece.stop_string is not None:
            self._end_at(piece.stop_string, self._stream.num_consumed_tokens)
        if not piece.text and choice.finish_reason is None:
            return None
        shown, self._held = self._held, []
        self._num_shown += len(shown)
        new_ids = choice.token_ids[self._num_sent :]
        self._num_sent += len(new_ids)
        reason = None if choice.finish_reason is None else choice.finish_reason.value
        return ChoiceDelta(choice, piece.text, shown, new_ids, reason)

    def _end_at(self, stop_string: str, num_tokens: int) -> None:
        """End the answer with the token that completed a stop string; what came behind it is nobody's."""
        choice = self._choice
        choice.finish_reason, choice.stop_reason = FinishReason.STOP, stop_string
        if num_tokens < choice.num_output_tokens:
            choice.delivery_sizes[-1] -= choice.num_output_tokens - num_tokens
        choice.num_output_tokens = num_tokens
        del choice.token_ids[num_tokens:]
        del self._held[num_tokens - self._num_shown :]


def _check_alive(output: RequestOutput, choice: Choice) -> None:
    """Raise what a request ended with, if it did not end well."""
    reason = output.finish_reason
    if reason is FinishReason.ERROR:
        raise EngineError(output.error or "the engine failed on this request")
    if reason is FinishReason.EXPIRED and output.retry_after is not None:
        raise Overloaded(
            output.error or "too many requests wait",
            code="server_overloaded",
            retry_after=output.retry_after,
            reason="queue_too_long",
        )
    if reason is FinishReason.EXPIRED:
        raise SLOUnattainable(
            output.error or "the TTFT objective passed while the request waited",
            predicted_ttft=math.nan if choice.predicted_ttft is None else choice.predicted_ttft,
            code="deadline_exceeded",
        )
    if reason is FinishReason.ABORT:
        raise Overloaded("the request was aborted by the server, which is shutting down", code="aborted")


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
        if len(streams) == 1:
            together = streams[0]
        elif any(choice.request.shed is ShedMode.REJECT for choice in choices):
            together = _held_until_all_begin(_merged(streams, sizes), len(streams))
        else:
            together = _merged(streams, sizes)
        async with aclosing(together) as deltas:
            async for delta in deltas:
                yield delta

    async def _run_one(self, choice: Choice, options: TextOptions) -> AsyncGenerator[ChoiceDelta, None]:
        request = choice.request
        text = _ChoiceText(choice, self._tokenizer, options)
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
    streams: Sequence[AsyncGenerator[ChoiceDelta, None]], sizes: Sequence[int]
) -> AsyncGenerator[ChoiceDelta, None]:
    """Stream what several generators make, as it comes; the first error ends all of them.

    Parameters
    ----------
    sizes : tokens that it takes to begin each: a few choices begin at a time, so that others have their turn.
    """
    # bounded: a client that reads slowly holds the choices back instead of filling memory
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(maxsize=len(streams))

    tasks: list[asyncio.Task[None]] = []

    async def begin_all() -> None:
        async for index in _a_few_at_a_time(sizes):
            tasks.append(asyncio.create_task(_pump(streams[index], queue)))

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
