"""Records of one replica as a few arrays, to pass them between processes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isnan, nan

from onbeat.core.slo import Fate
from onbeat.metrics.record import RequestRecord
from onbeat.workload.offered import OfferedLoad


@dataclass(slots=True)
class RecordColumns:
    """Records of requests that ended; what the load says of a request is left out.

    Pickling it costs a copy of its bytes; pickling the records would take longer than simulating them.
    """

    replica: str
    rows: array[int] = field(default_factory=lambda: array("q"))
    """Row of the load."""
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    scheduled: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    num_cached_tokens: array[int] = field(default_factory=lambda: array("q"))
    num_preemptions: array[int] = field(default_factory=lambda: array("q"))
    num_deliveries: array[int] = field(default_factory=lambda: array("q"))
    num_output_tokens: array[int] = field(default_factory=lambda: array("q"))
    delivery_times: array[float] = field(default_factory=lambda: array("d"))
    """Of all requests, one after the other."""
    delivery_sizes: array[int] = field(default_factory=lambda: array("I"))
    """Likewise, but of those requests alone that had a delivery of several tokens."""
    finish_reasons: list[str] = field(default_factory=list)
    predicted_ttfts: array[float] = field(default_factory=lambda: array("d"))
    predicted_waits: array[float] = field(default_factory=lambda: array("d"))
    fates: list[Fate | None] = field(default_factory=list)

    def append(self, row: int, record: RequestRecord) -> None:
        """Add the record of a request that ended."""
        assert record.finish_reason is not None
        self.rows.append(row)
        self.arrivals.append(record.arrival)
        self.scheduled.append(_or_nan(record.scheduled))
        self.ends.append(record.end)
        self.num_cached_tokens.append(record.num_cached_tokens)
        self.num_preemptions.append(record.num_preemptions)
        self.num_deliveries.append(len(record.delivery_times))
        self.num_output_tokens.append(record.num_output_tokens)
        if record.num_output_tokens != len(record.delivery_times):
            self.delivery_sizes.extend(record.delivery_sizes)
        self.delivery_times.extend(record.delivery_times)
        self.finish_reasons.append(record.finish_reason)
        self.predicted_ttfts.append(_or_nan(record.predicted_ttft))
        self.predicted_waits.append(_or_nan(record.predicted_wait))
        self.fates.append(record.fate)

    def records(self, load: OfferedLoad) -> Iterable[tuple[int, RequestRecord]]:
        """Return (row of the load, record) as they were added."""
        stop = sizes_stop = 0
        for place, row in enumerate(self.rows):
            start, stop = stop, stop + self.num_deliveries[place]
            sizes = array("B", b"\x01" * (stop - start))
            if self.num_output_tokens[place] != stop - start:
                sizes_start, sizes_stop = sizes_stop, sizes_stop + stop - start
                sizes = self.delivery_sizes[sizes_start:sizes_stop]
            request_class = load.request_class(row)
            yield (
                row,
                RequestRecord(
                    request_id=str(row),
                    arrival=self.arrivals[place],
                    num_prompt_tokens=int(load.num_prompt_tokens[row]),
                    request_class=None if request_class is None else request_class.name,
                    slo=None if request_class is None else request_class.slo,
                    tenant=load.tenant(row),
                    offered_output_tokens=int(load.num_output_tokens[row]),
                    is_embedding=not load.num_output_tokens[row],
                    replica=self.replica,
                    scheduled=_or_none(self.scheduled[place]),
                    delivery_times=self.delivery_times[start:stop],
                    delivery_sizes=sizes,
                    end=self.ends[place],
                    finish_reason=self.finish_reasons[place],
                    num_output_tokens=self.num_output_tokens[place],
                    num_cached_tokens=self.num_cached_tokens[place],
                    num_preemptions=self.num_preemptions[place],
                    predicted_ttft=_or_none(self.predicted_ttfts[place]),
                    predicted_wait=_or_none(self.predicted_waits[place]),
                    fate=self.fates[place],
                ),
            )


def _or_nan(value: float | None) -> float:
    return nan if value is None else value


def _or_none(value: float) -> float | None:
    return None if isnan(value) else value
