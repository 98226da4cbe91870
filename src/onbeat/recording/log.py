"""What a record file holds: the header, then every call of a scheduler in the order in which it was made.

The file is gzip-compressed text with one JSON object a line:

1. the header: ``{"file": "onbeat-record", "schema_version": 13, ...}`` with the fields of `RecordHeader`;
2. one line a call, named by its field ``call``: ``add``, ``abort``, ``schedule``, ``update``, ``handover``,
   with the fields of the classes below, defaults left out;
3. the trailer: ``{"call": "end", "calls": N}`` with the number of calls. A file without it is cut short.

Requests are numbered from 0 in the order of their ``add``; everywhere else the number stands for the id.
Times are seconds of the recording machine's monotonic clock, written so that they read back exactly. There is
no text and no token in the file: prompts are lengths, shared prefixes are shown by hashes of token blocks.

Schema versions: a file is written in the newest, and every one of `READABLE_VERSIONS` is read; what an older
one does not say has its default. The number rises when an older onbeat would take a newer file for what it is
not.

== ==================================================================================================
1  as above, without what version 2 added
2  ``add`` with objectives, weight, tenant and shed mode, also for requests that were refused for want of
   capacity (`AddCall.refused`); ``schedule`` with those that it ended in the queue (`ScheduleCall.expired`)
3  drafts: those that rows were planned with (`RecordedRow.num_draft_tokens`), and what became of them
   (`UpdateCall.drafted`, `UpdateCall.available`, `UpdateCall.undelivered`)
4  ``add`` of a request that is resumed with tokens from elsewhere (`AddCall.num_resumed_tokens`)
5  ``handover``: what takes KV, and requests with theirs, to other replicas and from them; ``add`` of one that
   came so (`AddCall.adoption`, `AddCall.num_external_tokens`). Files by an older onbeat could have it of KV
   that came after the admission, or was kept beyond the end; they are refused
6  of a request that came from another replica, how many late tokens it may have
   (`StreamDeadlines.num_late_allowed`)
7  ``add`` of one of several choices, which the queue takes or refuses together (`AddCall.whole`)
8  ``add`` of a request whose prompt is scored, and takes nothing from the prefix cache (`AddCall.is_scored`)
9  ``add`` of a request that has an embedding in place of output tokens (`AddCall.pooling`)
10 ``add`` of a request under a grammar (`AddCall.is_guided`), and what grammars did in a step
   (`UpdateCall.guide_seconds`, `UpdateCall.faults`)
11 ``add`` of a request whose KV is kept behind its end (`AddCall.kept_for`)
12 what a token under a grammar takes: as a trial found (`AddCall.guide_seconds`), and each row of a step
   (`UpdateCall.row_guide_seconds`)
13 ``fetched``: how far output was fetched, where requests sit out of which too much is not
== ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf, isinf
from typing import Any, Literal, NamedTuple

import msgspec

from onbeat.core.errors import Overloaded, SLOUnattainable, counted
from onbeat.core.handover import Detached, StreamDeadlines
from onbeat.core.request import UNKNOWN_GRAMMAR, FinishReason, Pooling
from onbeat.core.slo import ShedMode
from onbeat.typed import Count, Hash, Number, Positive, Size, Whole

DEADLINES = tuple(each.name for each in fields(StreamDeadlines))
"""Of `RecordedAdoption.stood`, in its order."""
FILE_KIND = "onbeat-record"
_ROW_FIELDS = 4
SCHEMA_VERSION = 13
READABLE_VERSIONS = tuple(range(1, SCHEMA_VERSION + 1))

HandoverVerb = Literal[
    "hold", "unhold", "reserve", "release", "detach", "left", "reattach", "free", "fetched"
]
"""`left` is the answer to `detach`; `fetched` is `Scheduler.on_fetched`, of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """Who recorded what: all that a replay needs to build the same scheduler."""

    onbeat_version: str
    created: str
    """Wall clock time of the start, ISO 8601, UTC."""
    scheduler: Mapping[str, Any]
    """The fields of the `SchedulerConfig`."""
    engine: Mapping[str, Any]
    """The fields of `EngineInfo`, and what else tells one engine from another."""
    max_in_flight_steps: Size = 1
    """1: a step is planned once the one before is back; 2: while it runs."""
    step_time: Mapping[str, Any] | None = None
    """The step-time model that the scheduler told its steps to; None without one."""


class RecordedRefusal(NamedTuple):
    """Why `Scheduler.add` did not take a request."""

    code: str
    """Of the exception: `server_overloaded`, `slo_unattainable`."""
    predicted_ttft: Number | None = None
    """Seconds, as is the next; None where too many waited."""
    retry_after: Number | None = None
    """None where a number of requests or tokens was reached, or not even an idle replica would be in time."""

    @classmethod
    def of(cls, error: Overloaded | SLOUnattainable) -> RecordedRefusal:
        """Return what a record has of an exception."""
        predicted = error.predicted_ttft if isinstance(error, SLOUnattainable) else None
        return cls(error.code, predicted, error.retry_after)


class RecordedAdoption(NamedTuple):
    """What `Handovers.adopt` was told of a request beside what `add` is told."""

    handover_id: str
    scheduled_time: Number
    num_cached_tokens: Count
    num_preemptions: Count
    stood: tuple[Number | bool | None, ...] | None = None
    """Its deadlines, in the order of `DEADLINES`; infinite ones are None, as JSON has no infinity. Files
    before version 6 lack the last one, which has a default."""

    @classmethod
    def of(cls, handover_id: str, stream: Detached) -> RecordedAdoption:
        """Return what is recorded of a stream that came by a hand-over."""
        stood = None
        if stream.deadlines is not None:
            values = (getattr(stream.deadlines, name) for name in DEADLINES)
            stood = tuple(None if isinstance(each, float) and isinf(each) else each for each in values)
        return cls(
            handover_id, stream.scheduled_time, stream.num_cached_tokens, stream.num_preemptions, stood
        )

    @property
    def deadlines(self) -> StreamDeadlines | None:
        """How it stood; None where its policy kept no deadlines."""
        if self.stood is None:
            return None
        values: dict[str, Any] = dict(zip(DEADLINES, self.stood, strict=False))
        for name, value in values.items():
            if value is None and name != DEADLINES[-1]:
                values[name] = -inf if name.endswith("_delivery") else inf
        return StreamDeadlines(**values)


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="call"):
    """A line of a record."""


AS_THEY_ARE = ("arrival", "priority", "weight", "shed", "num_external_tokens", "pooling", "kept_for")
"""Fields of a request that a record has as they are."""


class AddCall(_Call, frozen=True, tag="add"):
    """`Scheduler.add` of a request that it took, or refused for want of capacity; or `Handovers.adopt`."""

    now: Number
    """What the scheduler was given."""
    request: Count
    request_id: str
    arrival: Number
    num_prompt_tokens: Count
    max_tokens: Count
    priority: Whole = 0
    block_hashes: tuple[Hash, ...] = ()
    """Hashes of the full blocks of the prompt, and of the output tokens that it is resumed with; empty where
    the prefix cache is off."""
    slo: tuple[Positive | None, Positive | None, Positive | None] | None = None
    """TTFT, TBT and E2E objective, seconds."""
    slo_class: str | None = None
    weight: Number = 1.0
    tenant: str | None = None
    shed: ShedMode = ShedMode.OFF
    whole: tuple[str, Count, Count] | None = None
    """Its `WholeRequest`."""
    refused: RecordedRefusal | None = None
    num_resumed_tokens: Count = 0
    """Output tokens that its client had already."""
    first_token_time: Number | None = None
    """When the first of them was delivered, seconds."""
    num_external_tokens: Count = 0
    """Leading tokens whose KV came from another replica."""
    adoption: RecordedAdoption | None = None
    """None of a request that was added."""
    is_scored: bool = False
    """Whether log-probabilities of its prompt were asked for."""
    pooling: Pooling | None = None
    """How its prompt became its embedding; None where it has output tokens."""
    is_guided: bool = False
    """Whether its answer had to match a grammar."""
    guide_seconds: Number = UNKNOWN_GRAMMAR.seconds
    """What a token of that grammar took in a trial."""
    kept_for: Number = 0.0
    """Seconds for which its KV was to be kept behind its end."""

    def __post_init__(self) -> None:
        if self.num_external_tokens and self.adoption is None:
            raise ValueError("num_external_tokens needs an adoption: KV that comes later is done no more")
        if self.adoption is not None:
            self.adoption.deadlines  # noqa: B018 - raises TypeError where some are missing


class AbortCall(_Call, frozen=True, tag="abort"):
    """`Scheduler.abort` of requests that had not ended."""

    now: Number
    requests: tuple[Count, ...]


class RecordedRow(NamedTuple):
    """A `ScheduledRequest` without its blocks."""

    request: int
    num_computed_tokens: int
    num_new_tokens: int
    samples: bool
    num_draft_tokens: int = 0


class RecordedAdmission(NamedTuple):
    """An `AdmittedRequest` without its tokens."""

    request: Count
    num_output_tokens: Count
    """Generated before a preemption."""
    block_ids: tuple[Count, ...]


class ScheduleCall(_Call, frozen=True, tag="schedule", dict=True):
    """`Scheduler.schedule` and what it planned."""

    now: Number
    step_id: Count | None = None
    """None where nothing could be planned."""
    flat_rows: tuple[Count | bool, ...] = msgspec.field(default=(), name="rows")
    """Four numbers of each row, those of `RecordedRow`: a step may have hundreds."""
    drafts: tuple[Count, ...] | None = None
    """`num_draft_tokens` of each row; None where none has any."""
    new_block_ids: dict[Count, tuple[Count, ...]] = {}
    """Index of a row -> blocks that it appends; rows without any are left out."""
    admitted: tuple[RecordedAdmission, ...] = ()
    released: tuple[Count | str, ...] = ()
    """Numbers; an id where the writer no longer knew the number."""
    predicted_seconds: Number | None = None
    """What the scheduler's step-time model expected of the step, right after it was planned."""
    expired: tuple[Count, ...] = ()
    """Requests that it gave up, since their TTFT deadline had passed."""

    def __post_init__(self) -> None:
        num_rows, rest = divmod(len(self.flat_rows), _ROW_FIELDS)
        if rest or len(self.drafts or ()) not in (0, num_rows):
            raise ValueError(f"rows has {len(self.flat_rows)} numbers, drafts {len(self.drafts or ())}")

    @property
    def row_requests(self) -> Sequence[int]:
        """The requests of the rows."""
        return self.flat_rows[::_ROW_FIELDS]

    @property
    def num_sampling(self) -> int:
        """Rows that sample."""
        return sum(map(bool, self.flat_rows[_ROW_FIELDS - 1 :: _ROW_FIELDS]))

    @cached_property
    def rows(self) -> tuple[RecordedRow, ...]:
        """The requests of the step."""
        columns = [self.flat_rows[start::_ROW_FIELDS] for start in range(_ROW_FIELDS)]
        drafts = self.drafts or (0,) * len(columns[0])
        return tuple(
            RecordedRow(request, num_computed, num_new, bool(samples), num_drafts)
            for request, num_computed, num_new, samples, num_drafts in zip(*columns, drafts, strict=True)
        )


class UpdateCall(_Call, frozen=True, tag="update"):
    """`Scheduler.update` and what the step brought."""

    now: Number
    step_id: Count
    seconds: Number
    """From the start of the step, or the end of the one before if that was later, to its end."""
    counts: tuple[Count, ...] | None = None
    """Tokens of each row that samples, in their order; None: one each."""
    drafted: tuple[Count, ...] | None = None
    """Drafts that were verified for each row that samples; None: none were asked for."""
    available: tuple[Count, ...] | None = None
    """Drafts that the proposer had ready for the next step of each row that samples; None where it did not
    say."""
    undelivered: dict[Count, Count] = {}
    """Row that samples, counted from 0 -> tokens that it had beyond the end of its request; `counts` leaves
    them out."""
    finished: dict[Count, FinishReason] = {}
    """Requests that the step ended, failures aside."""
    failed: tuple[Count, ...] = ()
    faults: tuple[Count, ...] = ()
    """Of these, requests whose grammar could not be followed; their KV was sound."""
    guide_seconds: Number | None = None
    """That grammars took; None where no row had one."""
    row_guide_seconds: dict[Count, Number] = {}
    """Request -> what its row took of that."""
    block_hashes: dict[Count, tuple[Hash, ...]] = {}
    """Request -> hashes of blocks that its new tokens filled."""

    def __post_init__(self) -> None:
        if others := set(self.faults).difference(self.failed):
            raise ValueError(f"faults has request {min(others)}, which failed does not have")

    def misfit(self, step: ScheduleCall | None) -> str:
        """Return why it cannot be of a step, the oldest under way if one is; empty where it can."""
        if step is None:
            return f"step {self.step_id} comes back, but none is under way"
        num_rows = step.num_sampling
        for name in ("counts", "drafted", "available"):
            if (values := getattr(self, name)) is not None and len(values) != num_rows:
                return (
                    f"{name} has {counted(len(values), 'number')} for {counted(num_rows, 'row')} that sample"
                )
        beyond = [row for row in self.undelivered if row >= num_rows]
        return f"undelivered has row {beyond[0]} of {counted(num_rows, 'row')} that sample" if beyond else ""


class HandoverCall(_Call, frozen=True, tag="handover"):
    """A verb of `Handovers`, and what it answered."""

    now: Number
    verb: HandoverVerb
    id: str
    """Of the request; of the hand-over for `reserve` and `release`."""
    num_tokens: Count | None = None
    """That `reserve` was asked for; output tokens that had been fetched."""
    block_ids: tuple[Count, ...] | None = None
    """That `hold` and `reserve` answered; None where they had none."""
    is_out: bool | None = None
    """Whether a request has left the batch, for `left`, or joined it again, for `reattach`."""

    def __post_init__(self) -> None:
        if self.verb in ("reserve", "fetched") and self.num_tokens is None:
            raise ValueError(f"{self.verb} needs num_tokens")


Call = AddCall | AbortCall | ScheduleCall | UpdateCall | HandoverCall


class Trailer(_Call, frozen=True, tag="end"):
    """The last line of a file that was not cut short."""

    calls: Count
    """In the file."""
