"""One choice of an answer: deliveries of the engine in, pieces of text out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from onbeat.core.errors import EngineError, Overloaded
from onbeat.core.protocols import Delivery, EngineClient, Tokenizer
from onbeat.core.request import FinishReason, Request, TokenLogprobs
from onbeat.metrics.tracker import RequestTracker
from onbeat.server.lifecycle import Lifecycle
from onbeat.text.stream import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become the text of an answer."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """No stop string ends the text within this many tokens."""


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


@dataclass(slots=True)
class ShownToken:
    """A token of the answer. The stop token that ended it is not one."""

    token_id: int
    text_offset: int
    """Characters of the answer before it."""
    logprobs: TokenLogprobs | None


@dataclass(slots=True, kw_only=True)
class Choice:
    """One choice of an answer while it is generated."""

    index: int
    prompt_index: int
    request: Request
    first_delivery: float | None = None
    last_delivery: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the caller's stop token, that ended it."""
    token_ids: list[int] = field(default_factory=list)
    """All output tokens."""


class _ChoiceText:
    """Turns the deliveries of one choice into deltas; holds tokens back with their text."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._choice = choice
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._include_stop = options.include_stop
        self._stream = TextStream(
            tokenizer,
            stop=options.stop,
            include_stop=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
            min_tokens=options.min_tokens,
        )
        self._num_shown = 0
        self._num_sent = 0
        self._held: list[ShownToken] = []

    def take(self, delivery: Delivery) -> ChoiceDelta | None:
        """Return what a delivery adds, or None if all of its text is held back."""
        choice, output = self._choice, delivery.output
        _check_alive(output.finish_reason, output.error)
        if choice.first_delivery is None:
            choice.first_delivery = delivery.time
            choice.num_cached_tokens = output.num_cached_tokens
        choice.last_delivery = delivery.time
        token_ids = output.new_token_ids
        choice.token_ids += token_ids
        choice.num_output_tokens += len(token_ids)
        choice.finish_reason = output.finish_reason
        if output.stop_token_id is not None:
            if output.stop_token_id not in self._eos:
                choice.stop_reason = output.stop_token_id
            if not self._include_stop:
                token_ids = token_ids[:-1]
        return self._delta(token_ids, output.logprobs)

    def _delta(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> ChoiceDelta | None:
        choice = self._choice
        piece = self._stream.push(token_ids, final=choice.finish_reason is not None)
        known: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
        self._held += map(ShownToken, token_ids, piece.token_offsets, known)
        if piece.stop_string is not None:
            choice.finish_reason, choice.stop_reason = FinishReason.STOP, piece.stop_string
            choice.num_output_tokens = self._stream.num_consumed_tokens
            del choice.token_ids[choice.num_output_tokens :]
            del self._held[choice.num_output_tokens - self._num_shown :]
        if not piece.text and choice.finish_reason is None:
            return None
        shown, self._held = self._held, []
        self._num_shown += len(shown)
        new_ids = choice.token_ids[self._num_sent :]
        self._num_sent += len(new_ids)
        reason = None if choice.finish_reason is None else choice.finish_reason.value
        return ChoiceDelta(choice, piece.text, shown, new_ids, reason)


def _check_alive(finish_reason: FinishReason | None, error: str | None) -> None:
    if finish_reason is FinishReason.ERROR:
        raise EngineError(error or "the engine failed on this request")
    if finish_reason is FinishReason.ABORT:
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
        async with aclosing(streams[0] if len(streams) == 1 else _merge(streams)) as deltas:
            async for delta in deltas:
                yield delta

    async def _run_one(self, choice: Choice, options: TextOptions) -> AsyncGenerator[ChoiceDelta, None]:
        request = choice.request
        text = _ChoiceText(choice, self._tokenizer, options)
        last: ChoiceDelta | None = None
        ended, end = FinishReason.ABORT, None
        self._tracker.open(request)
        try:
            with self._lifecycle.engine_request(request.request_id):
                async with aclosing(self._engine.generate(request)) as deliveries:
                    async for delivery in deliveries:
                        delta = text.take(delivery)
                        if choice.finish_reason is not None:
                            last, ended, end = delta, choice.finish_reason, delivery.time
                            break
                        if delta is not None:
                            yield delta
        except Exception:
            ended = FinishReason.ERROR
            raise
        finally:
            self._tracker.close(request.request_id, ended, time.monotonic() if end is None else end)
        # Only now: after a stop string the engine must not go on while the client is slow to read.
        if last is not None:
            yield last


async def _merge(streams: Sequence[AsyncGenerator[ChoiceDelta, None]]) -> AsyncGenerator[ChoiceDelta, None]:
    """Stream what several generators make, as it comes; the first error ends all of them."""
    # bounded: a client that reads slowly holds the choices back instead of filling memory
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await queue.put(delta)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    num_running = len(tasks)
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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
