"""Which objectives a machine cannot meet even when it has nothing else to do: of classes, and of an arrival.

Waiting does not help with these: clients hear what would. And which of them cost more than they are worth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, hypot, inf, log10
from typing import NamedTuple

from onbeat.core.fleet import PrefillCosts
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.request_state import LATE_TOKENS_IN, TOLERANCE, RequestState, SLOState
from onbeat.scheduler.replica.slo.view import MOST_JOBS, decode_shape
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.triage import CostModel, DueWork, finish_seconds, select_feasible


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCheck:
    """What a request does that has the machine to itself, and ought to keep its objectives.

    Models are asked for mean step times: what the mean misses, planning cannot save.
    """

    short: int = 128
    """Tokens of a prompt that ought to keep the E2E objective, in one chunk."""
    long: int = 1024
    """Tokens of a prompt that ought to keep the TTFT objective, likewise."""
    context: int = 1024
    """Tokens that a decode attends to, which ought to keep the TBT objective."""

    def misses(self, model: StepTimeModel, classes: Mapping[str, SLO]) -> list[str]:
        """Return a sentence for each objective of a class that is missed.

        Such as `class chat: TBT 50 ms, but one decode alone takes 63 ms here`; none where all is well.
        """
        return [f"class {name}: {miss}" for name, slo in classes.items() for miss in self._misses(model, slo)]

    def speeds(self, model: StepTimeModel) -> str:
        """Return how soon tokens come if nothing else runs."""
        first, further = _prefill_seconds(model, self.short), self._decode_seconds(model)
        return (
            f"the first token of a prompt of {self.short} tokens takes {ms_text(first)}, each further one "
            f"{ms_text(further)}"
        )

    def _misses(self, model: StepTimeModel, slo: SLO) -> Iterator[str]:
        for name, objective, seconds, what in self._steps(model, slo):
            if seconds > objective:
                stated, taken = f"{name} {ms_text(objective)}", f"{what} alone takes {ms_text(seconds)} here"
                yield self._ttft_miss(model, objective) if name == "TTFT" else f"{stated}, but {taken}"

    def _ttft_miss(self, model: StepTimeModel, ttft: float) -> str:
        longest = model.max_chunk_tokens(BatchShape(), 0, ttft)
        which = f"prompts above {longest} tokens miss" if longest else "every prompt misses"
        taken = _prefill_seconds(model, self.short)
        short = f" ({self.short} tokens take {ms_text(taken)})" if longest and taken > ttft else ""
        return f"TTFT {ms_text(ttft)}: {which} it even when idle{short}"

    def _steps(self, model: StepTimeModel, slo: SLO) -> Iterator[tuple[str, float, float, str]]:
        """Yield each objective with its name, the seconds of the step that has to keep it, and what it is."""
        if slo.tbt is not None:
            yield "TBT", slo.tbt, self._decode_seconds(model), "one decode"
        if slo.ttft is not None:
            yield "TTFT", slo.ttft, _prefill_seconds(model, self.long), f"a prompt of {self.long} tokens"
        if slo.e2e is not None:
            yield "E2E", slo.e2e, _prefill_seconds(model, self.short), f"a prompt of {self.short} tokens"

    def _decode_seconds(self, model: StepTimeModel) -> float:
        return _step_seconds(model, num_computed_tokens=self.context - 1, num_new_tokens=1)


def _prefill_seconds(model: StepTimeModel, num_tokens: int) -> float:
    return _step_seconds(model, num_computed_tokens=0, num_new_tokens=num_tokens)


def _step_seconds(model: StepTimeModel, *, num_computed_tokens: int, num_new_tokens: int) -> float:
    shape = BatchShape()
    shape.add(num_computed_tokens, num_new_tokens, samples=True)
    return model.step_time(shape)


def ms_text(seconds: float) -> str:
    """Return a time for people, in milliseconds of two digits or more."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2g} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"


_KNOWN_STEPS = 16
_MOST_WRONG = 8.0
"""How many times too long a model may predict before it has seen so many steps. From then on it is believed;
but a machine may become as fast again as it once was."""
_ROOM = 1.5
"""Over what an idle replica is predicted to take, to ask for: 1.25 for the margins of an admission, and more
for a model that is wrong."""


class IdleMiss(NamedTuple):
    """An objective that cannot be kept."""

    name: str
    """TTFT, TBT or E2E."""
    stated: float
    """The objective as the request states it, seconds."""
    objective: float
    """What it leaves for the first token, or for each further one, seconds."""
    seconds: float
    """That this token takes on an idle replica."""

    @property
    def enough(self) -> float:
        """Gets an objective that an idle replica would keep, in milliseconds of two digits, rounded up."""
        least = _ROOM * self.stated * self.seconds / self.objective * 1e3
        digit = 10.0 ** max(floor(log10(least)) - 1, 0)
        return ceil(least / digit) * digit

    def __str__(self) -> str:
        what = "each further token" if self.name == "TBT" else "the first token"
        leaves = f"the objective is {ms_text(self.objective)}"
        if self.name == "E2E":
            leaves = f"the E2E objective of {ms_text(self.stated)} leaves it {ms_text(self.objective)}"
        return f"{what} takes about {ms_text(self.seconds)}, {leaves}"


def idle_misses(state: RequestState, cost_model: CostModel) -> list[IdleMiss]:
    """Return the objectives of an arrival that it would miss if nothing else ran or waited."""
    slo, stated = state.slo, state.request.slo
    if stated is None:
        return []
    found, slack = [], 0.0
    objective = slo.ttft_deadline - state.request.arrival
    if objective < inf:
        work = cost_model.seconds(state.num_tokens - state.num_hit_tokens, state.num_hit_tokens)
        first = finish_seconds(cost_model.prefill_share(BatchShape(), inf, objective), work, work)
        if first > objective:
            by_ttft = stated.ttft is not None and stated.ttft <= objective * (1 + 1e-9)
            name, value = ("TTFT", stated.ttft) if by_ttft or stated.e2e is None else ("E2E", stated.e2e)
            found.append(IdleMiss(name, value or objective, objective, first))
        elif stated.ttft is not None and not slo.is_gap_mode:
            slack = stated.ttft - first
    pace, num_tokens = cost_model.alone_seconds, ceil(slo.num_left)
    num_late = num_late_at(pace, slo.tbt_objective, slack, num_tokens - 1)
    if will_stream(state) and num_late * LATE_TOKENS_IN > num_tokens:
        found.append(IdleMiss("TBT", slo.tbt_objective, slo.tbt_objective, pace))
    return found


def may_be_kept(misses: Sequence[IdleMiss], cost_model: CostModel, num_steps: int) -> bool:
    """Whether a request may be in time though it is predicted to be late: its steps would then tell.

    Parameters
    ----------
    num_steps : that the step-time model has seen.
    """
    wrong = _MOST_WRONG if num_steps < _KNOWN_STEPS else cost_model.slowdown
    return all(miss.seconds <= wrong * miss.objective for miss in misses)


def will_stream(state: RequestState) -> bool:
    """Whether it may have a token behind the first."""
    return state.max_total_tokens - state.num_tokens > 1


def explain(misses: Sequence[IdleMiss]) -> str:
    """Return what a client hears of objectives that cannot be kept."""
    reasons = "; ".join(map(str, misses))
    asked = " and ".join(f"{miss.enough:g} ms for {miss.name}" for miss in misses)
    if len(misses) == 1:
        asked = f"{misses[0].enough:g} ms"
    return f"this server cannot keep the objective even when idle: {reasons}; ask for at least {asked}"


def num_late_at(pace: float, tbt: float, slack: float, num_more: int) -> int:
    """Return how many tokens behind the first are late in a stream that has one each `pace` seconds.

    Parameters
    ----------
    slack : by which the first is ahead of its deadline, seconds; 0 where no later one gains by it.
    num_more : tokens behind the first.
    """
    return max(0, num_more - floor((slack + TOLERANCE) / (pace - tbt))) if pace > tbt else 0


class Asked(NamedTuple):
    """What a request asked for, and what became of it."""

    arrival: float
    num_prompt_tokens: int
    num_cached: int
    costs: PrefillCosts
    """Of prompts, as of then."""
    worth: float
    num_tokens: float
    """That its answer was expected to have."""
    slo: SLOState

    @property
    def seconds(self) -> float:
        """Of prefill work."""
        return self.costs.seconds(self.num_prompt_tokens - self.num_cached, self.num_cached)


class ShortSteps:
    """Gives TBT objectives up that are worth less than the prompts which their short steps keep out.

    While some wait that cannot be in time, what has been kept of the last arrivals is held against what steps
    for another objective would serve of them, though they spend no slack. Streams with a shorter one than the
    best bind no step, until that is worth it. A change has to gain more than chance does.

    Parameters
    ----------
    cost_model : plans with the shortest objective that is worth it.

    Attributes
    ----------
    asked : the last arrivals with a TBT objective that a step can keep, or without.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self.asked: deque[Asked] = deque(maxlen=MOST_JOBS)

    def weigh(self, plan: StepPlan) -> None:
        """Choose the shortest objective that is worth keeping, once there are enough arrivals to say.

        Parameters
        ----------
        plan : the queues as they are, at the time of an arrival while some wait that cannot be in time, or
            while an objective is given up.
        """
        cost_model, asked = self._cost_model, self.asked
        if len(asked) < MOST_JOBS or plan.now <= asked[0].arrival:
            return
        tightest, *longer = sorted({each.slo.tbt_objective for each in asked})
        # One that was refused counts until its first token is due.
        due = [each for each in asked if each.slo.last_delivery > -inf or each.slo.ttft_deadline > plan.now]
        kept = sum([each.worth for each in due if not each.slo.is_best_effort])
        chance = hypot(*[each.worth for each in asked])  # by which as many arrivals differ from the next
        most = sum([each.worth for each in asked if each.slo.tbt_objective > tightest])
        if kept + chance >= most and not cost_model.least_tbt:
            return  # no longer steps serve more
        plan.tell_apart()
        served = {tbt: self._served(tbt, plan) for tbt in (tightest, *longer)}
        present = cost_model.least_tbt if cost_model.least_tbt in longer else tightest
        served[present] = max(served[present], kept) + chance
        best = max(served, key=served.__getitem__)  # of equal ones the tightest
        cost_model.least_tbt = best if best > tightest else 0.0

    def _served(self, tbt: float, plan: StepPlan) -> float:
        """Return the worth of the last arrivals that steps of a TBT objective would serve, as a fluid."""
        asked, running = self.asked, decode_shape(plan.running)
        span = plan.now - asked[0].arrival
        # As many streams run as come while each of them gets its tokens.
        num = ceil(min(tbt * sum([each.num_tokens for each in asked]) / span, plan.max_num_seqs))
        context = running.decode_context_tokens * num // max(running.num_decodes, 1)
        decodes = BatchShape.of_decodes(num, context)
        share = self._cost_model.prefill_share(decodes, max(tbt, self._cost_model.of(decodes)), inf).share
        jobs = [DueWork(span, each.seconds, each) for each in asked if each.slo.tbt_objective >= tbt]
        kept, _ = select_feasible(
            jobs, start=0.0, share=share, cost=lambda job: job.seconds / job.state.worth
        )
        return sum([job.state.worth for job in kept])
