"""The deadlines of a request's tokens, and when its objective can no longer be kept."""

from __future__ import annotations

from math import ceil, inf

from onbeat.core.handover import StreamDeadlines
from onbeat.core.request import Request
from onbeat.core.slo import SLOMode

TOLERANCE = 1e-9
"""Seconds; as the metrics allow, lest rounding makes a token late."""
LATE_TOKENS_IN = 100
"""One token, or gap, in so many may be late."""
USUAL_OUTPUT_TOKENS = 256
"""Output tokens to spread an e2e objective over where a request allows more and no answer was seen yet."""
_ANSWER_SHARE = 2 / 3
"""Of an e2e objective, what the tokens of a usual answer may take; the remainder is for the prompt."""
BEST_EFFORT_RANK = 1e15
"""Queue rank of requests without a TTFT deadline: behind all that have one, by arrival."""


class SLOState:
    """Where a request stands with its objectives.

    Written here alone, but for `last_delivery` where nothing is due any more, and `next_deadline` while a
    simulated stream is in time: to say so would be a call a token (`SLOTracker`, `steady.py`).

    Attributes
    ----------
    ttft_deadline : when its first token is due, seconds; infinite without an objective.
    tbt : seconds from the deadline of a token to that of the next; infinite without an objective.
    tbt_objective : the TBT objective that it states, seconds; infinite without one.
    next_deadline : when its next token is due; infinite where none is, or where it is best effort.
    is_best_effort : whether its objective was missed, or could not be kept.
    is_paced : whether its `tbt` is a pace and no objective: e2e asks for it, TBT for less or nothing.
    is_gap_mode : whether gaps are held to `tbt`, each by itself.
    predicted_ttft : predicted at its arrival, seconds; None without a prediction, or once it was told.
    first_delivery, last_delivery : seconds; minus infinity before the first.
    """

    __slots__ = (
        "_mode",
        "_num_late_allowed",
        "_num_late_tokens",
        "first_delivery",
        "is_best_effort",
        "is_gap_mode",
        "is_paced",
        "last_delivery",
        "next_deadline",
        "predicted_ttft",
        "tbt",
        "tbt_objective",
        "ttft_deadline",
    )

    def __init__(self) -> None:
        self.ttft_deadline = inf
        self.tbt = self.tbt_objective = inf
        self.next_deadline = inf
        self.is_best_effort = False
        self.is_paced = False
        self.predicted_ttft: float | None = None
        self.first_delivery = -inf
        self.last_delivery = -inf
        self._mode: SLOMode = "stream"
        self.is_gap_mode = False
        self._num_late_tokens = 0
        """Delivered after their deadlines (in `gap` mode: after a gap above `tbt`)."""
        self._num_late_allowed = 0

    def begin(
        self,
        request: Request,
        mode: SLOMode,
        *,
        now: float,
        max_output_tokens: int,
        expected_output_tokens: int | None = None,
        longest_pace: float = inf,
    ) -> None:
        """Set the deadlines of a new request, or of one that is resumed with tokens that it has sent.

        Called before it is served; again where it is known better how long its answer will be.

        Parameters
        ----------
        now : seconds.
        max_output_tokens : that it may have.
        expected_output_tokens, longest_pace : see `due_times`. One in a hundred of so many may be late.
        """
        slo = request.slo
        self.is_best_effort = False
        # Of an answer that may be as long as the context hardly any is.
        self._num_late_allowed = (expected_output_tokens or max_output_tokens) // LATE_TOKENS_IN
        self.ttft_deadline, self.tbt = due_times(request, expected_output_tokens, longest_pace)
        self.tbt_objective = inf if slo is None or slo.tbt is None else slo.tbt
        self._mode = mode
        self._set_paced(is_paced=self.tbt < self.tbt_objective)
        self.next_deadline = self.ttft_deadline
        if request.resumed_token_ids:
            self._resume(request, now)

    def _set_paced(self, *, is_paced: bool) -> None:
        self.is_paced = is_paced
        # A pace is no objective: what one gap takes too long others make up for.
        self.is_gap_mode = self._mode == "gap" and not is_paced

    def _resume(self, request: Request, now: float) -> None:
        """Go on behind the tokens that were delivered elsewhere.

        Which of them were late is not known, save for the first. In `gap` mode the last of them came before
        now, and the next is due a `tbt` after now at the latest.
        """
        due, first = self.ttft_deadline, request.first_token_time
        if first is None:
            first = request.arrival if due == inf else due
        self.first_delivery = self.last_delivery = first
        if first > due + TOLERANCE:
            self.relegate()
        elif self.is_gap_mode:
            self.next_deadline = now + self.tbt
        else:
            self.next_deadline = self._stream_start() + len(request.resumed_token_ids) * self.tbt

    def deadlines(self) -> StreamDeadlines:
        """Return how it stands, for another replica to go on from."""
        return StreamDeadlines(
            ttft_deadline=self.ttft_deadline,
            tbt=self.tbt,
            next_deadline=self.next_deadline,
            is_best_effort=self.is_best_effort,
            is_paced=self.is_paced,
            first_delivery=self.first_delivery,
            last_delivery=self.last_delivery,
            num_late_tokens=self._num_late_tokens,
            num_late_allowed=self._num_late_allowed,
        )

    def go_on(self, deadlines: StreamDeadlines) -> None:
        """Stand as it stood on another replica; comes after `begin`."""
        self.ttft_deadline, self.tbt = deadlines.ttft_deadline, deadlines.tbt
        self.next_deadline = deadlines.next_deadline
        self.is_best_effort = deadlines.is_best_effort
        self._set_paced(is_paced=deadlines.is_paced)
        self.first_delivery, self.last_delivery = deadlines.first_delivery, deadlines.last_delivery
        self._num_late_tokens = deadlines.num_late_tokens
        if deadlines.num_late_allowed is not None:
            self._num_late_allowed = deadlines.num_late_allowed

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

    def due(self, num_in_flight: int, start: float) -> float:
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
        is_first, late = self.last_delivery == -inf, now > self.next_deadline + TOLERANCE
        self.last_delivery = now
        if is_first:
            self.first_delivery = now
        if self.is_best_effort:
            return False
        if late:
            self._num_late_tokens += self._num_late_of(now, num_tokens)
            if is_first or self._num_late_tokens > self._num_late_allowed:
                if is_first or not self.is_paced or self.tbt_objective == inf:
                    self.relegate()  # no later token can make up for the first
                    return True
                self._give_up_pace()
        if self.is_gap_mode:
            self.next_deadline = now + self.tbt
        elif is_first:
            self.next_deadline = self._stream_start() + num_tokens * self.tbt
        else:
            self.next_deadline += num_tokens * self.tbt
        return False

    def _stream_start(self) -> float:
        """Return what a stream's deadlines are counted from, `max(arrival + ttft, first token)`."""
        due = self.ttft_deadline
        return due if self.first_delivery < due < inf else self.first_delivery

    def _give_up_pace(self) -> None:
        """Go on by the TBT objective alone: by that no token was due as soon as by the pace."""
        start = self._stream_start()
        num_tokens = round((self.next_deadline - start) / self.tbt)
        self.tbt = self.tbt_objective
        self.next_deadline = start + num_tokens * self.tbt
        self._num_late_tokens = 0
        self._set_paced(is_paced=False)

    def note_prediction(self, seconds: float) -> None:
        """Remember the TTFT that was predicted at the arrival."""
        self.predicted_ttft = seconds

    def take_prediction(self) -> float | None:
        """Return the predicted TTFT the first time, then None."""
        predicted, self.predicted_ttft = self.predicted_ttft, None
        return predicted

    def relegate(self) -> None:
        """Serve it as best effort from now on: nothing can make it keep its objective."""
        self.is_best_effort = True
        self.next_deadline = inf

    def _num_late_of(self, now: float, num_tokens: int) -> int:
        """Return how many tokens of a late delivery are late."""
        if num_tokens == 1 or self.is_gap_mode or not 0 < self.tbt < inf:
            return 1
        # The k-th token of the delivery was due k - 1 objectives later.
        return min(num_tokens, max(1, ceil((now - self.next_deadline - TOLERANCE) / self.tbt)))


def due_times(
    request: Request, expected_output_tokens: int | None = None, longest_pace: float = inf
) -> tuple[float, float]:
    """Return when the first token is due and the seconds from each deadline to the next; infinite for none.

    An e2e objective becomes deadlines too: the expected tokens would end in time if those behind the first
    took two thirds of it, or less where that is enough for them, and the prompt the remainder. Where a TTFT
    objective makes the first due sooner, the tokens behind it may take all that is left.

    Parameters
    ----------
    expected_output_tokens : to spread an e2e objective over; None is `max_tokens`, but not more than a
        usual answer has.
    longest_pace : seconds that a token of an answer has to wait at most, whatever e2e objectives leave.
    """
    slo, arrival = request.slo, request.arrival
    if slo is None:
        return inf, inf
    tbt = inf if slo.tbt is None else slo.tbt
    first = inf if slo.ttft is None else arrival + slo.ttft
    if slo.e2e is not None:
        num_tokens = expected_output_tokens or min(request.sampling.max_tokens, USUAL_OUTPUT_TOKENS)
        num_gaps = num_tokens - 1
        pace = min(tbt, longest_pace, _ANSWER_SHARE * slo.e2e / max(num_gaps, 1))
        latest = arrival + slo.e2e - pace * num_gaps
        if latest < first:
            return latest, pace
        # Due sooner than that, it leaves the answer more time, which is nobody else's to ask for.
        tbt = min(tbt, (arrival + slo.e2e - first) / max(num_gaps, 1))
    return first, tbt


class EarliestDeadline:
    """A queue order: by the deadline of the first token; requests without one come last, by arrival."""

    preempts = False

    def rank(self, request: Request) -> float:
        return min(due_times(request)[0], BEST_EFFORT_RANK)
