"""The choices of an answer: deliveries of the engine in, pieces of text out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onbeat.core.errors import EngineError, InvalidRequest, Overloaded, SLOUnattainable
from onbeat.core.protocols import Delivery
from onbeat.core.request import FinishReason, Placement, Request, RequestOutput, TokenLogprobs, overdue_error
from onbeat.core.slo import Fate
from onbeat.core.tokenizer import Tokenizer
from onbeat.metrics.record import RequestRecord
from onbeat.text.reply.calls import CallStart, ContentText, MarkToken, ReplyEvent
from onbeat.text.reply.parser import ReplyParser
from onbeat.text.stream import TextDelta, TextStream, holds_text


@dataclass(slots=True)
class ChoiceDelta:
    """What one delivery adds to a choice: never nothing."""

    choice: Choice
    text: str
    """Of a choice without events; else empty."""
    tokens: list[ShownToken]
    token_ids: list[int]
    """The new output tokens, a stop token included."""
    finish_reason: str | None
    """`stop` or `length` on the last delta."""
    num_output_tokens: int = 0
    """Of the choice up to here: `choice` may be ahead of what is sent. So the next two."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reasoning_tokens: int = 0
    events: list[ReplyEvent] | None = None
    """The parts of the answer that it adds to; None where nothing tells them apart, and all is content."""

    @property
    def all_events(self) -> list[ReplyEvent]:
        """The same for every choice: text that nothing tells apart is content."""
        if self.events is not None:
            return self.events
        return [ContentText(self.text)] if self.text else []


@dataclass(slots=True)
class ShownToken:
    """A token of the answer; the one that ended it only where it is asked for."""

    token_id: int
    text_offset: int
    """Characters before it: of the echo, if there is one, and of the answer."""
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
    predicted_ttft: float | None = None
    """What the engine predicted at the arrival, seconds."""
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0
    """Draft tokens that the engine verified for it."""
    num_accepted_tokens: int = 0
    """Of the output tokens, those that were drafts: not those behind the end of the answer."""
    num_reasoning_tokens: int = 0
    """Of the output tokens, those with which the model thinks before it answers."""
    num_calls: int = 0
    """Calls of tools that its answer holds."""
    num_cached_tokens: int = 0
    placement: Placement | None = None
    """Where a fleet has sent it; None where there is none."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of each prompt token but the first, once the first output token is there; None where nobody asked."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the caller's stop token, that ended it."""
    token_ids: list[int] = field(default_factory=list)
    """All output tokens."""
    embedding: bytes | None = None
    """What a request with pooling has come for, once it is there: `RequestOutput.embedding`."""
    record: RequestRecord | None = None
    """What has been handed over of it, while it is open and later; None before."""

    @property
    def num_untaken_tokens(self) -> int:
        """Tokens that the engine has delivered and nobody has taken."""
        return 0 if self.record is None else self.record.num_untaken_tokens


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
    text_starts: tuple[int, ...] = ()
    """For each prompt, the characters that go before its answers: those of an echo."""
    lists_end: bool = False
    """Whether an end token, which is no text, is among the tokens whose log-probabilities are shown."""
    drops_answer: bool = False
    """Whether the prompt alone was asked for, and the one token that is generated goes nowhere."""
    new_reader: Callable[[], ReplyParser] | None = None
    """Makes what tells the parts of a choice's text apart; None where all of it is content."""


class ChoiceText:
    """Turns the deliveries of one choice into deltas; holds tokens back with their text."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._choice = choice
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._options = options
        self._text_start = options.text_starts[choice.prompt_index] if options.text_starts else 0
        self._reader = None if options.new_reader is None else options.new_reader()
        self._stream = TextStream(
            tokenizer,
            continues_text=options.continues_prompt
            and holds_text(choice.request.prompt_token_ids, tokenizer),
            stop=options.stop,
            include_stop=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
            min_tokens=options.min_tokens,
        )
        if self._reader is not None:
            self._stream.mark_ids = self._reader.mark_token_ids
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
        token_ids = output.new_token_ids
        if not choice.token_ids:
            choice.prompt_logprobs = output.prompt_logprobs
            choice.num_cached_tokens = output.num_cached_tokens
        choice.placement = output.placement or choice.placement
        choice.embedding = output.embedding
        if self._options.drops_answer:
            choice.finish_reason = FinishReason.LENGTH
            return ChoiceDelta(choice, "", [], [], choice.finish_reason.value)
        num_before = choice.num_output_tokens
        choice.token_ids += token_ids
        choice.num_output_tokens += len(token_ids)
        end_id = None
        if output.stop_token_id is not None:
            if output.stop_token_id not in self._eos:
                choice.stop_reason = output.stop_token_id
            if not self._options.include_stop:
                token_ids, end_id = token_ids[:-1], output.stop_token_id
        delta = self._delta(token_ids, output.logprobs, end_id)
        self.num_new_tokens = choice.num_output_tokens - num_before
        self._count_drafts(output)
        if delta is not None:
            delta.num_output_tokens = choice.num_output_tokens
            delta.num_drafted_tokens = choice.num_drafted_tokens
            delta.num_accepted_tokens = choice.num_accepted_tokens
            delta.num_reasoning_tokens = choice.num_reasoning_tokens
        return delta

    def _count_drafts(self, output: RequestOutput) -> None:
        """Count what a delivery's drafts became; they come first in it, so one cut short has drafts alone."""
        num_new = output.num_accepted_tokens - self._num_accepted
        self._num_accepted = output.num_accepted_tokens
        self._choice.num_drafted_tokens = output.num_drafted_tokens
        self._choice.num_accepted_tokens += min(num_new, self.num_new_tokens)

    def _delta(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, end_id: int | None
    ) -> ChoiceDelta | None:
        choice = self._choice
        is_last, is_complete = choice.finish_reason is not None, False
        events: list[ReplyEvent] | None = None
        if self._reader is None:
            piece = self._stream.push(token_ids, final=is_last)
        else:
            piece, events, is_complete = self._read(self._reader, token_ids, final=is_last)
        known: Sequence[TokenLogprobs | None] = logprobs or [None] * (len(token_ids) + 1)
        offsets = [self._text_start + offset for offset in piece.token_offsets]
        self._held += map(ShownToken, token_ids, offsets, known)
        if end_id is not None and self._options.lists_end:
            end = self._text_start + self._stream.num_chars
            self._held.append(ShownToken(end_id, end, known[-1]))
        if piece.stop_string is not None or is_complete:
            self._end_at(piece.stop_string, self._stream.num_consumed_tokens)
        if not (piece.text if events is None else events) and choice.finish_reason is None:
            return None
        shown, self._held = self._held, []
        self._num_shown += len(shown)
        new_ids = choice.token_ids[self._num_sent :]
        self._num_sent += len(new_ids)
        reason = None if choice.finish_reason is None else choice.finish_reason.value
        text = piece.text if events is None else ""
        return ChoiceDelta(choice, text, shown, new_ids, reason, events=events)

    def _read(
        self, reader: ReplyParser, token_ids: list[int], *, final: bool
    ) -> tuple[TextDelta, list[ReplyEvent], bool]:
        """Return what tokens add to the text and to its parts, and whether they complete it; one by one.

        The reader counts them. What a cut closes at the end is not complete.
        """
        whole, events = TextDelta(""), list[ReplyEvent]()
        for token_id in token_ids:
            piece = self._stream.push([token_id], final=False)
            whole.token_offsets += piece.token_offsets
            whole.stop_string = piece.stop_string
            events += reader.push(_pieces(piece), final=False)
            if piece.stop_string is not None or reader.is_complete:
                final = True
                break
        is_complete = reader.is_complete
        if final:
            events += reader.push(_pieces(self._stream.push([], final=True)), final=True)
        self._choice.num_calls += sum(isinstance(event, CallStart) for event in events)
        self._choice.num_reasoning_tokens = reader.num_reasoning_tokens
        return whole, events, is_complete

    def _end_at(self, stop_string: str | None, num_tokens: int) -> None:
        """End the answer with the token that completed it; what came behind it is nobody's."""
        choice = self._choice
        choice.finish_reason, choice.stop_reason = FinishReason.STOP, stop_string
        choice.num_output_tokens = num_tokens
        del choice.token_ids[num_tokens:]
        del self._held[num_tokens - self._num_shown :]


def _pieces(delta: TextDelta) -> list[str | MarkToken]:
    """Return a delta's text and marks in their order."""
    pieces, start = list[str | MarkToken](), 0
    for end, name in delta.marks:
        pieces += (delta.text[start:end], MarkToken(name))
        start = end
    return [*pieces, delta.text[start:]]


def _check_alive(output: RequestOutput, choice: Choice) -> None:
    """Raise what a request ended with, if it did not end well."""
    reason = output.finish_reason
    if reason is FinishReason.ERROR:
        message = output.error or "the engine failed on this request"
        if output.error_code is not None:
            grammar = choice.request.sampling.grammar
            raise InvalidRequest(
                message, param=None if grammar is None else grammar.field or None, code=output.error_code
            )
        raise EngineError(message)
    if output.fate is Fate.OVERDUE:
        raise overdue_error(output)
    if output.fate is Fate.EXPIRED:
        raise SLOUnattainable(
            output.error or "the TTFT objective passed while the request waited",
            predicted_ttft=math.nan if choice.predicted_ttft is None else choice.predicted_ttft,
            code="deadline_exceeded",
        )


def aborted_error() -> Overloaded:
    """Return what a request ends with that the end of the server does not wait for."""
    return Overloaded("the request was aborted by the server, which is shutting down", code="aborted")
