"""The deadlines of a request's tokens, the pace of its answer, and when its objective is lost."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, inf

from onbeat.core.handover import StreamDeadlines
from onbeat.core.request import Request
from onbeat.core.slo import SLOMode

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
