"""What happened to one request: the same record for live, simulated and replayed runs.

Request records as JSON lines: one request a line, times in seconds.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from onbeat.core.slo import SLO, Fate
from onbeat.files import write


def record_as_dict(record: RequestRecord) -> dict[str, Any]:
    """Return what a line of the file holds."""
    slo = record.slo
    return {
        "id": record.request_id,
        "class": record.request_class,
        "tenant": record.tenant,
        "slo": None if slo is None else {"ttft": slo.ttft, "tbt": slo.tbt, "e2e": slo.e2e},
        "arrival": record.arrival,
        "scheduled": record.scheduled,
        "first_token": record.first_token,
        "delivery_times": record.delivery_times.tolist(),
        "delivery_sizes": record.delivery_sizes.tolist(),
        "end": record.end,
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "preemptions": record.num_preemptions,
        "replica": record.replica,
        "rejected": record.is_rejected,
        "predicted_wait": record.predicted_wait,
        "predicted_ttft": record.predicted_ttft,
        "relegated": record.fate is Fate.RELEGATED,
    }


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write records, packed if the name ends in `.gz`.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    lines = (orjson.dumps(record_as_dict(record)) + b"\n" for record in records)
    write(path, _packed(lines) if path.suffix == ".gz" else lines)


def _packed(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a gzip file that holds them."""
    packer = zlib.compressobj(1, wbits=31)
    yield from map(packer.compress, parts)
    yield packer.flush()


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request from its arrival to its end. Times are seconds on one clock.

    A *delivery* is the set of tokens that one step gives a request.
    """

    request_id: str
    arrival: float
    """When the whole request had been received."""
    num_prompt_tokens: int
    request_class: str | None = None
    """Name of the class of objectives that it belongs to."""
    slo: SLO | None = None
    """Its objectives; None has none."""
    tenant: str | None = None
    """For whom it is; None where nobody said."""
    offered_output_tokens: int | None = None
    """Output tokens that the load asked for; None where nobody knows beforehand (a live request)."""
    is_embedding: bool = False
    """Whether it has an embedding in place of output tokens: its one delivery has none."""
    is_streamed: bool = True
    """Whether the caller sees each delivery; if not, no token but the last has a deadline."""
    replica: str | None = None
    scheduled: float | None = None
    """When it was first put in a step; None if it never was."""
    engine_ttft: float | None = None
    """Seconds from arrival to the end of the step that made the first delivery; None where nobody says."""
    delivery_times: array[float] = field(default_factory=lambda: array("d"))
    """When each was handed over to be sent; the end of its step where nobody sends (simulated)."""
    delivery_sizes: array[int] = field(default_factory=lambda: array("I"))
    """Tokens of each delivery."""
    end: float = float("nan")
    """When it ended, however it did."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `error`, `expired`, `rejected`; None while it runs."""
    num_output_tokens: int = 0
    num_untaken_tokens: int = 0
    """What the engine has delivered beyond that, for an answer that is read slowly."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    num_preemptions: int = 0
    predicted_ttft: float | None = None
    """TTFT that was predicted at its arrival, seconds; None where nobody predicted."""
    fate: Fate | None = None
    """`RELEGATED`, `REJECTED`, `EXPIRED` or `OVERDUE`; None where it was served as any other."""
    predicted_wait: float | None = None
    """The predicted TTFT of a request that was rejected because of it, seconds; None for all others."""

    @property
    def offered_prompt_tokens(self) -> int:
        """Length of its prompt, which the engine knows whether it serves it or not."""
        return self.num_prompt_tokens

    @property
    def sent(self) -> float:
        """When it came to the engine: `arrival`, since nothing holds a request back before that."""
        return self.arrival

    @property
    def client_queue_time(self) -> float:
        """0: no client holds requests back."""
        return 0.0

    @property
    def scheduling_delay(self) -> float | None:
        """Seconds from arrival to the first step it was part of; None if there was none."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def first_token(self) -> float | None:
        """When its first delivery came; None before that."""
        return self.delivery_times[0] if self.delivery_times else None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first delivery."""
        return self.delivery_times[0] - self.arrival if self.delivery_times else None

    @property
    def e2e(self) -> float:
        """Seconds from arrival to the end."""
        return self.end - self.arrival

    @property
    def tpot(self) -> float | None:
        """(last - first delivery) / (tokens - 1), seconds; None below two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.delivery_times[-1] - self.delivery_times[0]) / (self.num_output_tokens - 1)

    @property
    def is_rejected(self) -> bool:
        """Whether it was refused for want of capacity."""
        return self.fate is Fate.REJECTED

    @property
    def is_expired(self) -> bool:
        """Whether it was ended in the queue."""
        return self.finish_reason == "expired"

    @property
    def is_completed(self) -> bool:
        """Whether the whole answer came."""
        return self.finish_reason in ("stop", "length")
