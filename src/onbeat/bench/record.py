"""What the load client notes of each request."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from onbeat.core.slo import SLO
from onbeat.workload.offered import OfferedLoad


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
    calls_left: int | None
    """Calls that follow; None where the server has to learn it."""
    kind: str

    def fields(self) -> dict[str, Any]:
        """Return the object `slo.job`."""
        stated = {"id": self.job_id, "e2e_ms": self.e2e * 1e3, "class": self.kind}
        return stated if self.calls_left is None else {**stated, "calls_left": self.calls_left}


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
    def response_time(self) -> float:
        """Time from the send to the end of the answer, seconds: how long a refused caller waited."""
        return self.end - self.sent
