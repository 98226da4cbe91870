"""A client for one OpenAI-compatible endpoint that notes when every delivery arrives."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson

from onbeat.bench.bench_config import SLOTransport
from onbeat.bench.record import PayloadBuilder, Prompt, SentRequest, Status, TokenCountSource, milliseconds
from onbeat.bench.stream import AnswerStream, StreamError, error_code, error_text

CountTokens = Callable[[str], int]

STATUSES = {429: Status.REJECTED, 503: Status.REJECTED, 504: Status.EXPIRED}
CODES = {
    "slo_unattainable": Status.REJECTED,
    "server_overloaded": Status.REJECTED,
    "deadline_exceeded": Status.EXPIRED,
}
"""The same in an error event of a stream that had already begun."""
BREAKDOWNS = frozenset({"engine_dead"})
"""Codes of a 503 that refuses nobody: the server has failed."""

_MOST_OF_A_REFUSAL = 1 << 16
"""Bytes of an error's body that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where requests go."""

    url: str
    payload: PayloadBuilder
    headers: dict[str, str] = field(default_factory=dict)
    objectives: SLOTransport = field(default_factory=SLOTransport)
    """How the server hears of the objectives of its requests."""
    timeout: float = 6 * 3600.0
    """Longest time one request may take, seconds."""


def open_session(timeout: float, *, keeps_alive: bool = True) -> aiohttp.ClientSession:
    """Return a session whose connections are unlimited in number.

    The client must never be the queue: with a limit, requests would wait in it unseen.

    Parameters
    ----------
    timeout : of a whole request, seconds.
    keeps_alive : whether connections are used again. A server that drops them after an answer without saying
        so loses the next request otherwise.
    """
    closing: dict[str, Any] = {"keepalive_timeout": 60} if keeps_alive else {"force_close": True}
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, **closing),
        timeout=aiohttp.ClientTimeout(total=timeout),
        trace_configs=[trace],
        raise_for_status=False,
    )


async def _note_reuse(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.is_reused = True


class StreamingClient:
    """Sends requests, each once, and fills in their records.

    A refused request is not sent again, whatever `Retry-After` says: load that was shed must not come back as
    load that was never offered.

    Parameters
    ----------
    count_tokens : counts an answer's tokens when the server sends no usage.
    keep_text : keep each answer's text in its record.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        *,
        count_tokens: CountTokens | None = None,
        keep_text: bool = False,
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._count_tokens = count_tokens
        self._keep_text = keep_text
        accept = "text/event-stream" if endpoint.payload.is_streamed else "application/json"
        self._headers = {"Content-Type": "application/json", "Accept": accept} | endpoint.headers

    async def send(self, prompt: Prompt, record: SentRequest) -> SentRequest:
        """Send one request and read its answer; every failure ends up in the record."""
        objectives = self._endpoint.objectives
        body = self._endpoint.payload.build(prompt, record.max_tokens, objectives.body(record))
        headers = self._headers | objectives.headers(record)
        stream = AnswerStream()
        record.sent = time.perf_counter()
        try:
            await self._exchange(body, headers, stream, record)
            record.status = Status.COMPLETED
        except StreamError as error:
            _note_failure(record, error.cause, error.detail, code=error.code)
        except TimeoutError:
            _note_failure(record, "timeout", f"no complete answer within {self._endpoint.timeout:g} s")
        except aiohttp.ClientPayloadError as error:
            _note_failure(record, "broken stream", f"the connection broke in mid-answer: {error}")
        except aiohttp.ClientConnectorError as error:
            _note_failure(record, "connection refused", str(error))
        except (aiohttp.ClientError, OSError) as error:
            _note_failure(record, "connection lost", f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            record.status = Status.INTERRUPTED
            raise
        finally:
            record.end = time.perf_counter()
            self._take_answer(stream, record)
        return record

    async def _exchange(
        self, body: bytes, headers: dict[str, str], stream: AnswerStream, record: SentRequest
    ) -> None:
        async with await self._post(body, headers) as response:
            if response.status != 200:
                raise await _refused(response, record)
            clock = time.perf_counter
            if not self._endpoint.payload.is_streamed:
                stream.take_embeddings(await response.read(), clock())
                return
            content = response.content
            while piece := await content.readany():
                stream.feed(piece, clock())
            stream.finish(clock())

    async def _post(self, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """Post, once more if a kept-alive connection turns out to have been closed by the server.

        Some servers close the connection after each stream; the close can cross the next request, which then
        was never seen by the server. A fresh connection that breaks is a failure.
        """
        context = SimpleNamespace(is_reused=False)
        try:
            return await self._post_once(body, headers, context)
        except (aiohttp.ServerDisconnectedError, ConnectionError):
            if not context.is_reused:
                raise
        return await self._post_once(body, headers, SimpleNamespace())

    async def _post_once(
        self, body: bytes, headers: dict[str, str], context: SimpleNamespace
    ) -> aiohttp.ClientResponse:
        return await self._session.post(
            self._endpoint.url, data=body, headers=headers, trace_request_ctx=context
        )

    def _take_answer(self, stream: AnswerStream, record: SentRequest) -> None:
        record.delivery_times = stream.delivery_times
        record.finish_reason = stream.finish_reason
        record.verdict = stream.verdict
        if self._keep_text:
            record.text = "".join(stream.texts)
        usage = stream.usage or {}
        record.num_prompt_tokens = _count(usage, "prompt_tokens") or record.num_prompt_tokens
        _take_drafts(usage, record)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(num_cached := details.get("cached_tokens"), int):
            record.num_cached_tokens = num_cached
        if not self._endpoint.payload.is_streamed:  # nothing is generated, whatever the data set plans
            record.num_output_tokens = record.max_tokens = 0
            record.count_source = TokenCountSource.USAGE
        elif num_output_tokens := _count(usage, "completion_tokens"):
            record.num_output_tokens = num_output_tokens
            record.count_source = TokenCountSource.USAGE
        elif self._count_tokens is not None:
            record.num_output_tokens = self._count_tokens("".join(stream.texts))
            record.count_source = TokenCountSource.TOKENIZER
        else:
            record.num_output_tokens = len(stream.delivery_times)


def _take_drafts(usage: Mapping[str, Any], record: SentRequest) -> None:
    """Note what the answer's usage says of speculation; servers that do not speculate leave it out."""
    details = usage.get("completion_tokens_details")
    if isinstance(details, dict):
        num_accepted = _count(details, "accepted_prediction_tokens")
        record.num_accepted_tokens = num_accepted
        record.num_drafted_tokens = num_accepted + _count(details, "rejected_prediction_tokens")


def _count(usage: Mapping[str, Any], name: str) -> int:
    """Return a number of tokens; 0 where the server tells none, or something else than a number."""
    value = usage.get(name)
    return value if isinstance(value, int) else 0


def _note_failure(record: SentRequest, cause: str, detail: str, *, code: str | None = None) -> None:
    record.cause = cause
    record.detail = detail
    if record.status not in {Status.REJECTED, Status.EXPIRED}:
        record.status = CODES.get(code or "", Status.FAILED)


async def _refused(response: aiohttp.ClientResponse, record: SentRequest) -> StreamError:
    try:
        content = await response.content.readexactly(_MOST_OF_A_REFUSAL)
    except asyncio.IncompleteReadError as end:
        content = end.partial
    body = content.decode(errors="replace")
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError:
        message = None
    error = refusal(record, response.status, response.headers, message if isinstance(message, dict) else None)
    error.detail = error.detail or body.strip()[:300] or response.reason or "no message"
    return error


def refusal(
    record: SentRequest, status: int, headers: Mapping[str, str], message: dict[str, Any] | None
) -> StreamError:
    """Note in a record what an answer other than 200 means; returns the error to raise.

    Parameters
    ----------
    message : the answer's body; None if it is not a JSON object.
    """
    error = (message or {}).get("error")
    fields = error if isinstance(error, dict) else {}
    code = None if message is None else error_code(message)
    if status in STATUSES and code not in BREAKDOWNS:
        record.status = STATUSES[status]
        record.predicted_ttft = milliseconds(fields.get("predicted_ttft_ms"))
        record.retry_after = retry_after(headers)
    return StreamError(f"HTTP {status}", error_text(message) if message is not None else "", code=code)


def why_no_answer(error: Exception) -> str:
    """Say in a few words why a server did not answer."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        return os.strerror(number) if number > 0 else error.os_error.strerror or str(error)
    return str(error) or type(error).__name__


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the wait that the headers ask for, seconds: the finer one of the two that servers send."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return float(headers[name]) * unit
        except (KeyError, ValueError):  # absent, or the date that the standard allows too
            continue
    return None
