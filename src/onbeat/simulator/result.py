"""What a simulation returns: the records of its requests, and what each replica did.

It also tells what became of requests, beside their latencies: those are infeasible whose objectives even an
idle replica would miss. Who watches a simulation hears of steps and requests before it returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

from onbeat.core.options import Dataclass
from onbeat.core.slo import SLO, Fate
from onbeat.core.step import BatchShape
from onbeat.core.step_stats import StepStats
from onbeat.core.step_time import StepTimeModel, predict_step
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import GroupSummary
from onbeat.perfmodel.shapes import Beyond, LargestStep, join_beyond, told_beyond
from onbeat.scheduler.replica.idle_check import num_late_at
from onbeat.scheduler.replica.request_state import LATE_TOKENS_IN
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.offered import JobRows


class IdleReplica:
    """A replica with nothing else to do, and nothing in its prefix cache.

    It runs a prompt in one step: in pieces, the context of each would be read again, so that is no faster. It
    then decodes alone, without drafts: these may all be rejected, and then are no help. What steps take is
    remembered.

    Parameters
    ----------
    step_time : of the replica, as it is before it learns.
    config : says what the host adds to every step, and what a request's first token waits for beside.
    """

    def __init__(self, step_time: StepTimeModel, config: SimulationConfig) -> None:
        self._step_time, self._config = step_time, config
        self._seconds: dict[tuple[int, int], float] = {}

    def __call__(self, record: RequestRecord) -> bool:
        """Return whether a request was infeasible; one without objectives is not."""
        if record.slo is None:
            return False
        offered, had = record.offered_output_tokens, record.num_output_tokens
        return self.is_infeasible(record.slo, record.num_prompt_tokens, had if offered is None else offered)

    def is_infeasible(self, slo: SLO, num_prompt_tokens: int, num_output_tokens: int = 2) -> bool:
        """Return whether the objectives are out of reach."""
        first = self._step(0, num_prompt_tokens) + self._config.request_overhead
        if slo.ttft is not None and first > slo.ttft:
            return True
        if num_output_tokens < 2:
            return slo.e2e is not None and first > slo.e2e
        num_more = num_output_tokens - 1
        decode = self._step(num_prompt_tokens, 1)  # the first one, which is the fastest
        if slo.tbt is not None:
            is_stream = self._config.scheduler.slo_mode == "stream"
            slack = slo.ttft - first if slo.ttft is not None and is_stream else 0.0
            if num_late_at(decode, slo.tbt, slack, num_more) * LATE_TOKENS_IN > num_output_tokens:
                return True
        return slo.e2e is not None and first + num_more * decode > slo.e2e

    def _step(self, num_computed_tokens: int, num_new_tokens: int) -> float:
        key = num_computed_tokens, num_new_tokens
        if key not in self._seconds:
            shape = BatchShape()
            shape.add(num_computed_tokens, num_new_tokens, samples=True)
            self._seconds[key] = predict_step(self._step_time, shape) + self._config.host_overhead
        return self._seconds[key]


def outcomes_of(
    own: GroupSummary,
    records: Sequence[RequestRecord],
    is_infeasible: Callable[[RequestRecord], bool],
    name: str | None = None,
) -> dict[str, float | None]:
    """Return what became of some requests of a run beside what their summary says, as a file has it.

    `relegated` ended as best effort. Of `hopeless` ones even an idle machine would miss the objectives; None
    where no request carries any. The error is |predicted - actual| / actual TTFT; None where nothing was
    predicted.

    Parameters
    ----------
    own : of the same requests.
    name : of the class of objectives that they are of; None is all.
    """
    records = [each for each in records if name in (None, each.request_class)]
    return {
        "relegated": sum(record.fate is Fate.RELEGATED for record in records),
        "hopeless": None if own.score.num_good is None else sum(map(is_infeasible, records)),
        "median_predicted_ttft_error": _median_prediction_error(records),
    }


def _median_prediction_error(records: Sequence[RequestRecord]) -> float | None:
    errors = [
        abs(record.predicted_ttft - record.ttft) / record.ttft
        for record in records
        if record.predicted_ttft is not None and record.ttft
    ]
    return median(errors) if errors else None


T = TypeVar("T", bound=Dataclass)


@dataclass(slots=True)
class DraftCounts:
    """What speculation did to decode rows."""

    num_rows: int = 0
    """Decode rows, with drafts or without."""
    num_verify_rows: int = 0
    """Of these, rows with drafts."""
    num_drafted: int = 0
    """Drafts verified."""
    num_accepted: int = 0
    """Of these, drafts that became output."""

    def add(self, num_drafted: int, num_tokens: int) -> None:
        """Count a row that gave so many tokens."""
        self.num_rows += 1
        self.num_verify_rows += num_drafted > 0
        self.num_drafted += num_drafted
        self.num_accepted += num_tokens - 1

    @property
    def tokens_per_row(self) -> float:
        """Mean output tokens of a decode row: 1 without drafts."""
        return 1 + self.num_accepted / self.num_rows if self.num_rows else 1.0


@dataclass(slots=True)
class StepsTogether(BatchShape):
    """What several steps did together: the sums that operations and memory traffic follow from."""

    sizes: Counter[int] = field(default_factory=Counter)
    """Steps by their new tokens, which say how many experts each reads."""


@dataclass(slots=True)
class ReplicaCounters:
    """What one replica did in a run."""

    num_steps: int = 0
    busy_seconds: float = 0.0
    """During which it had a step under way."""
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0
    """Of these, tokens found."""
    peak_used_blocks: int = 0
    """Most KV blocks in use at once."""
    num_blocks: int = 0
    num_leaked_blocks: int = 0
    """KV blocks still held when nothing ran any more; a complete run leaves none."""
    work: StepsTogether = field(default_factory=StepsTogether)
    bubble_seconds: float = 0.0
    """Idle time of pipeline stages while the replica was busy, summed over the stages."""
    drafts: DraftCounts | None = None
    """None where nothing is speculated."""
    beyond: Beyond = field(default_factory=dict)
    """Where steps left what their times were fitted to; see `LargestStep`."""

    def count(self, shape: BatchShape, num_steps: int, largest: LargestStep | None) -> None:
        """Count a step, or a run of them, in each of which every row reads a token more than in the last.

        Parameters
        ----------
        largest : looks at the last of them; None where nobody asks for the largest.
        """
        total, num_rows, first_context = self.work, shape.num_lm_head_rows, shape.decode_context_tokens
        if largest is not None:
            largest.see(shape, first_context + num_rows * (num_steps - 1))
        self.num_steps += num_steps
        total.sizes[shape.num_new_tokens] += num_steps
        total.num_decodes += shape.num_decodes * num_steps
        total.num_new_tokens += shape.num_new_tokens * num_steps
        total.num_lm_head_rows += num_rows * num_steps
        total.decode_context_tokens += num_steps * (2 * first_context + num_rows * (num_steps - 1)) // 2
        if shape.num_chunks:
            total.query_key_pairs += shape.query_key_pairs * num_steps
            total.chunk_cached_tokens += shape.chunk_cached_tokens * num_steps
        if shape.num_draft_tokens or shape.num_catch_up_tokens:  # in no run
            total.num_draft_tokens += shape.num_draft_tokens
            total.num_draft_passes += shape.num_draft_passes
            total.num_catch_up_tokens += shape.num_catch_up_tokens
            total.catch_up_pairs += shape.catch_up_pairs

    def joined(self, later: ReplicaCounters) -> ReplicaCounters:
        """Return the counts of two lives of a replica, or of two replicas, together."""
        summed = ("num_steps", "busy_seconds", "num_preemptions", "num_prefix_queries", "num_prefix_hits")
        both = ReplicaCounters(
            **{
                name: getattr(self, name) + getattr(later, name)
                for name in (*summed, "num_leaked_blocks", "bubble_seconds")
            },
            num_blocks=later.num_blocks,
            peak_used_blocks=max(self.peak_used_blocks, later.peak_used_blocks),
            work=_sum(self.work, later.work),
            drafts=self.drafts or later.drafts,
            beyond=join_beyond((self.beyond, later.beyond)),
        )
        if self.drafts is not None and later.drafts is not None:
            both.drafts = _sum(self.drafts, later.drafts)
        return both


def _sum(one: T, other: T) -> T:
    return type(one)(
        **{each.name: getattr(one, each.name) + getattr(other, each.name) for each in fields(one)}
    )


class FleetSize(NamedTuple):
    """How many replicas there are to be from some time on."""

    when: float
    """Virtual seconds."""
    num_replicas: int
    why: str
    """One word; nothing at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The outcome of a run. Virtual times are seconds from the start of the load."""

    records: list[RequestRecord]
    """Requests that ended, in the order of the load."""
    num_requests: int
    """Requests that were offered."""
    duration: float
    """Virtual seconds from the start to the end of the last request."""
    wall_seconds: float
    """What the run took."""
    is_complete: bool
    """False where the run was interrupted: the records are those of requests that had ended."""
    replicas: list[ReplicaCounters] = field(default_factory=list)
    decisions: Mapping[str, int] = field(default_factory=dict)
    """What a fleet decided how often: why requests were sent or refused, starts and stops. Empty without."""
    replica_seconds: float | None = None
    """For which the replicas of a fleet were held, their starts included; None without."""
    sizes: Sequence[FleetSize] = ()
    """Of a fleet that changes its own size."""
    jobs: JobRows | None = None
    """Whose calls the requests are; None of requests that come by themselves."""

    @property
    def num_completed(self) -> int:
        """Requests that got their whole answer."""
        return sum(record.is_completed for record in self.records)

    @property
    def num_rejected(self) -> int:
        """Requests refused at their arrival."""
        return sum(record.is_rejected for record in self.records)

    @property
    def total(self) -> ReplicaCounters:
        """What all replicas did together."""
        return reduce(ReplicaCounters.joined, self.replicas, ReplicaCounters())

    @property
    def beyond(self) -> str:
        """Warning that predicted times are extrapolated; empty where none are."""
        return told_beyond(self.total.beyond)


class SimulationObserver:
    """Hears of steps and requests in the order of virtual time; by itself it does nothing."""

    wants_steps = True
    """Whether it hears of steps. Each is planned by itself then, else runs of decode steps at once."""

    def on_request(self, record: RequestRecord, /) -> None:
        """Hear of a request that was sent to a replica; the record fills up while it runs."""

    def on_step(self, replica: int, stats: StepStats, /) -> None:
        """Hear of a step, after the deliveries it made and before the requests that it ended."""

    def on_finish(self, record: RequestRecord, /) -> None:
        """Hear that a request ended; its record is complete."""


class OnRequests(Protocol):
    """Hears how far a run is, at most ten times a second, and at its end."""

    def __call__(self, num_finished: int, num_requests: int, virtual_time: float, /) -> None: ...
