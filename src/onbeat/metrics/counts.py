"""Count what steps and requests do. `metrics.exporter` shows it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from onbeat.core.fleet import ReplicaId, replica_id
from onbeat.core.slo import SLOMode
from onbeat.core.step_stats import StepStats
from onbeat.metrics.declare import counter, gauge, histogram, part, shown
from onbeat.metrics.histogram import (
    ERROR_RATIOS,
    GAP_SECONDS,
    HOST_SECONDS,
    LAG_SECONDS,
    REQUEST_SECONDS,
    ROWS,
    SHARES,
    TOKENS,
    Histogram,
)
from onbeat.metrics.policy_counts import PolicyCounts, SpeculationCounts
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.slo_counts import UNNAMED, SLOCounts
from onbeat.metrics.tracker import REFUSALS, RunListener
from onbeat.output import num_dropped_lines

FINISHES = ("stop", "length", "abort", "error", "rejected", "expired")
FINISHES_OF_VLLM = FINISHES[:4]
"""It knows no refusals."""
BIAS_MEMORY = 64
"""Steps over which the bias of predictions forgets."""


@dataclass(slots=True)
class EngineCounts:
    """How one replica stood after its last step, and what it has done since the start of the server."""

    num_running: int = gauge("replica_running", "requests in its batch, as of its last step")
    num_waiting: int = gauge("replica_waiting", "requests in its queue, as of its last step")
    num_used_blocks: int = gauge("replica_kv_blocks_used", "KV blocks held by requests, likewise")
    num_kept_blocks: int = 0
    num_blocks: int = 0
    step_seconds: float = gauge("replica_step_seconds_last", "length of its last step")
    predicted_wait: float | None = gauge(
        "replica_predicted_wait_seconds", "until a prompt with a deadline would be begun", default=None
    )
    num_kept_states: int | None = gauge(
        "replica_states_kept",
        "states of models that keep one of each request: for prefix hits, and from other replicas",
        default=None,
    )
    is_drifting: bool | None = None
    num_steps: int = counter("replica_steps_total", "forward passes")
    num_prefix_queries: int = counter(
        "replica_prefix_cache_queries_total", "prompt tokens looked up in its prefix cache"
    )
    num_prefix_hits: int = counter("replica_prefix_cache_hits_total", "of these, tokens found")

    def on_step(self, stats: StepStats) -> None:
        """Take in a step."""
        self.num_running, self.num_waiting = stats.num_running, stats.num_waiting
        self.num_used_blocks, self.num_blocks = stats.num_used_blocks, stats.num_blocks
        self.num_kept_blocks, self.num_kept_states = stats.num_kept_blocks, stats.num_kept_states
        self.step_seconds = stats.end - stats.start
        self.predicted_wait = None if stats.scheduler is None else stats.scheduler.predicted_wait
        self.is_drifting = stats.is_drifting
        self.num_steps += 1
        self.num_prefix_queries += stats.num_prefix_queries
        self.num_prefix_hits += stats.num_prefix_hits

    def on_loss(self) -> None:
        """Forget what ended with the process."""
        self.num_running = self.num_waiting = self.num_blocks = 0
        self.num_used_blocks = self.num_kept_blocks = 0
        self.step_seconds, self.predicted_wait, self.is_drifting, self.num_kept_states = 0.0, None, None, None


GRAMMAR_REFUSALS = ("too_complex", "unsupported", "invalid", "in_answer")
"""Why requests under a grammar end without an answer: it takes too much; it cannot be enforced; it is none;
it could not be followed to the end."""
_CODES = {"grammar_too_complex": "too_complex", "unsupported_schema": "unsupported"}


@dataclass(slots=True)
class GrammarCounts:
    """Tokens that grammars were asked about, and what it took; what it took to compile, and refusals."""

    tokens: Counter[str] = counter(
        "guided_tokens_total",
        "tokens under a grammar, as sampled; a `refused` one is drawn again",
        "result",
        known=("accepted", "refused"),
    )
    seconds: float = counter("guide_seconds_total", "seconds that grammars took of steps, on the host")
    compile: Histogram = histogram("grammar_compile_seconds", "compiling a new grammar", LAG_SECONDS)
    refused: Counter[str] = counter(
        "grammar_refusals_total",
        "requests that ended for what their answer had to match",
        "reason",
        known=GRAMMAR_REFUSALS,
    )

    def refuse(self, code: str) -> None:
        """Count a request that is refused for its grammar, by the code of its error."""
        self.refused[_CODES.get(code, "invalid")] += 1

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        if stats.num_guided_tokens:
            self.tokens["accepted"] += stats.num_guided_tokens - stats.num_redrawn_tokens
            self.tokens["refused"] += stats.num_redrawn_tokens
        self.seconds += stats.guide_seconds
        self.refused["in_answer"] += stats.num_guide_faults
        for seconds in stats.compile_seconds:
            self.compile.observe(seconds)


@dataclass(slots=True)
class JobCounts:
    """Jobs, which are calls with one deadline, and how long they took."""

    num_open: int = gauge("jobs_open", "jobs of which calls may follow")
    ended: Counter[str] = counter(
        "jobs_total", "ended jobs: `kept`, `late`, `refused` or `abandoned`", "outcome"
    )
    seconds: dict[str, float] = counter(
        "job_seconds_total",
        "seconds of ended jobs in which a call was open, and in which none was",
        "part",
        known=("in_calls", "between"),
    )

    def end(self, how: str, in_calls: float, between: float) -> None:
        """Count a job that ended, with the seconds in its calls and between them."""
        self.ended[how] += 1
        self.seconds["in_calls"] += in_calls
        self.seconds["between"] += between


@dataclass(slots=True)
class ServerCounts:
    """What the server's process does, and what requests for answers ask for."""

    http: Counter[tuple[str, ...]] = counter(
        "http_requests_total",
        "HTTP requests that have ended; 499 is a client that left before its answer began",
        *("endpoint", "status"),
    )
    refused_connections: Counter[str] = counter(
        "http_connections_refused_total", "connections closed before a request was complete", "reason"
    )
    rate_limited: Counter[str] = counter(
        "rate_limited_total", "requests refused as their API key had reached a limit", "limit"
    )
    stream_errors: Counter[str] = counter(
        "stream_errors_total", "streams that began with 200 and ended with an error event", "code"
    )
    loop_lag: Histogram = histogram(
        "event_loop_lag_seconds", "how late the server's event loop is, looked at every 50 ms", LAG_SECONDS
    )
    keeper_lag: Histogram = histogram(
        "keeper_loop_lag_seconds", "the same of the keeper of several front ends", LAG_SECONDS
    )

    @shown("log_lines_dropped_total")
    def num_dropped_lines(self) -> int:
        """Lines of the server's own process that its output did not take."""
        return num_dropped_lines()

    def count_refused_connection(self, reason: str) -> None:
        """Count one connection that was closed before its request was complete."""
        self.refused_connections[reason] += 1

    def count_rate_limited(self, limit: str) -> None:
        """Count one request that was refused as its API key had reached a limit."""
        self.rate_limited[limit] += 1


@dataclass(slots=True)
class RunCounts(RunListener):
    """A `metrics.tracker.RunListener` that counts.

    Parameters
    ----------
    slo_mode : what keeping a TBT objective means (see `attainment`).

    Attributes
    ----------
    slo : requests with objectives, by class.
    policy : what a policy with deadlines plans and decides.
    speculation : drafts planned, verified and accepted.
    grammars : tokens asked about.
    jobs : chains of calls.
    engines : by replica, those that have taken a step.
    num_open : requests with which the engine has not done.
    """

    slo_mode: SLOMode = "stream"
    slo: SLOCounts = part(SLOCounts)
    policy: PolicyCounts = part(PolicyCounts)
    grammars: GrammarCounts = part(GrammarCounts)
    jobs: JobCounts = part(JobCounts)
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    engines: dict[ReplicaId, EngineCounts] = field(default_factory=dict)
    num_open: int = 0
    num_prompt_tokens: int = counter("prompt_tokens_total", "prompt tokens of requests that were prefilled")
    num_cached_tokens: int = counter(
        "prompt_tokens_cached_total", "of these, tokens that the prefix cache held"
    )
    num_output_tokens: int = counter(
        "output_tokens_total", "tokens of answers, as `usage` counts them: none behind a stop string"
    )
    embeddings: Counter[str] = counter("embeddings_total", "texts embedded", "class")
    embedding_tokens: Counter[str] = counter("embedding_tokens_total", "tokens of these texts", "class")
    num_steps: int = counter("steps_total", "forward passes")
    num_preemptions: int = counter("preemptions_total", "requests put back in the queue for want of blocks")
    num_prefix_queries: int = counter(
        "prefix_cache_queries_total", "prompt tokens looked up in the prefix cache, at first admission"
    )
    num_prefix_hits: int = counter("prefix_cache_hits_total", "of these, tokens found")
    finished: Counter[str] = counter(
        "requests_total",
        "ended requests, by the reason that their answers give",
        "finish_reason",
        known=FINISHES,
    )
    refused: Counter[str] = counter(
        "requests_rejected_total",
        "requests refused at arrival or ended in the queue, by reason",
        "reason",
        known=REFUSALS,
    )
    ttft: Histogram = histogram("time_to_first_token_seconds", "TTFT", REQUEST_SECONDS)
    gap: Histogram = histogram("time_between_tokens_seconds", "TBT", GAP_SECONDS)
    tpot: Histogram = histogram("time_per_output_token_seconds", "TPOT", GAP_SECONDS)
    e2e: Histogram = histogram("request_e2e_seconds", "E2E of whole answers", REQUEST_SECONDS)
    queue: Histogram = histogram("request_queue_seconds", "queue time", REQUEST_SECONDS)
    prefill: Histogram = histogram("request_prefill_seconds", "prefill time", REQUEST_SECONDS)
    decode: Histogram = histogram("request_decode_seconds", "decode time", REQUEST_SECONDS)
    prompt_lengths: Histogram = histogram("request_prompt_tokens", "prompt length of whole answers", TOKENS)
    output_lengths: Histogram = histogram("request_output_tokens", "output length of whole answers", TOKENS)
    first_token_lag: Histogram = histogram(
        "first_token_lag_seconds", "from the end of a step to a first token's hand-over", LAG_SECONDS
    )
    step: Histogram = histogram("step_seconds", "length of a step", GAP_SECONDS)
    step_rows: Histogram = histogram("step_rows", "requests in a step", ROWS)
    step_decodes: Histogram = histogram("step_decodes", "decode rows of a step", ROWS)
    step_chunk_tokens: Histogram = histogram("step_chunk_tokens", "prompt tokens of a step", TOKENS)
    predicted_step: Histogram = histogram(
        "step_predicted_seconds", "what the step-time model expected of a step when planned", GAP_SECONDS
    )
    prediction_error: Histogram = histogram(
        "step_prediction_error_ratio", "|predicted - actual| / actual of a step", ERROR_RATIOS
    )
    mbu: Histogram = histogram("step_mbu", "memory bandwidth utilisation (MBU) of a step", SHARES)
    mfu: Histogram = histogram("step_mfu", "model FLOP utilisation (MFU) of a step", SHARES)
    last_mbu: float | None = gauge("step_mbu_ratio", "MBU of the last step", default=None)
    last_mfu: float | None = gauge("step_mfu_ratio", "MFU of the last step", default=None)
    schedule: Histogram = histogram("planner_seconds", "planning one step, on the host", HOST_SECONDS)
    update: Histogram = histogram(
        "update_seconds", "taking in the results of one step, on the host", HOST_SECONDS
    )
    _log_bias: float = 0.0
    _num_predicted: int = 0

    def __post_init__(self) -> None:
        self.slo = SLOCounts(self.slo_mode)

    @shown("step_prediction_bias_ratio")
    def prediction_bias(self) -> float | None:
        """Typical (geometric mean) actual / predicted of the last 64 steps or so; 1 is right."""
        return math.exp(self._log_bias) if self._num_predicted else None

    @shown("requests_running")
    def num_running(self) -> int:
        """Requests in the batch as of the last step, less those that have left since."""
        return min(sum(each.num_running for each in self.engines.values()), self.num_open)

    @shown("kv_blocks")
    def num_blocks(self) -> int:
        """KV blocks in all."""
        return sum(each.num_blocks for each in self.engines.values())

    @shown("step_prediction_drift")
    def is_drifting(self) -> int | None:
        """1 while steps have left the model as it was before it corrected itself, else 0."""
        known = [each.is_drifting for each in self.engines.values() if each.is_drifting is not None]
        return int(any(known)) if known else None

    @shown("requests_best_effort")
    def num_best_effort(self) -> int:
        """Open requests served from what is left over."""
        state = self.policy.state
        return 0 if state is None else min(state.num_best_effort, self.num_open)

    @shown("predicted_wait_seconds")
    def predicted_wait(self) -> float | None:
        """Until a prompt that came now would be begun; 0 when no request is open."""
        state = self.policy.state
        return None if state is None else state.predicted_wait if self.num_open else 0.0

    @shown("predicted_queue_seconds")
    def queue_seconds(self) -> float | None:
        """The same of a prompt that could not be in time, or has no objective."""
        state = self.policy.state
        return None if state is None else state.queue_seconds if self.num_open else 0.0

    @shown("requests_waiting")
    def num_waiting(self) -> int:
        """Requests that the engine has yet to finish and that are not in the batch."""
        return self.num_open - self.num_running

    @shown("kv_blocks_used")
    def num_used_blocks(self) -> int:
        """KV blocks held by requests as of the last step; 0 when none is open."""
        return sum(each.num_used_blocks for each in self.engines.values()) if self.num_open else 0

    @shown("kv_blocks_kept")
    def num_kept_blocks(self) -> int:
        """KV blocks kept for calls to come of open jobs."""
        return sum(each.num_kept_blocks for each in self.engines.values()) if self.jobs.num_open else 0

    @shown("vllm:kv_cache_usage_perc")
    def kv_usage(self) -> float:
        """Share of the KV blocks that is held; 1 is full."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @shown("vllm:request_success_total", "finished_reason")
    def finished_for_vllm(self) -> Mapping[str, int]:
        """Ended requests."""
        return {reason: self.finished[reason] for reason in FINISHES_OF_VLLM}

    def keep_engines(self, replicas: Collection[ReplicaId]) -> None:
        """Forget how the replicas stood that do not serve any more.

        Parameters
        ----------
        replicas : those that do.
        """
        for replica, engine in self.engines.items():
            if replica not in replicas:
                engine.on_loss()
                self.policy.forget(replica)

    def on_request(self, record: RequestRecord) -> None:
        """Count an open request; the rest waits until it has run."""
        self.num_open += 1
        self.slo.on_request(record)

    def on_refusal(self, _record: RequestRecord, reason: str) -> None:
        """Count a refusal."""
        self.refused[reason] += 1

    def on_delivery(self, record: RequestRecord) -> None:
        """Count tokens, and the time since the delivery before or since the arrival."""
        self.slo.on_delivery(record)
        self.num_output_tokens += record.delivery_sizes[-1]
        times = record.delivery_times
        if len(times) > 1:
            self.gap.observe(times[-1] - times[-2])
            return
        first = times[0]
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.ttft.observe(first - record.arrival)
        if record.engine_ttft is not None:
            self.first_token_lag.observe(first - record.arrival - record.engine_ttft)
        if record.scheduled is not None:
            self.queue.observe(record.scheduled - record.arrival)
            self.prefill.observe(first - record.scheduled)

    def on_leave(self, _record: RequestRecord) -> None:
        """Count one less that runs or waits."""
        self.num_open -= 1

    def on_finish(self, record: RequestRecord) -> None:
        """Count a request; only a whole answer has latencies."""
        self.finished[record.finish_reason or "error"] += 1
        self.slo.on_finish(record)
        if not record.is_completed or not record.delivery_times:
            return
        self.e2e.observe(record.e2e)
        self.prompt_lengths.observe(record.num_prompt_tokens)
        if record.is_embedding:
            self.embeddings[record.request_class or UNNAMED] += 1
            self.embedding_tokens[record.request_class or UNNAMED] += record.num_prompt_tokens
        else:
            self.output_lengths.observe(record.num_output_tokens)
            self.decode.observe(record.delivery_times[-1] - record.delivery_times[0])
        if record.tpot is not None:
            self.tpot.observe(record.tpot)

    def on_step(self, stats: StepStats, replica: int = 0) -> None:
        """Count a step of a replica."""
        name = replica_id(replica)
        engine = self.engines.get(name)
        if engine is None:
            engine = self.engines[name] = EngineCounts()
        engine.on_step(stats)
        self.policy.on_step(stats, name)
        self.grammars.on_step(stats)
        self.slo.judge()
        shape = stats.shape
        self.num_steps += 1
        self.num_preemptions += stats.num_preemptions
        self.num_prefix_queries += stats.num_prefix_queries
        self.num_prefix_hits += stats.num_prefix_hits
        seconds = stats.end - stats.start
        self.step.observe(seconds)
        if stats.drafts is not None:
            self.speculation.on_step(stats.drafts)
        if stats.predicted_seconds is not None and seconds > 0:
            self._count_prediction(stats.predicted_seconds, seconds)
        if stats.mbu is not None and stats.mfu is not None:
            self.last_mbu, self.last_mfu = stats.mbu, stats.mfu
            self.mbu.observe(stats.mbu)
            self.mfu.observe(stats.mfu)
        self.step_decodes.observe(shape.num_decodes)
        self.step_chunk_tokens.observe(shape.num_chunk_tokens)
        self.step_rows.observe(shape.num_sequences)
        self.schedule.observe(stats.schedule_seconds)
        self.update.observe(stats.update_seconds)

    def _count_prediction(self, predicted: float, actual: float) -> None:
        self._num_predicted += 1
        self.predicted_step.observe(predicted)
        self.prediction_error.observe(abs(predicted - actual) / actual)
        # The plain mean until there are enough steps to forget the first.
        memory = min(self._num_predicted, BIAS_MEMORY)
        self._log_bias += (math.log(actual / predicted) - self._log_bias) / memory
