"""What a step of the SLO policy may take, and what prompts get of it: the rule, without the queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from onbeat.core.slo import DEFAULT_QUEUE_SECONDS
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.cost_model import CERTAIN, CostModel
from onbeat.scheduler.replica.slo.view import PromptJob, RunningView
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.scheduler.triage import PrefillShare, select_feasible

GAP_QUANTILE = CERTAIN
"""Of the step time, to plan with in `gap` mode: nothing earned makes up for a longer step there, and one in a
hundred is what a request's P99 gap allows. In `stream` mode longer and shorter steps even out: the mean."""
EARNED_SHARE = 1 / 32
"""Of a TBT objective that a step leaves to its streams: they earn the time to outlast a stall."""
EARNED_AFTER_STALL, STALL_MEMORY = 1 / 4, 100.0
"""The same after a step that took longer than any is planned to: for so many times the time that it took
beyond an objective, which streams then keep as slack."""
LONGEST_STALL = 32
"""TBT objectives, what streams then earn in 128 tokens: most answers end before they have earned more."""
SPENT_SHARE, SPENT_WHILE_IT_GROWS = 1 / 4, 1 / 2
"""Of the slack of the most urgent stream, what one step may take; and while the queue grows."""
LONGEST_GAP = 2.0
"""The longest step that slack may be spent on, TBT objectives."""
PACED_SHARE, PACED_BEHIND_STREAMS = 2 / 5, 1 / 5
"""Of a step, what is left to prompts whatever e2e objectives ask for: a prompt that waits has one too. Less
while prompts wait that cannot be in time, or a call runs that has lost its job, if few of the prompts have
TTFT objectives: each that is taken then makes those late that run, whose prompts have been computed already,
and wants a pace itself."""
MOST_WITH_TTFT = 1 / 8
"""Share of the prompts that wait which may have TTFT objectives, for that."""
SLACK_TOKENS = 20
"""A stream that has the slack of so many tokens may sit out a step for prompts that would be late."""
OVERDUE = 1.5
"""Times the bound that a request waits before it is ended. Above the errors of predictions: only requests
that prompts with deadlines have overtaken wait so long."""


class StepRules:
    """The decisions of a step, each of which a study can replace.

    Parameters
    ----------
    config : what keeping a TBT objective means, whom to leave behind, and how long best effort may wait.
    cost_model : what prompts cost.
    worth : of keeping a request's objective.

    Attributes
    ----------
    tightest : the shortest TBT objective of the streams of the last step, seconds; infinite without any.
    """

    earned, slack_tokens = EARNED_SHARE, SLACK_TOKENS
    spent, spent_while_it_grows, longest_gap = SPENT_SHARE, SPENT_WHILE_IT_GROWS, LONGEST_GAP

    def __init__(
        self, config: SchedulerConfig, cost_model: CostModel, worth: Callable[[RequestState], float]
    ) -> None:
        self.cost_model, self.worth = cost_model, worth
        self.mode, self.shed_order = config.slo_mode, config.shed_order
        self.longest_wait = inf if config.max_queue_seconds is None else config.max_queue_seconds
        self.tightest = inf
        self._slack_reserve, self._stalled_until = 0.0, -inf

    def note_steps(self, begun: float, ends: Sequence[float]) -> None:
        """Hear of steps that followed one another: costs are taken anew now and then, and stalls noted.

        A step that took longer than any is planned to is a stall.

        Parameters
        ----------
        begun, ends : when the first began, and when each of them ended; no more than `cost_model.num_left`.
        """
        longest = (1 + self.longest_gap) * self.tightest
        if ends[-1] - begun > longest and self.mode == "stream":
            for start, end in zip((begun, *ends), ends, strict=False):
                beyond = end - start - self.tightest
                if end - start > longest and beyond <= LONGEST_STALL * self.tightest:
                    self._slack_reserve, self._stalled_until = beyond, end + STALL_MEMORY * beyond
        cost_model = self.cost_model
        cost_model.num_left -= len(ends)  # as `count`, whose call would be one more a step
        if not cost_model.num_left:
            cost_model.take()

    def slack_reserve(self, start: float) -> float:
        """Return the slack that streams should keep for the next stall, seconds."""
        return self._slack_reserve if start < self._stalled_until else 0.0

    def limit(
        self,
        view: RunningView,
        decode_seconds: float,
        start: float,
        *,
        queue_grows: bool = False,
        streams_first: bool = False,
    ) -> float:
        """Return the time that a step may take, seconds; infinite where no stream has an objective.

        Parameters
        ----------
        queue_grows : whether some wait that cannot be in time: then work is short, not slack.
        streams_first : whether the pace of e2e objectives goes before prompts that wait.
        """
        slack = view.deadline - start
        objective = self.tightest_limit(view.tightest)
        if self.mode == "stream" and objective < inf:
            reserve = self.slack_reserve(start)
            if reserve:  # not at once: streams that were begun with longer steps would leave prompts nothing
                earned = (1 - EARNED_AFTER_STALL) * view.tightest
                objective = min(objective, max(earned, (objective + decode_seconds) / 2))
            spent = self.spent_while_it_grows if queue_grows else self.spent
            objective = max(objective, min(spent * (slack - reserve), self.longest_gap * view.tightest))
        if view.paces:
            paced = PACED_BEHIND_STREAMS if streams_first else PACED_SHARE
            pace = min([each for each in view.paces if each >= decode_seconds] or view.paces)
            objective = min(objective, max(pace, decode_seconds / (1 - paced)))
        return min(objective, max(slack, decode_seconds))

    def tightest_limit(self, tightest: float) -> float:
        """Return what TBT objectives allow without slack, seconds; infinite without any.

        Parameters
        ----------
        tightest : the shortest of them, seconds; infinite without any.
        """
        return tightest if self.mode == "gap" else tightest * (1 - self.earned)

    def prefill_share(self, decodes: BatchShape, limit: float, jobs: Sequence[PromptJob]) -> PrefillShare:
        """Return what prompts get of a step beside some decodes, within a limit."""
        ttfts = [job.state.slo.ttft_deadline - job.state.request.arrival for job in jobs]
        return self.cost_model.prefill_share(decodes, limit, min(ttfts, default=inf))

    def split(
        self, jobs: Sequence[PromptJob], prefill: PrefillShare, now: float
    ) -> tuple[list[PromptJob], list[PromptJob]]:
        """Return the prompts that can all be in time, and those to leave behind, by deadline both."""
        start = now + prefill.fixed_seconds  # whatever part of its last step a prompt needs
        # Of those that came at once the last goes, so that it is the same one at the next step.
        cost, leaves_last = partial(self.cost, start=start), self.shed_order == "longest-wait"
        return select_feasible(jobs, start=start, share=prefill.share, cost=cost, leaves_last=leaves_last)

    def cost(self, job: PromptJob, start: float) -> float | None:
        """Return what a prompt costs others: the greatest is the first to be left behind; None is never."""
        state = job.state
        if state.is_protected:
            return None
        if self.shed_order == "most":
            return job.seconds / self.worth(state)
        return (state.request.arrival - start) * self.worth(state)

    def ends_by(self, kept: Sequence[PromptJob], now: float) -> dict[str, float]:
        """Return by when a step has to end that ends one of these prompts: request id -> seconds from now."""
        return {job.state.request_id: job.deadline - now for job in kept}

    def may_sit_out(self, state: RequestState, deadline: float, start: float) -> bool:
        """Whether a stream has the time to let prompts go first.

        Parameters
        ----------
        deadline : of its next token, seconds. An e2e objective makes it for an answer of usual
            length, and what a stream is ahead of it a longer answer needs: then it never sits out.
        start : when the next step may start, seconds.
        """
        slo = state.request.slo
        needed = self.slack_tokens * state.slo.tbt + self.slack_reserve(start)
        return deadline - start > needed and slo is not None and slo.e2e is None

    def is_late_if_it_waits(self, kept: Sequence[PromptJob], prefill: PrefillShare, now: float) -> bool:
        """Whether one of the prompts that wait is late if they do for another step.

        Parameters
        ----------
        kept : prompts that can all be in time, in the order of their deadlines.
        """
        end = now + prefill.length
        for deadline, seconds, state in kept:
            end += seconds / prefill.share
            if end >= deadline and not state.block_ids:
                return True
        return False

    def is_starved(self, state: RequestState, now: float) -> bool:
        """Whether best effort that has begun gets no further, for lack of memory or time.

        Its last token is as long ago as a request may wait to be begun. Nobody ends it, as its client has
        read what there is.
        """
        slo = state.slo
        longest = self.longest_wait if self.longest_wait < inf else DEFAULT_QUEUE_SECONDS
        return (
            state.has_run
            and slo.runs_as_best_effort
            and now - max(slo.last_delivery, _waits_since(state)) > longest
        )

    def is_overdue(self, state: RequestState, now: float) -> bool:
        """Whether a waiting request was taken, but has had to let others go first ever since."""
        if now - _waits_since(state) <= OVERDUE * self.longest_wait:
            return False
        return not (state.has_run or state.num_output_tokens)

    def loss(self, state: RequestState, start: float) -> tuple[float, ...]:
        """Return a key of running requests: the greatest is the first to be preempted.

        Best effort goes first, but last if it is starved; then streams that have the time to be computed
        again before their next deadline, the one with most slack first; then those that are worth least.

        Parameters
        ----------
        start : when the next step may start, seconds.
        """
        slo, arrival = state.slo, state.request.arrival
        if slo.runs_as_best_effort:
            return (-1.0 if self.is_starved(state, start) else 2.0, 0.0, arrival)
        deadline = slo.deadline_after(state.num_certain_tokens, start)
        slack = deadline - start - self.cost_model.idle_seconds(state.num_tokens, 0)
        return (1.0, slack, arrival) if slack >= 0 else (0.0, -self.worth(state), arrival)


def _waits_since(state: RequestState) -> float:
    """Return when its wait as best effort has begun: at its arrival, or when its objective passed."""
    deadline = state.slo.ttft_deadline
    return state.request.arrival if deadline == inf else deadline
