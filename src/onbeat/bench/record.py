"""What the load client sends with each request, and what it notes of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

import orjson

from onbeat.core.slo import SLO
from onbeat.workload.offered import OfferedLoad

Api = Literal["completions", "chat", "embeddings"]

DEFAULT_PATHS: dict[Api, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
}


class Message(NamedTuple):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    text: str


class Conversation(NamedTuple):
    """A prompt of several messages."""

    messages: tuple[Message, ...]
    schema: Mapping[str, Any] | None = None
    """JSON schema that the answer must match; None: any text."""


Prompt = str | Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadBuilder:
    """Makes the body of a request: one that streams its answer, or one for an embedding."""

    api: Api
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to every body; they win over the built ones."""

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in events."""
        return self.api != "embeddings"

    def build(self, prompt: Prompt, max_tokens: int, own: Mapping[str, Any] | None = None) -> bytes:
        """Return the JSON body that asks for at most `max_tokens` tokens and a usage count.

        Parameters
        ----------
        own : fields of this one request.
        """
        body: dict[str, Any] = {"model": self.model}
        if self.is_streamed:
            body |= {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        talk = Conversation((Message("user", prompt),)) if isinstance(prompt, str) else prompt
        if self.api == "embeddings":
            body["input"] = prompt
        elif self.api == "chat":
            body["messages"] = [{"role": each.role, "content": each.text} for each in talk.messages]
        else:
            body["prompt"] = " ".join(each.text for each in talk.messages)
        if talk.schema is not None:
            schema = {"name": "answer", "schema": talk.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return orjson.dumps(body | dict(own or {}) | dict(self.extra))


def choice_text(choice: Mapping[str, Any]) -> str:
    """Return what one choice of a chunk delivers, '' if nothing: text, reasoning, and calls of tools.

    Raises
    ------
    TypeError : it is of another type than servers send.
    """
    delta = choice.get("delta")
    if delta is None:
        return _text_of(choice.get("text"))
    text = _text_of(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    return text + "".join(_text_of(call.get(part)) for call in calls for part in ("name", "arguments"))


def _text_of(content: Any) -> str:
    """Return the text of a string, or of a list of parts, as servers of models that reason may send it."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(map(_text_of, content))
    if isinstance(content, dict):
        return _text_of(content.get("text") or content.get("thinking"))
    raise TypeError(f"text of type {type(content).__name__}")


class Status(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    """An error answer, a broken stream, a timeout or no text."""
    REJECTED = "rejected"
    """HTTP 429 or 503: the server refused it for want of capacity."""
    EXPIRED = "expired"
    """HTTP 504: its deadline passed while it waited in the server, and it had asked not to be served late."""
    INTERRUPTED = "interrupted"
    """The run was stopped while the request was open; it counts nowhere."""


class TokenCountSource(StrEnum):
    """Where a token count comes from, best first."""

    USAGE = "usage"
    """The server's own count in the answer."""
    TOKENIZER = "tokenizer"
    """The given tokenizer, run over the answer."""
    CHUNKS = "chunks"
    """The number of deliveries: too low if the server sends several tokens at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVerdict:
    """The object `slo` of an answer's last chunk. Times are seconds of the server's clock."""

    is_met: bool | None = None
    ttft: float | None = None
    """From the arrival of the request's body to the end of the step that made its first token."""
    tbt_p99: float | None = None
    token_attainment: float | None = None
    """Share of the tokens that met their deadlines."""
    predicted_ttft: float | None = None
    is_relegated: bool = False

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> ServerVerdict:
        """Read the object; what is missing or no number is None."""
        met = fields.get("met")
        return cls(
            is_met=met if isinstance(met, bool) else None,
            ttft=milliseconds(fields.get("ttft_ms")),
            tbt_p99=milliseconds(fields.get("tbt_p99_ms")),
            token_attainment=_number(fields.get("token_attainment")),
            predicted_ttft=milliseconds(fields.get("predicted_ttft_ms")),
            is_relegated=fields.get("relegated") is True,
        )


def milliseconds(value: Any) -> float | None:
    """Return a number of milliseconds as seconds; None for anything else."""
    number = _number(value)
    return None if number is None else number / 1e3


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class JobOfCall(NamedTuple):
    """The job that a request is a call of, as its server is told."""

    job_id: str
    e2e: float
    """Seconds from the start of its first call to the end of its last."""
    calls_left: int
    """Calls that follow."""
    kind: str

    def fields(self) -> dict[str, Any]:
        """Return the object `slo.job`."""
        e2e_ms = self.e2e * 1e3
        return {"id": self.job_id, "e2e_ms": e2e_ms, "class": self.kind, "calls_left": self.calls_left}


@dataclass(slots=True, kw_only=True)
class SentRequest:
    """One request as the client saw it. Times are seconds of `time.perf_counter`.

    Memory: about 8 bytes per delivery; the text is kept only when asked for.
    """

    index: int
    num_prompt_tokens: int
    """The planned length; the server's count replaces it when the answer carries one."""
    offered_prompt_tokens: int = field(init=False)
    """The planned length, which stays: a refused request has no other."""
    max_tokens: int
    scheduled: float | None = None
    """When an open loop wanted to send it; None in a closed loop."""
    slot_wait: float = 0.0
    """Time spent waiting for one of `max_concurrency` slots."""
    sent: float = 0.0
    end: float = 0.0
    delivery_times: array[float] = field(default_factory=lambda: array("d"))
    num_output_tokens: int = 0
    count_source: TokenCountSource = TokenCountSource.CHUNKS
    num_drafted_tokens: int = 0
    """Draft tokens that the server verified for it, as its usage says."""
    num_accepted_tokens: int = 0
    """Of these, tokens that are in the answer."""
    finish_reason: str | None = None
    status: Status = Status.FAILED
    cause: str | None = None
    """Failures of one kind share it: `HTTP 500`, `timeout`, `broken stream` ..."""
    detail: str | None = None
    """What exactly happened, for a person."""
    text: str | None = None
    slo: SLO | None = None
    """What the run holds it to; None is nothing."""
    request_class: str | None = None
    tenant: str | None = None
    """For whom it is, where the run's classes say."""
    weight: float = 1.0
    """Worth of keeping its objectives beside those of others."""
    job: JobOfCall | None = None
    """Of a call of a job with a deadline."""
    num_cached_tokens: int | None = None
    """Of the prompt, tokens that the server's prefix cache held; None where it does not say."""
    verdict: ServerVerdict | None = None
    """What the server says of how it kept the objectives."""
    predicted_ttft: float | None = None
    """Of a refused request: the TTFT that the server said it would have had, seconds."""
    retry_after: float | None = None
    """Of a refused request: after how long the server said to come again, seconds."""

    # A client sees chunks of text, not how many tokens each has; it never waits for a whole answer.
    delivery_sizes: ClassVar[tuple[int, ...]] = ()
    is_streamed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.offered_prompt_tokens = self.num_prompt_tokens

    @classmethod
    def of(cls, load: OfferedLoad, row: int) -> SentRequest:
        """Return the record of a request that is about to be sent, with the objectives that it is held to."""
        record = cls(
            index=row,
            num_prompt_tokens=int(load.num_prompt_tokens[row]),
            max_tokens=int(load.num_output_tokens[row]),
            tenant=load.tenant(row),
        )
        if (own := load.request_class(row)) is not None:
            record.slo, record.request_class, record.weight = own.slo, own.name, own.weight
        return record

    @property
    def arrival(self) -> float:
        """Where TTFT and E2E start: the scheduled time if there is one.

        Timing an open loop from the send would hide the wait of requests that the client sent late
        ("coordinated omission").
        """
        return self.sent if self.scheduled is None else self.scheduled

    @property
    def client_queue_time(self) -> float:
        """Time from the scheduled arrival to the send, seconds; 0 in a closed loop."""
        return self.sent - self.arrival

    @property
    def is_completed(self) -> bool:
        return self.status is Status.COMPLETED

    @property
    def is_rejected(self) -> bool:
        return self.status is Status.REJECTED

    @property
    def is_expired(self) -> bool:
        return self.status is Status.EXPIRED

    @property
    def response_time(self) -> float:
        """Time from the send to the end of the answer, seconds: how long a refused caller waited."""
        return self.end - self.sent
