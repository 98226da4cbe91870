"""As many drafts as pay: goodput under the load and the acceptance of the moment."""

from __future__ import annotations

from math import inf

from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SpeculationConfig
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.view import next_due
from onbeat.scheduler.replica.speculation.acceptance import AcceptanceBook, RequestRate
from onbeat.scheduler.replica.speculation.decision import decide, decide_none
from onbeat.scheduler.replica.speculation.menu import NO_OFFER, DraftMenu, Offer, kind_of
from onbeat.scheduler.replica.speculation.probing import PAUSE, Probing
from onbeat.scheduler.replica.speculation.rest import Rest
from onbeat.scheduler.replica.speculation.room import fit_blocks, most_drafts
from onbeat.scheduler.replica.speculation.search import Choice, GoodputSearch
from onbeat.scheduler.replica.speculation.step_cost import StepCost, step_costs
from onbeat.scheduler.replica.step_plan import StepPlan

_TRUST = 0.9
"""Of a draft's expected gain that is counted: it is an estimate, and of many the best are those that are too
high. A draft that barely pays is so left out."""
_CLEAR_GAIN = 1.1
"""What drafts bring over what their time is worth, from which on drafting begins; 1 is the break-even."""
_CLEAR_GOODPUT = 1.02
"""Goodput with drafts over that without, from which on it begins, too."""
_MOST_WORSE = 2
"""Depths in a row without a better goodput, after which deeper ones are not looked at: each adds a pass, and
ever less gain."""
_WORTH_BEHIND = 2.0
"""Of a token of a stream that is late, or will be within two steps, beside one of any other."""


class AdaptiveDrafts:
    """Chooses the drafts of each step that maximise its goodput: worth of its tokens over its predicted time.

    Drafts are marginal: of all rows' next drafts the one with the highest chance is the next to be taken
    (SmartSpec, arXiv 2406.14066, with a length for each request), and tokens of streams that are behind
    their deadlines count more (AdaServe, arXiv 2501.12162). The time is that of the whole step, draft
    passes included, and stays within the plan's budget.

    Prompts in the step count, too. In the time that their chunks take, the decodes alone, with the drafts
    that are best for them, would get so many tokens, and this is what the chunks are worth. So a draft
    beside prompts has to save more time of steps to come than it costs in this one: then it brings the end
    of all work closer, prompts that wait included. In a step that prompts have made compute-bound each
    draft costs its full time, and few pay.

    Nobody is preempted for a draft, and drafts leave a free block for each row's next token. Where drafts
    save less than the time it takes to look for them, nobody looks for a while (`Rest`).

    Parameters
    ----------
    config : most drafts of a row, and whether a model makes them.
    model : predicts the time of steps.
    quantile : of a step's time that must be within the plan's budget; None is the mean.
    """

    def __init__(
        self, config: SpeculationConfig, model: StepTimeModel, *, quantile: float | None = None
    ) -> None:
        self._config = config
        self._model = model
        self._quantile = quantile
        self._book = AcceptanceBook(config.initial_acceptance)
        self._is_drafting = False
        self._probing = Probing()
        self._rest = Rest()
        self._looks_up = False
        """Whether drafts are looked up, which takes time: what computes them knows that it can."""

    def observe(
        self, state: RequestState, *, num_drafted: int, num_accepted: int, num_available: int | None
    ) -> None:
        """Learn from a row's drafts. See `Drafting.observe`."""
        self._looks_up |= num_available is not None
        self._book.observe(
            state, num_drafted=num_drafted, num_accepted=num_accepted, num_available=num_available
        )

    def plan(self, plan: StepPlan) -> None:
        """Choose the drafts of each decode row. See `Drafting.plan`."""
        num_rows = len(plan.decodes)
        if self._looks_up and self._rest.goes_on(num_rows, len(plan.admissions)):
            plan.asks_available = False
            decide_none(plan)
            return
        if self._rest.has_ended:
            self._forget_available(plan)
        if plan.num_tokens_left < 1 or not any(map(_may_draft, plan.decodes)):
            self._rest.look(num_rows, 0.0)
            decide_none(plan)
            return
        num_drafts = self._choose(plan)
        self._take_room(plan, num_drafts)
        decide(plan, num_drafts, self._book, runs_model=self._config.runs_model)

    def _forget_available(self, plan: StepPlan) -> None:
        """Take nothing to be ready of what was ready before a rest."""
        for state in plan.decodes:
            self._book.of(state).num_available = 0

    def _choose(self, plan: StepPlan) -> list[int]:
        """Return the drafts of each decode row, blocks aside."""
        num_drafts = [0] * len(plan.decodes)
        cost, alone = step_costs(plan, self._model, self._quantile)
        menu, value, longest_idle = self._menu(plan, cost)
        if not menu.deepest:
            return num_drafts  # deadlines and prompts leave no choice, from which nothing can be learnt
        value /= _TRUST
        if alone is not cost:
            rate = value / alone.plain
            if (choice := self._best(menu, alone, value)) is not None:
                rate = max(rate, choice.goodput)
            value += rate * max(0.0, cost.plain - alone.plain)
        choice = self._best(menu, cost, value, plan.num_tokens_left)
        saved = 0.0
        if choice is not None and self._pays(choice, cost, value):
            num_drafts = menu.split(choice.ranking, choice.num_drafts)
            saved = cost.plain * choice.gain / value - (choice.seconds - cost.plain)
        self._rest.look(len(num_drafts), saved)
        self._probing.earn(cost.plain)
        if longest_idle is not None and not num_drafts[longest_idle]:
            self._probe(plan, cost, value, num_drafts, longest_idle)
        return num_drafts

    def _menu(self, plan: StepPlan, cost: StepCost) -> tuple[DraftMenu, float, int | None]:
        """Return what rows could take, what their own tokens are worth, and which row to probe, if any."""
        offers: list[Offer] = []
        total = 0.0
        limit, book = self._config.num_speculative_tokens, self._book
        soon = plan.now + 2 * cost.plain
        idle_row, longest = None, PAUSE - 1
        has_prompts = bool(plan.chunks or plan.admissions or plan.waiting)
        # A draft model reads a request's prompt before its first draft: not while others wait for their own.
        begins = not (self._config.runs_model and has_prompts)
        for index, state in enumerate(plan.decodes):
            rate = state.speculation
            if type(rate) is not RequestRate:
                rate = book.of(state)
            num_available, worth = rate.num_available, 1.0
            if state.next_deadline < inf:
                if next_due(state) < soon:
                    worth = _WORTH_BEHIND
                elif has_prompts:
                    num_available = 0  # it has time, which prompts can use
            if state.status is RequestStatus.RUNNING:
                total += worth
            if num_available == 0 or not (begins or rate.has_drafted):
                offers.append(NO_OFFER)
                continue
            most = most_drafts(state, limit)
            if num_available is not None and num_available < most:
                most = num_available
            if rate.num_idle > longest and most:
                idle_row, longest = index, rate.num_idle
            offers.append((most, kind_of(rate.acceptance, worth)))
        return DraftMenu(offers), total, idle_row

    def _best(self, menu: DraftMenu, cost: StepCost, value: float, most: int | None = None) -> Choice | None:
        """Return the best number of drafts above 0; None where not even one fits the time budget."""
        deepest, runs_model = menu.deepest, self._config.runs_model
        # Passes of a model come one after another, so its drafts cost by the deepest, too: each is tried.
        best, num_worse = None, 0
        for depth in range(1, deepest + 1) if runs_model else (deepest,):
            ranking = menu.ranking(depth)
            search = GoodputSearch(ranking, cost, value=value, num_passes=depth if runs_model else 0)
            choice = search.best(len(ranking) if most is None else min(most, len(ranking)))
            if choice is None:
                break
            if best is None or choice.goodput > best.goodput:
                best, num_worse = choice, 0
            elif (num_worse := num_worse + 1) == _MOST_WORSE:
                break
        return best

    def _pays(self, choice: Choice, cost: StepCost, value: float) -> bool:
        """Whether drafts are worth their time; clearly so where there were none before, lest it flips."""
        rate = value / cost.plain
        price = (choice.seconds - cost.plain) * rate
        is_clear = choice.gain >= _CLEAR_GAIN * price or choice.goodput >= _CLEAR_GOODPUT * rate
        self._is_drafting = choice.gain >= price and (self._is_drafting or is_clear)
        return self._is_drafting

    def _probe(self, plan: StepPlan, cost: StepCost, value: float, num_drafts: list[int], index: int) -> None:
        """Give a row without drafts one, if what this may lose has been earned."""
        state = plan.decodes[index]
        num, num_rows = sum(num_drafts), sum(map(bool, num_drafts))
        num_passes = max(num_drafts) if self._config.runs_model else 0
        with_probe = cost.seconds(num + 1, num_rows + 1, max(1, num_passes) if self._config.runs_model else 0)
        if num >= plan.num_tokens_left or with_probe == inf:
            return
        before = cost.seconds(num, num_rows, num_passes)
        gain = self._book.of(state).acceptance * cost.plain / value
        if self._probing.pay(max(0.0, with_probe - before - gain)):
            num_drafts[index] = 1

    def _take_room(self, plan: StepPlan, num_drafts: list[int]) -> None:
        """Give drafts their tokens and blocks; fewer where blocks are short."""
        num_kept = len(num_drafts)
        for index, num in enumerate(num_drafts):
            if num:
                fitting = fit_blocks(plan, plan.decodes[index], num, num_kept=num_kept)
                num_drafts[index] = fitting
                plan.num_tokens_left -= fitting


def _may_draft(state: RequestState) -> bool:
    """Whether there may be drafts for a request."""
    rate = state.speculation
    return type(rate) is not RequestRate or rate.num_available != 0
