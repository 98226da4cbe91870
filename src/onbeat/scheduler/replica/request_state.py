"""What the scheduler remembers of one request: tokens, blocks, and where it stands with its objectives.

The deadlines of its tokens, the pace of its answer, and when its objective is lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from math import ceil, inf

from onbeat.core.handover import StreamDeadlines
from onbeat.core.hashing import BlockHash
from onbeat.core.request import FinishReason, Request, RequestOutput, TokenLogprobs
from onbeat.core.slo import ShedMode, SLOMode

NEVER = 1 << 62
"""More tokens than any request has."""
TOLERANCE = 1e-9
"""Seconds; as the metrics allow, lest rounding makes a token late."""
LATE_TOKENS_IN = 100
"""One token, or gap, in so many may be late."""
USUAL_OUTPUT_TOKENS = 256
"""Output tokens to spread an e2e objective over where a request allows more and nobody knows of answers."""
_ANSWER_SHARE = 2 / 3
"""Of an e2e objective, what the tokens of a usual answer may take; the remainder is for the prompt."""
BEST_EFFORT_RANK = 1e15
"""Queue rank of requests without a TTFT deadline: behind all that have one, by arrival."""


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    """Not in the batch: new, or preempted."""
    RUNNING = auto()
    ASIDE = auto()
    """Neither in the queue nor in the batch: it was preempted while it was paused."""
    PADDING = auto()
    """Finished, but its row and blocks are held until its batch ends (static batching)."""
    DETACHED = auto()
    """Out of the batch with its KV, on its way to another replica."""
    FINISHED = auto()


@dataclass(slots=True)
class DraftState:
    """What drafting remembers of one request, as `RequestState.draft`."""

    num_drafted: int = 0
    """Drafts verified so far."""
    num_accepted: int = 0
    """Of these, tokens that became output."""
    num_ready: int | None = None
    """Drafts that the proposer has for its next step; None where it makes any number or none are known."""
    num_read: int = 0
    """Its tokens that a model which makes drafts has read once all planned steps have run."""
    read_life: int = 0
    """How often it had been preempted when they were counted: a preemption makes that model forget it."""

    def forget(self) -> None:
        """Note that the model runner has let the request go, and whoever makes its drafts."""
        self.num_ready, self.num_read = None, 0

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of a delivery."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


class RequestState:
    """Progress of one request.

    There is no prefill or decode phase: a request has `num_tokens` and `num_computed_tokens`, and each step
    lets the second catch up with the first.

    Each field has one writer. Tokens and what is computed of them: the verbs below. Blocks and their hashes:
    `KVCacheManager`. The status and the place in queue and batch: `RequestTable`. Deadlines: `SLOState`
    (`slo`). Drafts: `DraftState` (`draft`).
    """

    __slots__ = (
        *("admitted_step_id", "block_hashes", "block_ids", "draft", "guide_seconds", "is_guided"),
        *("is_in_flight", "kept_until", "last_step_id", "max_total_tokens", "num_allocated_tokens"),
        *("num_cached_tokens", "num_computed_tokens", "num_hit_tokens", "num_in_flight_drafts"),
        *("num_in_flight_tokens", "num_passed_blocks", "num_preemptions", "num_prompt_tokens"),
        *("num_registered_blocks", "num_shared_blocks", "num_tokens", "num_tokens_to_register"),
        *("output_token_ids", "page_ids", "pause_at", "places_to_keep", "queued_work", "request"),
        *("request_id", "scheduled_time", "scores_prompt", "sits_out", "slo", "sort_key", "status"),
        *("stop_token_ids", "times", "looks_up", "plain_until"),
    )

    def __init__(
        self, request: Request, *, sort_key: tuple[float, ...], max_model_len: int, slo: SLOState
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.sort_key = sort_key
        self.status = RequestStatus.WAITING
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.output_token_ids: list[int] = list(request.resumed_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)
        """Known tokens: prompt and delivered output."""
        self.scores_prompt = request.num_prompt_logprobs is not None and not self.output_token_ids
        """Whether log-probabilities of its prompt are to be reported, and were not yet, here or elsewhere."""
        # A mean needs the hidden states of all tokens, and `cls` that of the first.
        self.looks_up = not self.scores_prompt and request.pooling not in ("mean", "cls")
        """Whether a cached prefix of it may be used."""
        self.pause_at = NEVER
        """Tokens, those in flight included, with which it sits out until more of its output is fetched."""
        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache once every planned step has run."""
        self.num_in_flight_tokens = 0
        """Tokens that planned steps will sample but that are not known yet; with drafts, the most of them."""
        self.num_in_flight_drafts = 0
        """Of these, drafts, which may be rejected. `num_computed_tokens` counts them as accepted."""
        self.draft = DraftState()
        self.max_total_tokens = min(self.num_prompt_tokens + request.sampling.max_tokens, max_model_len)
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        grammar = request.sampling.grammar
        self.is_guided = grammar is not None
        self.guide_seconds = 0.0 if grammar is None else grammar.seconds
        """What a token of it takes on the host for its grammar."""
        self.last_step_id = -1
        """Of those in which its grammar was asked."""
        self.sits_out = False
        """Whether its next token has to wait for a step that has time for its grammar; see `guides`."""
        self.block_ids: list[int] = []
        # Blocks of layers with a window, if these have tables of their own: for those of its blocks of tokens
        # that a window still reaches, one of each such table for the first, then for the next.
        self.page_ids: list[int] = []
        self.num_passed_blocks = 0  # its blocks of tokens before these, which no window reaches any more
        self.num_allocated_tokens = 0
        """KV slots in `block_ids`."""
        self.block_hashes: list[BlockHash] = list(request.block_hashes or ())
        """Hashes of its full blocks: given with the request, or made of its tokens as they are needed."""
        self.num_registered_blocks = 0
        self.num_tokens_to_register = 0
        """Valid tokens from which on there is another full block to register."""
        self.plain_until = 0
        """Known tokens up to which another one neither ends it nor fills a block, stop tokens aside; 0 of one
        that has none yet, or is not in the batch. Set by `StepResults`, taken back by `RequestTable`."""
        self.num_shared_blocks = 0
        """Of a model that keeps states: those that the prefix cache held, with or without a state."""
        self.places_to_keep: tuple[int, ...] = ()
        """After how many tokens its state is kept for other requests, of a model that keeps states."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.is_in_flight = False
        """Whether no step may take it: a micro-batch that has not come back has it (kept with pipeline stages
        only), or it is to leave the batch."""
        self.kept_until = 0.0
        """Until when its KV is kept behind its end, seconds; 0 if it is not, or has not ended."""
        self.slo = slo
        """Its deadlines, and whether they were kept."""
        self.num_hit_tokens = 0
        """While it waits: prompt tokens that the prefix cache held when last looked."""
        self.queued_work = (0, 0.0)
        """Tokens that it has to compute, and the sum of what they attend to, as of when it began to wait."""
        self.times: array[float] | None = None
        """Where a simulation has the times of its tokens written, seconds; then those between the first and
        the last have no output."""
        self.admitted_step_id = -1
        """Not negative of one that has been in a batch, here or before it came."""
        self.scheduled_time = -1.0
        """Seconds; of a stream that came from elsewhere before this clock began, if need be."""

    @property
    def held_ids(self) -> list[int]:
        """All blocks that it holds a reference to."""
        return [*self.block_ids, *self.page_ids]

    @property
    def is_protected(self) -> bool:
        """Whether it goes by the deadline of its next token even where that cannot be met.

        Nobody may judge it, or it has delivered tokens: a stream that was preempted, or came here to go on.
        """
        return self.request.shed is ShedMode.OFF or self.num_tokens > self.num_prompt_tokens

    @property
    def is_paused(self) -> bool:
        """Whether no step takes it until more of its output is fetched, those in flight left out."""
        return self.num_tokens >= self.pause_at

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens, known or in flight, that are not computed yet."""
        return self.num_tokens + self.num_in_flight_tokens - self.num_computed_tokens

    # --- progress -------------------------------------------------------------------------------------

    def follow(self, num_tokens: int, num_computed: int, num_in_flight: int) -> None:
        """Stand where another engine's own count of the request says that it stands.

        Parameters
        ----------
        num_tokens : known ones.
        num_computed : with those of planned steps, without drafts that may be rejected.
        num_in_flight : that planned steps will sample for certain.
        """
        self.num_tokens, self.num_computed_tokens = num_tokens, num_computed
        self.scores_prompt &= num_tokens == self.num_prompt_tokens
        self.num_in_flight_tokens = num_in_flight

    def deliver(
        self, sampled_ids: list[int], logprobs: list[TokenLogprobs] | None, num_drafts: int
    ) -> RequestOutput:
        """Append what a row sampled, and see whether that ends the request.

        Parameters
        ----------
        num_drafts : that the row was planned with; what became of them is not counted here.
        """
        num_before = self.num_tokens
        num_tokens = num_before + len(sampled_ids)
        finish_reason, stop_token_id = None, None
        if self.stop_token_ids or num_tokens > self.max_total_tokens:
            sampled_ids, stop_token_id = self._cut_at_end(sampled_ids)
            num_tokens = num_before + len(sampled_ids)
        if stop_token_id is not None:
            finish_reason = FinishReason.STOP
        elif num_tokens >= self.max_total_tokens:
            finish_reason = FinishReason.LENGTH
        self.num_tokens = num_tokens
        self.scores_prompt, self.looks_up = False, True
        self.output_token_ids += sampled_ids
        self.num_in_flight_tokens -= 1 + num_drafts
        self.num_in_flight_drafts -= num_drafts
        output = self.output(sampled_ids, finish_reason, num_before)
        output.stop_token_id = stop_token_id
        output.logprobs = None if logprobs is None else logprobs[: len(sampled_ids)]
        return output

    def output(
        self, token_ids: list[int], finish_reason: FinishReason | None, num_before: int
    ) -> RequestOutput:
        """Return what is told of new tokens.

        Parameters
        ----------
        num_before : tokens that it had before them, its prompt included.
        """
        return RequestOutput(
            self.request_id,
            token_ids,
            finish_reason,
            None,
            self.num_cached_tokens,
            self.num_preemptions,
            self.scheduled_time,
            num_before - self.num_prompt_tokens,
        )

    def last_output(self, finish_reason: FinishReason) -> RequestOutput:
        """Return the output that ends the request without another token."""
        output, draft = self.output([], finish_reason, self.num_tokens), self.draft
        output.num_drafted_tokens, output.num_accepted_tokens = draft.num_drafted, draft.num_accepted
        return output

    def _cut_at_end(self, sampled_ids: list[int]) -> tuple[list[int], int | None]:
        """Return the tokens up to the one that ends the request, and that one if it is a stop token."""
        first_stop = self.request.sampling.min_tokens - self.num_output_tokens
        sampled_ids = sampled_ids[: self.max_total_tokens - self.num_tokens]
        for index, token_id in enumerate(sampled_ids):
            if index >= first_stop and token_id in self.stop_token_ids:
                return sampled_ids[: index + 1], token_id
        return sampled_ids, None

    def token_slice(self, start: int, stop: int) -> Sequence[int]:
        """Return the known tokens of these positions."""
        prompt, num_prompt = self.request.prompt_token_ids, self.num_prompt_tokens
        if stop <= num_prompt:
            return prompt[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return [*prompt[start:], *self.output_token_ids[: stop - num_prompt]]


@dataclass(slots=True)
class SLOState:
    """Where a request stands with its objectives.

    Written here alone, but for `num_left`, and for a token of a request that has none or is regular and in
    time: `SLOTracker` sets these itself, as to say so would be a call a token.
    """

    ttft_deadline: float = inf
    """When its first token is due, seconds; infinite without an objective."""
    end: float = inf
    """When its last token is due, by its e2e objective."""
    tbt_objective: float = inf
    """The TBT objective that it states, seconds; infinite without one."""
    tbt: float = inf
    """Seconds from the deadline of a token to that of the next. Less than the objective it is a pace, which
    e2e asks for, and no objective: what one gap takes too long others make up for."""
    next_deadline: float = inf
    """When its next token is due; infinite where none is, or where it is best effort."""
    is_best_effort: bool = False
    """Whether its objective was missed, or could not be kept."""
    predicted_ttft: float | None = None
    """At its arrival, seconds; None without a prediction, or once it was told."""
    first_delivery: float = -inf
    """Seconds; minus infinity before the first, as is the next."""
    last_delivery: float = -inf
    num_left: float = 1.0
    """Tokens that it is expected to have still, at least 1: its e2e objective is spread over them."""
    num_late_tokens: int = 0
    """Delivered after their deadlines (in `gap` mode: after a gap above the objective)."""
    num_late_allowed: int = 0
    is_gap_mode: bool = False
    """Whether gaps are held to the TBT objective, each by itself."""
    is_regular: bool = False
    """Whether it streams by its TBT objective alone: a token in time makes the next due a `tbt` later."""
    objective_deadline: float = inf
    """When its next token is due by its TTFT and TBT objectives alone."""

    def begin(
        self,
        request: Request,
        mode: SLOMode,
        *,
        now: float,
        max_output_tokens: int,
        num_left: int | None = None,
        longest_pace: float = inf,
    ) -> None:
        """Set the deadlines of a new request, or of one that is resumed with tokens that it has sent.

        Called before it is served; again where it is known better how long its answer will be.

        Parameters
        ----------
        now : seconds.
        max_output_tokens : that it will have for nearly certain: one in a hundred of so many may be late.
        num_left, longest_pace : see `deadline_and_pace`.
        """
        slo = request.slo
        self.is_best_effort, self.is_gap_mode, self.is_regular = False, mode == "gap", False
        self.num_late_allowed = max_output_tokens // LATE_TOKENS_IN
        self.num_left = float(num_left or usual_tokens(request))
        self.ttft_deadline, self.tbt = deadline_and_pace(request, num_left, longest_pace)
        self.next_deadline, self.tbt_objective = self.ttft_deadline, inf
        if slo is not None:
            self.tbt_objective = inf if slo.tbt is None else slo.tbt
            self.end = inf if slo.e2e is None else request.arrival + slo.e2e
            self.objective_deadline = inf if slo.ttft is None else request.arrival + slo.ttft
        if request.resumed_token_ids:
            self._resume(request, now)

    def _resume(self, request: Request, now: float) -> None:
        """Go on behind the tokens that were delivered elsewhere.

        Which of them were late is not known, save for the first. In `gap` mode the last of them came before
        now, and the next is due a `tbt` after now at the latest.
        """
        deadline, first = self.objective_deadline, request.first_token_time
        if first is None:
            first = request.arrival if deadline == inf else deadline
        self.first_delivery = self.last_delivery = first
        if first > deadline + TOLERANCE:
            self.relegate()
            return
        start = deadline if first < deadline < inf else first
        num_sent = len(request.resumed_token_ids)
        self.objective_deadline = (
            now + self.tbt_objective if self.is_gap_mode else start + num_sent * self.tbt_objective
        )
        self._repace(now)

    def deadlines(self) -> StreamDeadlines:
        """Return how it stands, for another replica to go on from."""
        known = {
            each.name: getattr(self, each.name) for each in fields(StreamDeadlines) if each.name != "is_paced"
        }
        return StreamDeadlines(**known, is_paced=self.tbt < self.tbt_objective)

    def go_on(self, deadlines: StreamDeadlines) -> None:
        """Stand as it stood on another replica; comes after `begin`."""
        for each in fields(StreamDeadlines):
            value = getattr(deadlines, each.name)
            if each.name != "is_paced" and value is not None:
                setattr(self, each.name, value)
        if not deadlines.is_paced:
            self.objective_deadline = self.next_deadline

    @property
    def has_objective(self) -> bool:
        """Whether it has an objective, kept or not."""
        return not self.ttft_deadline == self.tbt == inf

    @property
    def runs_as_best_effort(self) -> bool:
        """Whether it is served as best effort: its objective cannot be kept any more, or it has none."""
        return self.is_best_effort or not self.has_objective

    @property
    def rank(self) -> float:
        """Its place in a queue by deadlines: best effort behind all others."""
        return BEST_EFFORT_RANK if self.is_best_effort else min(self.next_deadline, BEST_EFFORT_RANK)

    def deadline_after(self, num_in_flight: int, start: float) -> float:
        """Return when the next token to plan is due, those in flight counted as delivered.

        In `gap` mode a token in flight comes when the step to plan starts, and the next one is due a `tbt`
        after that, however early it was.

        Parameters
        ----------
        num_in_flight : tokens of planned steps that will be delivered for certain.
        start : when the step to plan starts, which is when those in flight end; seconds.
        """
        if not num_in_flight or self.next_deadline == inf:
            return self.next_deadline
        if self.is_gap_mode:
            return start + self.tbt
        return self.next_deadline + num_in_flight * self.tbt

    def note_delivery(self, now: float, num_tokens: int = 1) -> bool:
        """Move on to the next token's deadline after a delivery; return whether this missed the objective.

        `stream` is `D_k = max(arrival + ttft, first token) + k tbt`: a stream that is ahead keeps its slack.
        In `gap` mode each delivery is due `tbt` after the one before, however many tokens it has.
        """
        is_first, deadline = self.last_delivery == -inf, self.objective_deadline
        self.last_delivery = now
        if is_first:
            self.first_delivery = now
        if self.is_best_effort:
            return False
        is_late = now > deadline + TOLERANCE
        if is_late:
            self.num_late_tokens += self._num_late_of(now, num_tokens)
        # No later token can make up for the first, nor for what comes after the end.
        is_lost = now > self.end + TOLERANCE or (is_late and is_first)
        if is_lost or self.num_late_tokens > self.num_late_allowed:
            self.relegate()
            return True
        if self.is_gap_mode:
            deadline = now
        elif is_first:
            deadline = deadline if now < deadline < inf else now
        self.objective_deadline = deadline + (1 if self.is_gap_mode else num_tokens) * self.tbt_objective
        self.num_left = max(self.num_left - num_tokens, 1.0)
        self._repace(now)
        self.is_regular = self.end == inf and not self.is_gap_mode
        return False

    def go_on_at(self, now: float) -> None:
        """Go on after a pause, which is not held against it: the next token is due by so much later."""
        if not self.is_best_effort and self.last_delivery > -inf:
            self.objective_deadline += max(now - self.last_delivery, 0.0)
            self._repace(now)

    def _repace(self, now: float) -> None:
        """Spread what is left of an e2e objective over the tokens that are expected still."""
        self.tbt, self.next_deadline = self.tbt_objective, self.objective_deadline
        if self.end < inf:
            pace = max(self.end - now, 0.0) / self.num_left
            self.tbt, self.next_deadline = min(self.tbt, pace), min(self.next_deadline, now + pace)

    def relegate(self) -> None:
        """Serve it as best effort from now on: nothing can make it keep its objective."""
        self.is_best_effort, self.is_regular = True, False
        self.next_deadline = self.objective_deadline = inf

    def _num_late_of(self, now: float, num_tokens: int) -> int:
        """Return how many tokens of a late delivery are late."""
        if num_tokens == 1 or self.is_gap_mode or not 0 < self.tbt_objective < inf:
            return 1
        # The k-th token of the delivery was due k - 1 objectives later.
        late = now - self.objective_deadline - TOLERANCE
        return min(num_tokens, max(1, ceil(late / self.tbt_objective)))


def usual_tokens(request: Request) -> int:
    """Return the output tokens that a request is taken to have where nobody knows of answers."""
    return min(request.sampling.max_tokens, USUAL_OUTPUT_TOKENS)


def deadline_and_pace(
    request: Request, num_tokens: int | None = None, longest_pace: float = inf
) -> tuple[float, float]:
    """Return when the first token is due and the seconds from each deadline to the next; infinite for none.

    An e2e objective becomes deadlines too: the expected tokens would end in time if those behind the first
    took two thirds of it, or less where that is enough for them, and the prompt the remainder. Where a TTFT
    objective makes the first due sooner, the tokens behind it may take all that is left.

    Parameters
    ----------
    num_tokens : to spread an e2e objective over; None is `max_tokens`, but not more than a usual answer has.
    longest_pace : seconds that a token of an answer has to wait at most, whatever e2e objectives leave.
    """
    slo, arrival = request.slo, request.arrival
    if slo is None:
        return inf, inf
    tbt = inf if slo.tbt is None else slo.tbt
    first = inf if slo.ttft is None else arrival + slo.ttft
    if slo.e2e is not None:
        num_gaps = (num_tokens or usual_tokens(request)) - 1
        pace = min(tbt, longest_pace, _ANSWER_SHARE * slo.e2e / max(num_gaps, 1))
        latest = arrival + slo.e2e - pace * num_gaps
        if latest < first:
            return latest, pace
        # Due sooner than that, it leaves the answer more time, which is nobody else's to ask for.
        tbt = min(tbt, (arrival + slo.e2e - first) / max(num_gaps, 1))
    return first, tbt


def first_deadline(request: Request) -> float:
    """Return a request's rank by the deadline of its first token; those without one come last."""
    return min(deadline_and_pace(request)[0], BEST_EFFORT_RANK)
