"""Answer a checked request: run its choices and write what comes, streamed or whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onbeat.core.errors import OnbeatError
from onbeat.core.slo import SLOMode
from onbeat.server import sse
from onbeat.server.answer_head import NO_EXTRAS, Extras
from onbeat.server.errors import ClientGone, error_reply, predicted_ttft_header
from onbeat.server.generation import Choice, ChoiceDelta, Generator, ShownToken, TextOptions
from onbeat.server.lifecycle import Lifecycle
from onbeat.server.middleware import HttpContext, context_of
from onbeat.server.slo_answer import slo_report
from onbeat.server.usage import usage_of

logger = logging.getLogger("onbeat.server")


@dataclass(slots=True)
class FinishedChoice:
    """A choice with all of its text."""

    choice: Choice
    text: str
    tokens: list[ShownToken]
    finish_reason: str | None


class AnswerFormat(Protocol):
    """How one endpoint writes its answers."""

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:
        """Return the events of one delta."""
        ...

    def usage_event(self, extras: Extras) -> bytes:
        """Return the event with the final usage and no choices."""
        ...

    def response(self, choices: Sequence[FinishedChoice], extras: Extras) -> dict[str, Any]:
        """Return the whole answer as one object."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: what to generate and how to answer."""

    completion_id: str
    arrival: float
    """When the whole request had been received, seconds of the monotonic clock."""
    choices: Sequence[Choice]
    text_options: TextOptions
    answer_format: AnswerFormat
    stream: bool
    include_usage: bool
    continuous_usage: bool
    slo_mode: SLOMode
    """What keeping a TBT objective means."""


class AnswerResponse(Response):
    """Generates while it responds; a client that leaves aborts its requests.

    The response starts with the first delivery, so that what the engine refuses still gets its HTTP status.
    """

    def __init__(self, job: Job, generator: Generator, lifecycle: Lifecycle) -> None:
        super().__init__()
        self._job = job
        self._generator = generator
        self._lifecycle = lifecycle
        self._num_finished = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        context = context_of(scope)
        context.completion_id = job.completion_id
        deltas = self._generator.run(job.choices, job.text_options)
        last = b""
        try:
            with self._lifecycle.generation():
                async with _cancelled_on_disconnect(receive), aclosing(deltas):
                    last = await (
                        self._stream(deltas, send, context) if job.stream else self._collect(deltas)
                    )
                await self._finish(last, scope, receive, send)
        except ClientGone:
            context.finish = "client_gone"
        except OnbeatError as error:
            context.error_code = _code_of(error)
            raise
        finally:
            self._describe(context)

    async def _collect(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> bytes:
        job = self._job
        finished = [FinishedChoice(choice, "", [], None) for choice in job.choices]
        texts: list[list[str]] = [[] for _ in finished]
        async for delta in deltas:
            index = delta.choice.index
            texts[index].append(delta.text)
            finished[index].tokens += delta.tokens
            finished[index].finish_reason = delta.finish_reason
        for choice, pieces in zip(finished, texts, strict=True):
            choice.text = "".join(pieces)
        extras = Extras(usage=usage_of(job.choices), slo=slo_report(job.choices, job.slo_mode))
        return orjson.dumps(job.answer_format.response(finished, extras))

    async def _stream(
        self, deltas: AsyncGenerator[ChoiceDelta, None], send: Send, context: HttpContext
    ) -> bytes:
        """Send all deltas and return the last bytes of the stream."""
        first = await anext(deltas)
        own = {**sse.HEADERS, **_predicted_ttft(self._job.choices)}
        headers = [(name.encode(), value.encode()) for name, value in own.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._send_delta(first, send)
            async for delta in deltas:
                await self._send_delta(delta, send)
        except Exception as error:  # the status is out: the stream itself must tell
            context.error_code = _code_of(error)
            if not isinstance(error, OnbeatError):
                logger.exception("%s failed while streaming", self._job.completion_id)
            return sse.error_event(error) + sse.DONE
        job = self._job
        if not job.include_usage:
            return sse.DONE
        extras = Extras(usage=usage_of(job.choices), slo=slo_report(job.choices, job.slo_mode))
        return job.answer_format.usage_event(extras) + sse.DONE

    async def _send_delta(self, delta: ChoiceDelta, send: Send) -> None:
        body = self._job.answer_format.events(delta, self._extras(delta))
        await send({"type": "http.response.body", "body": body, "more_body": True})

    def _extras(self, delta: ChoiceDelta) -> Extras:
        """Return what goes along with a delta; the end of the last choice has how the promise was kept."""
        job = self._job
        usage = usage_of([delta.choice]) if job.continuous_usage else None
        self._num_finished += delta.finish_reason is not None
        if job.include_usage or self._num_finished < len(job.choices):
            return NO_EXTRAS if usage is None else Extras(usage=usage)
        return Extras(usage=usage, slo=slo_report(job.choices, job.slo_mode))

    async def _finish(self, last: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        if self._job.stream:
            await send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            headers = _predicted_ttft(self._job.choices)
            await Response(last, headers=headers, media_type="application/json")(scope, receive, send)

    def _describe(self, context: HttpContext) -> None:
        choices = self._job.choices
        usage = usage_of(choices)
        context.num_prompt_tokens = usage["prompt_tokens"]
        context.num_output_tokens = usage["completion_tokens"]
        firsts = [choice.first_delivery for choice in choices if choice.first_delivery is not None]
        if firsts:
            context.ttft = min(firsts) - self._job.arrival
        if context.finish is None:
            reasons = dict.fromkeys(choice.finish_reason.value for choice in choices if choice.finish_reason)
            context.finish = ",".join(reasons) or None


def _predicted_ttft(choices: Sequence[Choice]) -> Mapping[str, str]:
    """Return the header that tells the latest TTFT predicted for any choice, if one was."""
    known = [choice.predicted_ttft for choice in choices if choice.predicted_ttft is not None]
    return predicted_ttft_header(max(known, default=None))


def _code_of(error: Exception) -> str:
    return str(orjson.loads(error_reply(error).body)["error"]["code"])


@asynccontextmanager
async def _cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
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
