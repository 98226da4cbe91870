"""Answer a checked request: run its choices and send what comes, streamed or whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

from msgspec import UNSET, Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from onbeat.core.errors import InvalidRequest, OnbeatError, PromptTooLong, counted
from onbeat.core.request import Request
from onbeat.server import answer_report
from onbeat.server.choices import Choice, ChoiceDelta, TextOptions
from onbeat.server.connection import FLOW
from onbeat.server.errors import ClientGone, ErrorReply, error_reply, predicted_ttft_header
from onbeat.server.fair_threads import Turns
from onbeat.server.generation_request import GenerationRequest
from onbeat.server.jobs import CallTicket, opened_call
from onbeat.server.middleware import HttpContext, context_of
from onbeat.server.pen import Extras, Pen, WholeChoice, event_bytes
from onbeat.server.pieces import Piece, PiecesResponse, gathered
from onbeat.server.server_config import MAX_ANSWER_PARTS, ServerConfig
from onbeat.server.services import Services

logger = logging.getLogger("onbeat.server")

EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would collect events otherwise
    "x-accel-buffering": "no",
}
TOKEN_BYTES = 400
ALTERNATIVE_BYTES = 80
"""What a token, and each alternative to it, takes in memory from its delivery until it is written."""
_SCORE_SIZE = 8
"""Characters that take as long to be encoded as the log-probabilities of a prompt's token to be written."""
PING_SECONDS = 10.0
"""After so long without an event a stream says that it goes on, where its API has a word for that."""


class AnswerResponse(Response):
    """Generates while it responds; a client that leaves aborts its requests.

    The response starts with the first delivery, so that what the engine refuses still gets its HTTP status.

    Parameters
    ----------
    body : what the caller sent.
    requests : of the engine, one for each choice: `n` for each prompt, in their order.
    text_options : how tokens become text, and what tells its parts apart.
    pen : of the API.
    services : run the requests.
    ping : the event that says that a stream goes on; empty where the API has none.

    Raises
    ------
    InvalidRequest : several choices may become more than one answer holds.
    """

    def __init__(
        self,
        body: GenerationRequest,
        requests: Sequence[Request],
        text_options: TextOptions,
        pen: Pen,
        services: Services,
        *,
        ping: bytes = b"",
    ) -> None:
        super().__init__()
        self.prompt_field = body.prompt_field
        """Which holds the prompt, where the request came by another API: the engine's refusals name it."""
        self._ping = ping
        self._num_begun = self._num_sent = 0
        """Pieces of the stream that are being sent, and that are on their way."""
        _check_size(requests, services.info.limits.max_model_len)
        self._is_streamed = bool(body.stream)
        self._choices = [
            Choice(
                index=index,
                prompt_index=index // body.num_choices,
                request=request,
                is_streamed=self._is_streamed,
            )
            for index, request in enumerate(requests)
        ]
        self._body = body
        self._deltas = services.generator.run(self._choices, text_options, self._now)
        self._flow: FlowControl | None = None
        """Of its connection; None where nobody says whether that is read."""
        self._unread_seconds = 0.0
        self._writer = _AnswerWriter(self._choices, body, pen, services.config)
        self._services = services
        self._caller = ""
        self.repeated_size = 0
        """Characters that take as long to be encoded as what a stream repeats of its request."""
        self.keep: Callable[[bytes], Awaitable[None]] | None = None
        """Is given the whole answer, or the last event of its stream, before that is sent."""

    @property
    def name(self) -> str:
        return self._choices[0].request.request_id

    def _now(self) -> float:
        """Return the time, less what this answer has waited for its reader: nobody else is late for that."""
        return time.monotonic() - self._unread_seconds

    @property
    def num_unread_bytes(self) -> int:
        num_alternatives = self._choices[0].request.sampling.num_logprobs or 0
        num_tokens = sum(choice.num_untaken_tokens for choice in self._choices)
        return num_tokens * (TOKEN_BYTES + num_alternatives * ALTERNATIVE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        self._flow, self._caller = scope.get("state", {}).get(FLOW), context.caller
        try:
            if context.desk is not None:
                num_prompt_tokens = answer_report.counts_of(self._choices).prompt
                max_tokens = [choice.request.sampling.max_tokens for choice in self._choices]
                await context.desk.take_answers(
                    context.number, num_prompt_tokens, max_tokens, is_stated=self._body.bounds_answer
                )
            with self._services.lifecycle.generation():
                async with (
                    opened_call(self._services.shared, context.job, self._choices) as self._writer.ticket,
                    cancelled_on_disconnect(receive),
                    aclosing(self._deltas) as deltas,
                ):
                    if self._is_streamed:
                        last = await self._send_events(deltas, send, context)
                    else:
                        pieces = await self._collect(deltas)
            if self.keep is not None:
                await self.keep(last if self._is_streamed else b"".join(pieces))
            if self._is_streamed:
                await send({"type": "http.response.body", "body": last, "more_body": False})
            else:
                response = PiecesResponse(
                    pieces, self._services.slow_readers, prediction_header(self._choices)
                )
                await response(scope, receive, send)
        except ClientGone:
            context.finish = "client_gone"
        except OnbeatError as error:
            if isinstance(error, PromptTooLong):
                error.param = self.prompt_field
            context.error_code = error_reply(error).code
            raise
        finally:
            note_choices(self._choices, context)

    async def _send_events(
        self, deltas: AsyncGenerator[ChoiceDelta, None], send: Send, context: HttpContext
    ) -> bytes:
        """Send the events of all deltas and return the last bytes of the stream."""
        first = await anext(deltas)
        own = {**EVENT_STREAM_HEADERS, **prediction_header(self._choices)}
        headers = [(name.encode(), value.encode()) for name, value in own.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        turns = Turns()
        try:
            with self._services.lifecycle.telling_abort():
                async with self._pinging(send):
                    await self._send_delta(first, send)
                    async for delta in deltas:
                        await self._send_delta(delta, send)
                        await turns.rest()
        except Exception as error:  # the status is out: the stream itself must tell
            reply = error_reply(error)
            context.error_code = reply.code
            if self._writer.ticket is not None:
                self._writer.ticket.fail(error)
            if not isinstance(error, OnbeatError):
                logger.exception("%s failed while streaming", context.completion_id)
            return self._writer.failed(reply)
        await self._writer.close_call()
        return await self._services.encoder.off_loop(self._caller, self.repeated_size, self._writer.end)

    async def _collect(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> list[Piece]:
        """Return the pieces of the whole answer."""
        turns = Turns()
        async for delta in deltas:
            self._writer.add(delta)
            await turns.rest()
        for choice in self._choices:
            self._writer.judge(choice)
            await turns.rest()
        await self._writer.close_call()
        pieces = await gathered(self._writer.whole())
        for choice in self._choices:
            while choice.prompt_logprobs:  # millions of numbers would take long to be forgotten at once
                del choice.prompt_logprobs[-256:]
                await turns.rest()
        return pieces

    async def _send_delta(self, delta: ChoiceDelta, send: Send) -> None:
        size = _SCORE_SIZE * len(delta.choice.prompt_logprobs or ())  # of an echo, all in its first event
        if not self._num_begun:
            size += self.repeated_size
        if delta.finish_reason is not None and self._writer.num_open == 1:
            await self._writer.close_call()
        body = await self._services.encoder.off_loop(self._caller, size, partial(self._writer.events, delta))
        delta.choice.prompt_logprobs = None
        self._num_begun += 1
        start = time.monotonic() if self._flow is not None and self._flow.write_paused else None
        await self._services.slow_readers.sent(
            self, send({"type": "http.response.body", "body": body, "more_body": True})
        )
        if start is not None:
            self._unread_seconds += time.monotonic() - start
        self._num_sent += 1

    @asynccontextmanager
    async def _pinging(self, send: Send) -> AsyncIterator[None]:
        """Say that the stream goes on whenever it has been silent for long, while the block runs."""
        pings = asyncio.create_task(self._send_pings(send)) if self._ping else None
        try:
            yield
        finally:
            if pings is not None:
                pings.cancel()

    async def _send_pings(self, send: Send) -> None:
        while True:
            before = self._num_sent
            await asyncio.sleep(PING_SECONDS)
            if before == self._num_sent == self._num_begun:  # else its client has yet to read
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})


def _check_size(requests: Sequence[Request], max_model_len: int) -> None:
    """Refuse an answer that could become larger than any that is read; one choice may fill the context."""
    sampling = requests[0].sampling
    per_token = 1 + (len(sampling.logprob_token_ids) or sampling.num_logprobs or 0)
    num_parts = per_token * sum(request.sampling.max_tokens for request in requests)
    most = max(MAX_ANSWER_PARTS, 32 * max_model_len)
    num_scores = sum(
        (1 + request.num_prompt_logprobs) * len(request.prompt_token_ids)
        for request in requests
        if request.num_prompt_logprobs is not None
    )
    if num_scores > most:
        raise InvalidRequest(
            f"the log-probabilities of the prompts, {num_scores} with the alternatives, are more than the "
            f"{most} that an answer holds; ask for fewer alternatives, or send shorter prompts",
            param="prompt_logprobs",
            code="answer_too_large",
        )
    if len(requests) > 1 and num_parts > most:
        max_tokens = max(request.sampling.max_tokens for request in requests)
        raise InvalidRequest(
            f"{len(requests)} choices of up to {counted(max_tokens, 'token')} with "
            f"{counted(per_token - 1, 'alternative')} each may come to {num_parts} tokens and "
            f"log-probabilities; an answer holds at most {most}. Ask for fewer choices or alternatives, or "
            f"set max_tokens to {most // len(requests) // per_token}",
            param="n",
            code="answer_too_large",
        )


class _AnswerWriter:
    """Makes the bytes of one answer, as its tokens come."""

    def __init__(
        self, choices: Sequence[Choice], body: GenerationRequest, pen: Pen, config: ServerConfig
    ) -> None:
        self._choices = choices
        self._pen = pen
        self._slo_mode = config.slo.mode
        self._has_usage_event = body.includes_usage
        self._no_extras = Extras(usage=None if body.includes_usage else UNSET)
        self._has_usage_so_far = body.has_continuous_usage
        self.ticket: CallTicket | None = None
        """Of a call of a job."""
        self.num_open = len(choices)
        """Choices that have not ended."""
        self._slo_reports: list[answer_report.SLOReport] = []
        """Of the choices that have ended."""
        num_columns = len(pen.columns([]))
        self._whole = [] if body.stream else [WholeChoice(choice, num_columns) for choice in choices]

    def add(self, delta: ChoiceDelta) -> None:
        """Add a delta to the whole answer."""
        self._whole[delta.choice.index].add(delta, self._pen.columns(delta.tokens))

    def whole(self) -> Struct:
        """Return the answer as one object."""
        return self._pen.whole(self._whole, self._final_extras())

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the events of one delta, in the order in which they are sent."""
        if delta.finish_reason is not None:
            self.num_open -= 1
            self.judge(delta.choice)
        is_last = self.num_open == 0 and not self._has_usage_event
        extras = self._no_extras
        if self._has_usage_so_far:
            extras = self._extras(answer_report.counts_up_to(delta))
        if is_last:
            extras = extras._replace(slo=self._slo_report() or UNSET)
        return event_bytes(self._pen.events(delta, extras))

    def end(self) -> bytes:
        """Return what comes behind the events of all deltas."""
        return event_bytes(self._pen.end(self._final_extras())) + self._pen.end_mark

    def failed(self, reply: ErrorReply) -> bytes:
        """Return the last bytes of a stream that an error ends."""
        return event_bytes(self._pen.failed(reply)) + self._pen.end_mark

    def judge(self, choice: Choice) -> None:
        """Judge a choice that has ended: all of them at once could take long."""
        if (report := answer_report.slo_report(choice, self._slo_mode)) is not None:
            self._slo_reports.append(report)

    def _final_extras(self) -> Extras:
        return self._extras(answer_report.counts_of(self._choices))._replace(slo=self._slo_report() or UNSET)

    def _extras(self, counts: answer_report.AnswerTokens) -> Extras:
        return Extras(counts, answer_report.usage_of(counts))

    async def close_call(self) -> None:
        """Hear that all choices have ended, before what says so is written."""
        if self.ticket is not None:
            await self.ticket.close()

    def _slo_report(self) -> answer_report.SLOReport | None:
        """Return how the objectives were kept: those of the worst choice, and of the job if there is one."""
        worst = answer_report.worst_report(self._slo_reports)
        return worst if self.ticket is None else self.ticket.report(worst)


def prediction_header(choices: Sequence[Choice]) -> Mapping[str, str]:
    """Return the header that tells the latest TTFT predicted for any choice, if one was."""
    known = [choice.predicted_ttft for choice in choices if choice.predicted_ttft is not None]
    return predicted_ttft_header(max(known, default=None))


def note_choices(choices: Sequence[Choice], context: HttpContext) -> None:
    """Tell the log of the request what has come of it."""
    counts = answer_report.counts_of(choices)
    context.num_prompt_tokens, context.num_output_tokens = counts.prompt, counts.output
    records = [choice.record for choice in choices if choice.record is not None]
    if firsts := [record.first_token for record in records if record.first_token is not None]:
        context.ttft = min(firsts) - context.arrival
    if context.finish is None:
        reasons = dict.fromkeys(choice.finish_reason.value for choice in choices if choice.finish_reason)
        context.finish = ",".join(reasons) or None


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel what the block awaits when the client closes the connection.

    The request's body must have been read: what arrives after it is the end of the connection.

    Raises
    ------
    ClientGone : instead of the cancellation, when the client was its cause.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
