"""Objectives that even an idle replica cannot keep: waiting does not help, and clients hear what would."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf, log10
from typing import NamedTuple

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.idle_check import ms_text
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.cost_model import CostModel
from onbeat.scheduler.triage import finish_seconds

TRY_AGAIN_SECONDS = 30.0
"""How often an idle replica takes a request that it predicts to be late, where that may be wrong: otherwise a
model that is too pessimistic would reject what could correct it."""
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
    found = []
    objective = slo.ttft_deadline - state.request.arrival
    if objective < inf:
        work = cost_model.seconds(state.num_tokens - state.num_hit_tokens, state.num_hit_tokens)
        first = finish_seconds(cost_model.prefill_share(BatchShape(), inf, objective), work, work)
        if first > objective:
            by_ttft = stated.ttft is not None and stated.ttft <= objective * (1 + 1e-9)
            name, value = ("TTFT", stated.ttft) if by_ttft or stated.e2e is None else ("E2E", stated.e2e)
            found.append(IdleMiss(name, value or objective, objective, first))
    if will_stream(state) and slo.tbt_objective < cost_model.alone_seconds:
        found.append(IdleMiss("TBT", slo.tbt_objective, slo.tbt_objective, cost_model.alone_seconds))
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
