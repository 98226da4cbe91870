"""Count what steps and requests do. Plain numbers; `metrics.exporter` gives them names for Prometheus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from onbeat.core.fleet import ReplicaId, replica_id
from onbeat.core.slo import SLOMode
from onbeat.core.step import StepStats
from onbeat.metrics.buckets import (
    ERROR_RATIOS,
    GAP_SECONDS,
    HOST_SECONDS,
    LAG_SECONDS,
    REQUEST_SECONDS,
    ROWS,
    SHARES,
    TOKENS,
)
from onbeat.metrics.histogram import Histogram
from onbeat.metrics.policy_counts import PolicyCounts
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.slo_counts import UNNAMED, SLOCounts
from onbeat.metrics.speculation_counts import SpeculationCounts
from onbeat.metrics.tracker import REFUSALS

FINISHES = ("stop", "length", "abort", "error", "rejected", "expired")
BIAS_MEMORY = 64
"""Steps over which the bias of predictions forgets."""


@dataclass(slots=True)
class EngineGauges:
    """How one replica stood after its last step, and what it has done since the start of the server."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_kept_blocks: int = 0
    num_blocks: int = 0
    step_seconds: float = 0.0
    predicted_wait: float | None = None
    """Seconds; None where its policy predicts none."""
    is_drifting: bool | None = None
    num_steps: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0

    def on_step(self, stats: StepStats) -> None:
        """Take in a step."""
        self.num_running, self.num_waiting = stats.num_running, stats.num_waiting
        self.num_used_blocks, self.num_blocks = stats.num_used_blocks, stats.num_blocks
        self.num_kept_blocks = stats.num_kept_blocks
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
        self.step_seconds, self.predicted_wait, self.is_drifting = 0.0, None, None


GRAMMAR_REFUSALS = ("too_complex", "unsupported", "invalid", "in_answer")
"""Why requests under a grammar end without an answer: it takes too much; it cannot be enforced; it is none;
it could not be followed to the end."""
_CODES = {"grammar_too_complex": "too_complex", "unsupported_schema": "unsupported"}


@dataclass(slots=True)
class GrammarCounts:
    """Tokens that grammars were asked about, and what it took; what it took to compile, and refusals."""

    num_tokens: int = 0
    num_redrawn: int = 0
    """Of these, refused, and drawn again."""
    seconds: float = 0.0
    compile: Histogram = field(default_factory=lambda: Histogram(LAG_SECONDS))
    """Seconds of new grammars."""
    refused: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(GRAMMAR_REFUSALS, 0)))

    def refuse(self, code: str | None) -> None:
        """Count a request that is refused for its grammar, by the code of its error."""
        self.refused[_CODES.get(code or "", "invalid")] += 1

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        self.num_tokens += stats.num_guided_tokens
        self.num_redrawn += stats.num_redrawn_tokens
        self.seconds += stats.guide_seconds
        self.refused["in_answer"] += stats.num_guide_faults
        for seconds in stats.compile_seconds:
            self.compile.observe(seconds)


@dataclass(slots=True)
class JobCounts:
    """Jobs, which are calls with one deadline, and how long they took."""

    num_open: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """By how they ended: `kept`, `late`, `refused`, `abandoned`."""
    in_calls: float = 0.0
    """Seconds of ended jobs in which calls were open."""
    between: float = 0.0
    """Seconds of ended jobs between their calls."""

    def end(self, how: str, in_calls: float, between: float) -> None:
        """Count a job that ended."""
        self.ended[how] += 1
        self.in_calls += in_calls
        self.between += between


class AskedCounts:
    """What requests for answers ask for."""

    def __init__(self) -> None:
        self.num_choices = Histogram(ROWS)
        """Of each prompt."""
        self.max_tokens = Histogram(TOKENS)
        """Of each choice."""

    def observe(self, num_choices: int, max_tokens: Sequence[int]) -> None:
        """Count one request.

        Parameters
        ----------
        num_choices : of each of its prompts.
        max_tokens : of each choice, of all prompts.
        """
        for _ in range(len(max_tokens) // num_choices):
            self.num_choices.observe(num_choices)
        for number in max_tokens:
            self.max_tokens.observe(number)


class RunCounts:
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
    """

    def __init__(self, slo_mode: SLOMode = "stream") -> None:
        self.slo = SLOCounts(slo_mode)
        self.policy = PolicyCounts()
        self.speculation = SpeculationCounts()
        self.grammars = GrammarCounts()
        self.jobs = JobCounts()
        self.num_open = 0
        """Requests with which the engine has not done."""
        self.engines: dict[ReplicaId, EngineGauges] = {}
        """By replica, those that have taken a step."""
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.embeddings: Counter[str] = Counter()
        """By class of objectives; so are the next."""
        self.embedding_tokens: Counter[str] = Counter()
        """Of their texts."""
        self.finished = Counter(dict.fromkeys(FINISHES, 0))
        """Requests by finish reason."""
        self.refused = Counter(dict.fromkeys(REFUSALS, 0))
        """Requests by the reason for which they were refused, or ended in the queue."""
        self.ttft = Histogram(REQUEST_SECONDS)
        self.first_token_lag = Histogram(LAG_SECONDS)
        self.gap = Histogram(GAP_SECONDS)
        self.tpot = Histogram(GAP_SECONDS)
        self.e2e = Histogram(REQUEST_SECONDS)
        self.queue = Histogram(REQUEST_SECONDS)
        self.prefill = Histogram(REQUEST_SECONDS)
        self.decode = Histogram(REQUEST_SECONDS)
        self.inference = Histogram(REQUEST_SECONDS)
        self.prompt_lengths = Histogram(TOKENS)
        self.output_lengths = Histogram(TOKENS)
        self.request_preemptions = Histogram(ROWS)
        self.step = Histogram(GAP_SECONDS)
        self.step_tokens = Histogram(TOKENS)
        """Prompt tokens that a step read, and output tokens that it made."""
        self.step_decodes = Histogram(ROWS)
        self.step_chunk_tokens = Histogram(TOKENS)
        self.step_rows = Histogram(ROWS)
        self.predicted_step = Histogram(GAP_SECONDS)
        self.prediction_error = Histogram(ERROR_RATIOS)
        """|predicted - actual| / actual."""
        self.mbu = Histogram(SHARES)
        self.mfu = Histogram(SHARES)
        self.last_mbu: float | None = None
        self.last_mfu: float | None = None
        self._log_bias = 0.0
        self._num_predicted = 0
        self.schedule = Histogram(HOST_SECONDS)
        self.update = Histogram(HOST_SECONDS)

    @property
    def prediction_bias(self) -> float | None:
        """Typical actual / predicted time of recent steps; None where no step was predicted."""
        return math.exp(self._log_bias) if self._num_predicted else None

    @property
    def num_running(self) -> int:
        """Requests in the batch: as of the last step, less those that have left since."""
        return min(sum(each.num_running for each in self.engines.values()), self.num_open)

    @property
    def num_blocks(self) -> int:
        """KV blocks of all replicas."""
        return sum(each.num_blocks for each in self.engines.values())

    @property
    def is_drifting(self) -> bool | None:
        """Whether the steps of any replica have left its step-time model; None where nothing watches."""
        known = [each.is_drifting for each in self.engines.values() if each.is_drifting is not None]
        return any(known) if known else None

    @property
    def num_best_effort(self) -> int:
        """Open requests served as best effort: as of the last step, less those that have left since."""
        state = self.policy.state
        return 0 if state is None else min(state.num_best_effort, self.num_open)

    @property
    def num_waiting(self) -> int:
        """Open requests that are not in the batch."""
        return self.num_open - self.num_running

    @property
    def num_used_blocks(self) -> int:
        """Blocks held as of the last step; none once no request is open."""
        return sum(each.num_used_blocks for each in self.engines.values()) if self.num_open else 0

    @property
    def num_kept_blocks(self) -> int:
        """Blocks kept for calls to come of open jobs, as of the last step."""
        return sum(each.num_kept_blocks for each in self.engines.values()) if self.jobs.num_open else 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that is held, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

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

    def on_preemption(self, _record: RequestRecord, _now: float) -> None:
        """Preemptions are counted by step, those of unknown requests included."""

    def on_relegation(self, _record: RequestRecord, _now: float) -> None:
        """Relegations are counted by the policy."""

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
        self.request_preemptions.observe(record.num_preemptions)
        if record.is_embedding:
            self.embeddings[record.request_class or UNNAMED] += 1
            self.embedding_tokens[record.request_class or UNNAMED] += record.num_prompt_tokens
        else:
            self.output_lengths.observe(record.num_output_tokens)
            self.decode.observe(record.delivery_times[-1] - record.delivery_times[0])
        if record.tpot is not None:
            self.tpot.observe(record.tpot)
        if record.scheduled is not None:
            self.inference.observe(record.delivery_times[-1] - record.scheduled)

    def on_step(self, stats: StepStats, replica: int = 0) -> None:
        """Count a step of a replica."""
        name = replica_id(replica)
        engine = self.engines.get(name)
        if engine is None:
            engine = self.engines[name] = EngineGauges()
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
            self.speculation.on_step(stats.drafts, seconds, stats.predicted_seconds)
        if stats.predicted_seconds is not None and seconds > 0:
            self._count_prediction(stats.predicted_seconds, seconds)
        if stats.mbu is not None and stats.mfu is not None:
            self.last_mbu, self.last_mfu = stats.mbu, stats.mfu
            self.mbu.observe(stats.mbu)
            self.mfu.observe(stats.mfu)
        # rows that sample, a prompt's last chunk too; one whose tokens all have logits still gives one
        num_outputs = min(shape.num_lm_head_rows - shape.num_draft_tokens, shape.num_sequences)
        if stats.drafts is not None:
            num_outputs += sum(stats.drafts.accepted_at)
        self.step_tokens.observe(shape.num_chunk_tokens + num_outputs)
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
