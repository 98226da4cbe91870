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

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from onbeat.core.handover import StreamDeadlines
from onbeat.core.request import UNKNOWN_GRAMMAR, Pooling, WholeRequest
from onbeat.core.slo import ShedMode

DEADLINES = tuple(each.name for each in fields(StreamDeadlines))
"""Of `RecordedAdoption.deadlines`, in the order in which a file has them."""
FILE_KIND = "onbeat-record"
SCHEMA_VERSION = 13
READABLE_VERSIONS = tuple(range(1, SCHEMA_VERSION + 1))
TRAILER = "end"

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
    max_in_flight_steps: int = 1
    """1: a step is planned once the one before is back; 2: while it runs."""
    step_time: Mapping[str, Any] | None = None
    """The step-time model that the scheduler told its steps to; None without one."""


class RecordedRefusal(NamedTuple):
    """Why `Scheduler.add` did not take a request."""

    code: str
    """Of the exception: `server_overloaded`, `slo_unattainable`."""
    predicted_ttft: float | None = None
    """Seconds, as is the next; None where too many waited."""
    retry_after: float | None = None
    """None where a number of requests or tokens was reached, or not even an idle replica would be in time."""


class RecordedAdoption(NamedTuple):
    """What `Handovers.adopt` was told of a request beside what `add` is told."""

    handover_id: str
    scheduled_time: float
    num_cached_tokens: int
    num_preemptions: int
    deadlines: StreamDeadlines | None = None


@dataclass(frozen=True, slots=True)
class AddCall:
    """`Scheduler.add` of a request that it took, or refused for want of capacity; or `Handovers.adopt`."""

    now: float
    """What the scheduler was given."""
    request: int
    request_id: str
    arrival: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    block_hashes: tuple[bytes, ...] = ()
    """Hashes of the full blocks of the prompt, and of the output tokens that it is resumed with; empty where
    the prefix cache is off."""
    slo: tuple[float | None, float | None, float | None] | None = None
    """TTFT, TBT and E2E objective, seconds."""
    slo_class: str | None = None
    weight: float = 1.0
    tenant: str | None = None
    shed: ShedMode = ShedMode.OFF
    whole: WholeRequest | None = None
    refused: RecordedRefusal | None = None
    num_resumed_tokens: int = 0
    """Output tokens that its client had already."""
    first_token_time: float | None = None
    """When the first of them was delivered, seconds."""
    num_external_tokens: int = 0
    """Leading tokens whose KV came from another replica."""
    adoption: RecordedAdoption | None = None
    """None of a request that was added."""
    is_scored: bool = False
    """Whether log-probabilities of its prompt were asked for."""
    pooling: Pooling | None = None
    """How its prompt became its embedding; None where it has output tokens."""
    is_guided: bool = False
    """Whether its answer had to match a grammar."""
    guide_seconds: float = UNKNOWN_GRAMMAR.seconds
    """What a token of that grammar took in a trial."""
    kept_for: float = 0.0
    """Seconds for which its KV was to be kept behind its end."""


@dataclass(frozen=True, slots=True)
class AbortCall:
    """`Scheduler.abort` of requests that had not ended."""

    now: float
    requests: tuple[int, ...]


class RecordedRow(NamedTuple):
    """A `ScheduledRequest` without its blocks."""

    request: int
    num_computed_tokens: int
    num_new_tokens: int
    samples: bool
    num_draft_tokens: int = 0


class RecordedAdmission(NamedTuple):
    """An `AdmittedRequest` without its tokens."""

    request: int
    num_output_tokens: int
    """Generated before a preemption."""
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduleCall:
    """`Scheduler.schedule` and what it planned."""

    now: float
    step_id: int | None = None
    """None where nothing could be planned."""
    rows: tuple[RecordedRow, ...] = ()
    new_block_ids: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Index of a row -> blocks that it appends; rows without any are left out."""
    admitted: tuple[RecordedAdmission, ...] = ()
    released: tuple[int | str, ...] = ()
    """Numbers; an id where the writer no longer knew the number."""
    predicted_seconds: float | None = None
    """What the scheduler's step-time model expected of the step, right after it was planned."""
    expired: tuple[int, ...] = ()
    """Requests that it gave up, since their TTFT deadline had passed."""


@dataclass(frozen=True, slots=True)
class UpdateCall:
    """`Scheduler.update` and what the step brought."""

    now: float
    step_id: int
    seconds: float
    """From the start of the step, or the end of the one before if that was later, to its end."""
    counts: tuple[int, ...] | None = None
    """Tokens of each row that samples, in their order; None: one each."""
    drafted: tuple[int, ...] | None = None
    """Drafts that were verified for each row that samples; None: none were asked for."""
    available: tuple[int, ...] | None = None
    """Drafts that the proposer had ready for the next step of each row that samples; None where it did not
    say."""
    undelivered: Mapping[int, int] = field(default_factory=dict)
    """Row that samples, counted from 0 -> tokens that it had beyond the end of its request; `counts` leaves
    them out."""
    finished: Mapping[int, str] = field(default_factory=dict)
    """Request -> `FinishReason`; requests that the step ended, failures aside."""
    failed: tuple[int, ...] = ()
    faults: tuple[int, ...] = ()
    """Of these, requests whose grammar could not be followed; their KV was sound."""
    guide_seconds: float | None = None
    """That grammars took; None where no row had one."""
    row_guide_seconds: Mapping[int, float] = field(default_factory=dict)
    """Request -> what its row took of that."""
    block_hashes: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Request -> hashes of blocks that its new tokens filled."""


@dataclass(frozen=True, slots=True)
class HandoverCall:
    """A verb of `Handovers`, and what it answered."""

    now: float
    verb: HandoverVerb
    id: str
    """Of the request; of the hand-over for `reserve` and `release`."""
    num_tokens: int | None = None
    """That `reserve` was asked for; output tokens that had been fetched."""
    block_ids: tuple[int, ...] | None = None
    """That `hold` and `reserve` answered; None where they had none."""
    is_out: bool | None = None
    """Whether a request has left the batch, for `left`, or joined it again, for `reattach`."""


Call = AddCall | AbortCall | ScheduleCall | UpdateCall | HandoverCall
