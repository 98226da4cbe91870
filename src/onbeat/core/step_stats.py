"""What metrics, records and the timeline are told of a step; neither planning nor running one reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from onbeat.core.step import BatchShape


@dataclass(slots=True)
class DraftStats:
    """What speculation did in one step."""

    lengths: list[int]
    """Decode rows by the number of drafts that were planned: index k counts rows with k of them."""
    drafted_at: list[int]
    """Index j counts the drafts verified at position j of their row, the first at 0."""
    accepted_at: list[int]
    """Likewise, those accepted."""
    num_tokens: int
    """Output tokens that the step's decode rows delivered."""
    expected_tokens: float
    """What they were expected to deliver when the step was planned."""


@dataclass(slots=True)
class StepStats:
    """What one step did, for metrics and the timeline. Times are seconds of the monotonic clock."""

    step_id: int
    start: float
    end: float
    shape: BatchShape
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_preemptions: int
    """In this step."""
    num_prefix_queries: int
    """Prompt tokens looked up in the prefix cache in this step."""
    num_prefix_hits: int
    """Of these, tokens found."""
    schedule_seconds: float = 0.0
    update_seconds: float = 0.0
    chunk_request_ids: list[str] = field(default_factory=list)
    """Requests whose prompt had a chunk in this step."""
    predicted_seconds: float | None = None
    """What the step-time model expected of this step (`end - start`); None without a model."""
    mbu: float | None = None
    """Weight and KV bytes read / (step time x peak bandwidth); None where the peak is not known."""
    mfu: float | None = None
    """Floating-point operations / (step time x peak rate); None where the peak is not known."""
    is_drifting: bool | None = None
    """Whether recent steps have left the model as it was before it learnt; None: nobody watches."""
    num_kept_blocks: int = 0
    """Blocks of KV that is kept for calls to come of open jobs; none of these is used."""
    num_kept_states: int | None = None
    """States beside those of the batch: for prefix hits, and from elsewhere. None: the model keeps none."""
    budget_seconds: float | None = None
    """Time that the policy allowed the step; None where it plans by tokens, or nothing bound it."""
    budget_request_id: str | None = None
    """The request whose deadline set the budget."""
    scheduler: SchedulerState | None = None
    """Queues and objectives after the step; None where the policy keeps no deadlines."""
    drafts: DraftStats | None = None
    """None where nothing is speculated, or the step had no decode row."""
    num_guided_tokens: int = 0
    """Tokens that grammars were asked about."""
    num_redrawn_tokens: int = 0
    """Of these, refused, and drawn again."""
    guide_seconds: float = 0.0
    """That grammars took on the host."""
    num_guide_faults: int = 0
    """Requests that ended because their grammar could not be followed any further."""
    compile_seconds: list[float] = field(default_factory=list)
    """What each grammar took that was compiled since the step before."""


@dataclass(slots=True)
class SchedulerState:
    """How a policy with deadlines stands: gauges, and counts since the start."""

    num_best_effort: int = 0
    """Requests, waiting or running, that are served as best effort: relegated, or without objectives."""
    num_relegated: int = 0
    """Requests relegated so far, at their arrival or later."""
    num_missed: int = 0
    """Running requests so far whose stream could no longer keep its objective."""
    num_rejected: dict[str, int] = field(default_factory=dict)
    """Reason (`slo_unattainable`, `deadline_exceeded`, `queue_too_long`) -> requests so far."""
    predicted_wait: float = 0.0
    """Seconds until a prompt that arrived now would be begun."""
    decode_slacks: list[float] = field(default_factory=list)
    """Seconds from when the next step may start to the next deadline of each running stream that has one."""
    queue_seconds: float = 0.0
    """Predicted seconds until a request that came now, of best effort, would be begun."""
