"""Measured requests as statistics see them, and their deliveries pooled into arrays.

A run may have a million requests and hundreds of millions of deliveries: they are taken chunk by chunk, so
that no array but the caller's own grows with the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onbeat.core.slo import SLO

CHUNK_DELIVERIES = 1 << 20


class MeasuredRequest(Protocol):
    """One offered request, live, simulated, replayed, or as a client saw it."""

    @property
    def arrival(self) -> float:
        """Where TTFT and E2E start, seconds."""

    @property
    def sent(self) -> float:
        """When it left the client, seconds; `arrival` where nothing holds it back."""

    @property
    def delivery_times(self) -> Sequence[float]:
        """When each delivery arrived, seconds, on the clock of `arrival`, ascending."""

    @property
    def delivery_sizes(self) -> Sequence[int]:
        """Tokens of each delivery; empty where nobody knows: they are then spread evenly."""

    @property
    def end(self) -> float:
        """When the request ended, however it did, seconds."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def offered_prompt_tokens(self) -> int:
        """Length of the prompt as it was offered: counted in one way for served and refused requests."""

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def slo(self) -> SLO | None:
        """Its objectives; None has none."""

    @property
    def request_class(self) -> str | None:
        """Name of its class of objectives."""

    @property
    def tenant(self) -> str | None:
        """For whom it is; None where nobody said."""

    @property
    def is_streamed(self) -> bool:
        """Whether the caller sees each delivery."""

    @property
    def is_completed(self) -> bool:
        """Whether the whole answer came. Only completed requests have latencies."""

    @property
    def is_rejected(self) -> bool:
        """Whether the request was refused for want of capacity."""

    @property
    def is_expired(self) -> bool:
        """Whether the request was ended in a queue."""


@dataclass(frozen=True, slots=True)
class DeliveryChunk:
    """Some requests that each have a delivery, and all their deliveries in a row."""

    requests: Sequence[MeasuredRequest]
    rows: NDArray[np.int64]
    """Where each of `requests` stands in the sequence that was pooled."""
    times: NDArray[np.float64]
    counts: NDArray[np.int64]
    """Deliveries of each request."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """Position of each request's first delivery in `times`."""
        starts: NDArray[np.int64] = np.cumsum(self.counts) - self.counts
        return starts

    @property
    def first(self) -> NDArray[np.float64]:
        """Time of each request's first delivery, seconds."""
        return self.times[self.starts]

    @property
    def last(self) -> NDArray[np.float64]:
        """Time of each request's last delivery, seconds."""
        return self.times[np.cumsum(self.counts) - 1]

    def gaps(self) -> NDArray[np.float64]:
        """Return the gaps between deliveries of one request (TBT), in order, seconds."""
        between = np.diff(self.times)
        is_own = np.ones(len(between), dtype=np.bool_)
        is_own[self.starts[1:] - 1] = False  # from one request's last delivery to the next one's first
        return between[is_own]

    def sizes(self) -> NDArray[np.int64]:
        """Return the tokens of each delivery."""
        known = [request.delivery_sizes for request in self.requests]
        if all(isinstance(sizes, array) and sizes.typecode == "I" and len(sizes) for sizes in known):
            packed = b"".join(known)  # type: ignore[arg-type]
            return np.frombuffer(packed, dtype=np.uint32).astype(np.int64)
        return np.concatenate([_sizes(request) for request in self.requests])


def delivery_chunks(
    requests: Sequence[MeasuredRequest], *, max_deliveries: int = CHUNK_DELIVERIES
) -> Iterator[DeliveryChunk]:
    """Yield the requests that have deliveries, in order, about `max_deliveries` deliveries at a time."""
    rows: list[int] = []
    total = 0
    for row, request in enumerate(requests):
        if count := len(request.delivery_times):
            rows.append(row)
            total += count
        if total >= max_deliveries:
            yield _chunk(requests, rows)
            rows, total = [], 0
    if rows:
        yield _chunk(requests, rows)


def _chunk(requests: Sequence[MeasuredRequest], rows: list[int]) -> DeliveryChunk:
    chosen = [requests[row] for row in rows]
    # Joining buffers copies whole arrays; asking numpy to convert each would dominate the run time.
    times = b"".join(_buffer(request.delivery_times) for request in chosen)
    return DeliveryChunk(
        requests=chosen,
        rows=np.array(rows, dtype=np.int64),
        times=np.frombuffer(times, dtype=np.float64),
        counts=np.fromiter((len(r.delivery_times) for r in chosen), dtype=np.int64, count=len(chosen)),
    )


def _buffer(times: Sequence[float]) -> array[float]:
    if isinstance(times, array) and times.typecode == "d":
        return times
    return array("d", times)


def _sizes(request: MeasuredRequest) -> NDArray[np.int64]:
    if len(request.delivery_sizes):
        return np.asarray(request.delivery_sizes, dtype=np.int64)
    count = len(request.delivery_times)
    ends = np.arange(1, count + 1) * request.num_output_tokens // count
    return np.diff(ends, prepend=0)
