"""What an arriving request may expect, and whether it is taken.

The wait of a newcomer is predicted by fluid replay: the prompts ahead of it, in the policy's own order, drain
at the rate that the running streams leave to prefill.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from math import inf

from onbeat.core.errors import SLOUnattainable
from onbeat.core.slo import ShedMode
from onbeat.scheduler.replica.hysteresis import Hysteresis
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.book import PromiseBook
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK, give_up
from onbeat.scheduler.replica.slo.prefill_queue import prefill_jobs
from onbeat.scheduler.replica.slo.step_times import LEAST_SHARE, StepTimes
from onbeat.scheduler.replica.slo.triage import Job, needed_share, select_feasible, shortest_first
from onbeat.scheduler.replica.slo.tuning import SLOTuning
from onbeat.scheduler.replica.slo.view import RunningView, decode_shape
from onbeat.scheduler.replica.step_plan import StepPlan

_SHORTEST_RETRY = 0.05
_MOST_CLASSES = 64
_TRY_AGAIN_SECONDS = 30.0
"""How often an idle replica takes a request that it thinks hopeless, lest a model that is too pessimistic
refuses what would teach it better."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a newcomer may expect.

    Attributes
    ----------
    ttft : seconds from its arrival, were it taken in its turn.
    delays_others : whether prompts behind it that would be in time no longer were.
    slows_streams : whether the running streams with it no longer fit the tightest TBT objective.
    """

    ttft: float
    delays_others: bool
    slows_streams: bool


class Admission:
    """Predicts the TTFT of every newcomer, and refuses those who would rather be refused than served late."""

    def __init__(self, book: PromiseBook, tuning: SLOTuning) -> None:
        self._book = book
        self._tuning = tuning
        self._switches: dict[str | None, Hysteresis] = {}
        self._last_try = -inf

    def decide(self, state: RequestState, plan: StepPlan, times: StepTimes, busy_until: float) -> None:
        """Predict a newcomer's TTFT and set `predicted_ttft`.

        Parameters
        ----------
        plan : the queues as they are, at the time of the arrival.
        busy_until : when the step under way is expected to end, seconds.

        Raises
        ------
        SLOUnattainable : it is to be refused where its objective cannot be kept, and that is so.
        """
        outlook = self._look(state, plan, times, busy_until)
        state.predicted_ttft = outlook.ttft
        if state.request.shed is not ShedMode.REJECT:
            return
        if not plan.running and not len(plan.waiting) and plan.now - self._last_try > _TRY_AGAIN_SECONDS:
            if state.ttft_deadline < state.request.arrival + outlook.ttft:
                self._last_try = plan.now
                give_up(state)
            return
        objective = state.ttft_deadline - state.request.arrival
        if objective < inf and self._is_too_late(state, outlook, objective, times):
            self._refuse(outlook, objective)
        if outlook.slows_streams:
            self._book.reject("slo_unattainable")
            raise SLOUnattainable(
                "with this request the running streams would no longer keep their TBT objective; try again "
                "when some have ended",
                predicted_ttft=outlook.ttft,
                retry_after=max(outlook.ttft, _SHORTEST_RETRY),
            )

    def _is_too_late(self, state: RequestState, outlook: Outlook, objective: float, times: StepTimes) -> bool:
        num_tokens = state.num_tokens - state.num_hit_tokens
        if times.work.idle_seconds(num_tokens, state.num_hit_tokens) > objective:
            return True  # says nothing of the load
        switch = self._switch(state.request.slo_class)
        return switch.update(outlook.ttft * self._book.ttft_surcharge() / objective) or outlook.delays_others

    def _refuse(self, outlook: Outlook, objective: float) -> None:
        self._book.reject("slo_unattainable")
        late = outlook.ttft - objective
        reason = (
            "it would come in time, but make requests late that have been accepted"
            if late <= 0 and outlook.delays_others
            else f"the objective is {objective * 1e3:.0f} ms"
        )
        raise SLOUnattainable(
            f"the first token is predicted {outlook.ttft * 1e3:.0f} ms after arrival; {reason}",
            predicted_ttft=outlook.ttft,
            retry_after=max(late, _SHORTEST_RETRY),
        )

    def _switch(self, slo_class: str | None) -> Hysteresis:
        switch = self._switches.get(slo_class)
        if switch is None:
            if len(self._switches) >= _MOST_CLASSES:
                slo_class = None
            switch = self._switches.setdefault(slo_class, Hysteresis())
        return switch

    def _look(self, state: RequestState, plan: StepPlan, times: StepTimes, busy_until: float) -> Outlook:
        now = plan.now
        view = RunningView(plan.running, max(now, busy_until))
        shape = decode_shape([*view.streams, *view.loose])
        budget = times.natural_budget(view, inf)
        start = max(now, busy_until)
        jobs, _ = prefill_jobs(start, view.prefills, plan.waiting, times.work)
        num_cached = state.num_hit_tokens
        own = Job(state.ttft_deadline, times.work.seconds(state.num_tokens - num_cached, num_cached), state)
        share = max(times.prefill_share(shape, budget), LEAST_SHARE)
        ahead, delays_others = self._ahead(own, jobs, start, share)
        if ahead is None:
            ahead = sum(job.seconds for job in jobs) + self._best_effort_seconds(plan, view, times)
        elif self._is_paced(plan, view):
            budget = self._paced(budget, times.of(shape), [*jobs, own], start)
        wait = start - state.request.arrival
        ttft = wait + times.drain_seconds(ahead + own.seconds, shape, budget)
        return Outlook(ttft, delays_others, self._slows_streams(state, view, times))

    def _ahead(self, own: Job, jobs: list[Job], start: float, share: float) -> tuple[float | None, bool]:
        """Return the work ahead of a newcomer, None where it is best effort, and whether it delays others."""
        if own.deadline == inf:
            return None, False
        everyone = list(jobs)
        insort(everyone, own, key=lambda job: job.deadline)
        place = next(index for index, job in enumerate(everyone) if job is own)
        if own.state.request.shed is ShedMode.REJECT:
            # Whoever was accepted stays: the newcomer must find its place among them.
            ahead = sum(job.seconds for job in everyone[:place])
            end, delays_others = start + (ahead + own.seconds) / share, False
            if needed_share(everyone, start) <= share:
                turns = self._in_turn(everyone, start, share)
                return sum(job.seconds for job in turns[: turns.index(own)]), False
            for job in everyone[place + 1 :]:
                is_late_anyway = end + (job.seconds - own.seconds) / share > job.deadline
                end += job.seconds / share
                delays_others |= end > job.deadline and not is_late_anyway
            return ahead, delays_others
        if needed_share(everyone, start) > share:
            kept, _ = select_feasible(everyone, start=start, share=share, worth=self._book)
        else:
            kept = self._in_turn(everyone, start, share)
        ahead = 0.0
        for job in kept:
            if job is own:
                return ahead, False
            ahead += job.seconds
        return None, False

    def _in_turn(self, jobs: list[Job], start: float, share: float) -> list[Job]:
        """Return prompts that can all be in time, in the order in which they will be served."""
        caution = self._tuning.caution
        return shortest_first(jobs, start=start, share=share, caution=caution, places=len(jobs))

    def _is_paced(self, plan: StepPlan, view: RunningView) -> bool:
        """Whether steps are kept short, as the composer decides it."""
        tuning = self._tuning
        is_busy = self._book.load.utilisation(plan.now) > tuning.busy
        has_others = bool(plan.waiting.first_from(BEST_EFFORT_RANK, 1))
        return bool(tuning.paces and view.streams) and not (is_busy or has_others)

    def _paced(self, budget: float, decode_seconds: float, jobs: list[Job], start: float) -> float:
        jobs.sort(key=lambda job: job.deadline)
        return min(budget, pace(decode_seconds, needed_share(jobs, start), self._tuning))

    def _best_effort_seconds(self, plan: StepPlan, view: RunningView, times: StepTimes) -> float:
        """Return the work of prompts without a deadline that can be met."""
        work = times.work
        seconds = sum(
            work.seconds(state.num_wanted_tokens, state.num_computed_tokens)
            for state in view.prefills
            if state.is_best_effort or state.ttft_deadline == inf
        )
        for state in plan.waiting.first_from(BEST_EFFORT_RANK, len(plan.waiting)):
            seconds += work.seconds(state.num_tokens - state.num_hit_tokens, state.num_hit_tokens)
        return seconds

    def _slows_streams(self, state: RequestState, view: RunningView, times: StepTimes) -> bool:
        """Whether one more stream breaks the tightest TBT objective."""
        tightest = min(view.tightest, state.tbt)
        if tightest == inf or not view.streams:
            return False
        shape = decode_shape(view.streams)
        shape.add(state.num_tokens, 1, samples=True)
        return times.of(shape) > tightest


def pace(decode_seconds: float, need: float, tuning: SLOTuning) -> float:
    """Return the time of a step in which prompts run as fast as they need to, with a margin; seconds.

    Parameters
    ----------
    decode_seconds : of the step without prompts.
    need : share of the time that prompts need to be in time.
    """
    share = max(0.5, tuning.pace_margin * need)
    return inf if share >= 0.95 else decode_seconds / (1 - share)
