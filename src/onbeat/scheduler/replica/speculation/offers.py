"""What the decode rows of a step could have in drafts, and what their tokens are worth."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.speculation.acceptance import AcceptanceBook, RequestRate
from onbeat.scheduler.replica.speculation.menu import NO_OFFER, Offer, kind_of
from onbeat.scheduler.replica.speculation.probing import PAUSE
from onbeat.scheduler.replica.speculation.reading import DraftReading
from onbeat.scheduler.replica.speculation.room import most_drafts
from onbeat.scheduler.replica.step_plan import StepPlan

_WORTH_BEHIND = 2.0
"""Of a token of a stream that is late, or will be within two steps, beside one of any other."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A request that the draft model has to read before it can draft for it."""

    index: int
    """Of its row."""
    state: RequestState
    num_behind: int
    """Tokens to read."""
    offer: Offer
    """What there would be to take afterwards."""


@dataclass(slots=True)
class StepOffers:
    """What there is to choose from in a step."""

    of_rows: list[Offer]
    worth: float
    """Of the rows' own tokens."""
    unread: list[Unread]
    idle: list[int]
    """Rows that have had no draft for long enough to probe them."""

    def with_unread(self) -> list[Offer]:
        """Return the offers as if the draft model had read all requests."""
        offers = self.of_rows.copy()
        for each in self.unread:
            offers[each.index] = each.offer
        return offers


def find_offers(
    plan: StepPlan, step_seconds: float, limit: int, book: AcceptanceBook, reading: DraftReading
) -> StepOffers:
    """Look at each row of a plan.

    Parameters
    ----------
    step_seconds : of the step without drafts.
    limit : most drafts of a row.
    """
    found = StepOffers([], 0.0, [], [])
    soon = plan.now + 2 * step_seconds
    has_prompts = bool(plan.chunks or plan.admissions or plan.waiting)
    for index, state in enumerate(plan.decodes):
        rate = state.speculation
        if type(rate) is not RequestRate:
            rate = book.of(state)
        is_behind = state.slo.due(state.num_certain_tokens, plan.now) < soon
        worth = _WORTH_BEHIND if is_behind else 1.0
        if state.status is RequestStatus.RUNNING:
            found.worth += worth
        # A stream that has time leaves it to prompts.
        has_time = has_prompts and not is_behind and state.slo.next_deadline < inf
        most = 0 if has_time else _most(state, rate, limit)
        if not most:
            found.of_rows.append(NO_OFFER)
            continue
        offer = most, kind_of(rate.acceptance, worth)
        if rate.num_idle >= PAUSE:
            found.idle.append(index)
        if reading.is_unread(state):
            if not has_prompts:  # those who wait for their own first token come first
                found.unread.append(Unread(index, state, reading.num_behind(state), offer))
            offer = NO_OFFER
        found.of_rows.append(offer)
    return found


def _most(state: RequestState, rate: RequestRate, limit: int) -> int:
    """Return how many drafts a row could have."""
    num_available = rate.num_available
    if num_available is None:
        return most_drafts(state, limit)
    return min(num_available, most_drafts(state, limit)) if num_available else 0
