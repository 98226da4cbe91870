"""As many drafts as pay: goodput under the load and the acceptance of the moment."""

from __future__ import annotations

from heapq import nlargest
from itertools import compress
from math import inf

from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SpeculationConfig
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.speculation.acceptance import AcceptanceBook, RequestRate
from onbeat.scheduler.replica.speculation.decision import decide, decide_none
from onbeat.scheduler.replica.speculation.menu import DraftMenu
from onbeat.scheduler.replica.speculation.offers import StepOffers, find_offers
from onbeat.scheduler.replica.speculation.probing import MOST_PROBES, Probing
from onbeat.scheduler.replica.speculation.reading import DraftReading
from onbeat.scheduler.replica.speculation.rest import Rest
from onbeat.scheduler.replica.speculation.room import fit_blocks
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
_CLEAR_SAVING = 0.02
"""Share of a step that drafts for requests must save for the draft model to read them first."""
_MOST_WORSE = 2
"""Depths in a row without a better goodput, after which deeper ones are not looked at: each adds a pass, and
ever less gain."""


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

    A draft model first has to read a request, which pays where the answer still goes on for long enough.

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
        self._reading = DraftReading(config.max_catch_up_tokens, self._book)
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

    def finish(self, state: RequestState) -> None:
        """Learn how long an answer was. See `Drafting.finish`."""
        self._reading.finish(state)

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
        if plan.slack is not None and plan.budget is not None and any(num_drafts):
            plan.budget = plan.slack
        decide(plan, num_drafts, self._book, runs_model=self._config.runs_model)
        self._reading.count(plan, compress(plan.decodes, num_drafts))

    def _forget_available(self, plan: StepPlan) -> None:
        """Take nothing to be ready of what was ready before a rest."""
        for state in plan.decodes:
            self._book.of(state).num_available = 0

    def _choose(self, plan: StepPlan) -> list[int]:
        """Return the drafts of each decode row, blocks aside."""
        num_drafts = [0] * len(plan.decodes)
        cost, alone = step_costs(plan, self._model, self._quantile)
        limit = self._config.num_speculative_tokens
        offers = find_offers(plan, cost.plain, limit, self._book, self._reading)
        menu, value = DraftMenu(offers.of_rows), offers.worth / _TRUST
        if not (menu.deepest or offers.unread):
            return num_drafts  # deadlines and prompts leave no choice, from which nothing can be learnt
        if alone is not cost:
            value += self._best_rate(menu, alone, value) * max(0.0, cost.plain - alone.plain)
        choice = self._best(menu, cost, value, plan.num_tokens_left)
        saved = 0.0
        if choice is not None and self._pays(choice, cost, value):
            num_drafts = menu.split(choice.ranking, choice.num_drafts)
            self._fit_reading(plan, cost, num_drafts)
            saved = _saved(choice, cost, value)
        self._probing.earn(cost.plain)
        if offers.unread and self._read(cost, value, offers, num_drafts, saved):
            return num_drafts
        self._rest.look(len(num_drafts), saved)
        if offers.idle and self._probing.may_pay:
            self._probe(plan, cost, value, num_drafts, offers.idle)
        return num_drafts

    def _best_rate(self, menu: DraftMenu, alone: StepCost, value: float) -> float:
        """Return the worth that the decodes alone would get a second: what the time of prompts is worth."""
        choice = self._best(menu, alone, value)
        plain = value / alone.plain
        return plain if choice is None else max(plain, choice.goodput)

    def _best(self, menu: DraftMenu, cost: StepCost, value: float, most: int | None = None) -> Choice | None:
        """Return the best number of drafts above 0; None where there are none, or not even one fits."""
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

    def _read(
        self, cost: StepCost, value: float, offers: StepOffers, num_drafts: list[int], saved: float
    ) -> bool:
        """Let the draft model read the requests for which that pays; return whether there are any.

        A request that is asked for drafts is read instead, until the model is through with it.

        Parameters
        ----------
        saved : seconds that the drafts chosen so far save in a step.
        """
        choice = self._best(DraftMenu(offers.with_unread()), cost, value)
        if choice is None:
            return False
        saved = _saved(choice, cost, value) - saved
        catch_up = self._reading.sums([each.state for each in offers.unread], 0)
        seconds = cost.seconds(*self._extent(num_drafts), catch_up)
        if saved < _CLEAR_SAVING * cost.plain or seconds == inf:
            return False
        per_token = (seconds - cost.seconds(*self._extent(num_drafts))) / catch_up[0]
        tokens_a_row = 1.0 + choice.gain / offers.worth
        num_left = self._reading.most
        for each in sorted(offers.unread, key=lambda each: each.num_behind):
            share = saved / len(offers.unread) / tokens_a_row
            if num_left > 0 and self._reading.is_worthwhile(each.state, saved=share, per_token=per_token):
                num_drafts[each.index] = 1
                num_left -= each.num_behind
        return num_left < self._reading.most

    def _fit_reading(self, plan: StepPlan, cost: StepCost, num_drafts: list[int]) -> None:
        """Take drafts back from requests of which the draft model missed something that does not fit in."""
        num_near = plan.block_size
        catch_up = self._reading.sums(compress(plan.decodes, num_drafts), num_near)
        if catch_up[0] and cost.seconds(*self._extent(num_drafts), catch_up) == inf:
            for index, state in enumerate(plan.decodes):
                if num_drafts[index] and self._reading.num_behind(state) > num_near:
                    num_drafts[index] = 0

    def _probe(
        self, plan: StepPlan, cost: StepCost, value: float, num_drafts: list[int], idle: list[int]
    ) -> None:
        """Give rows without drafts one each, if what this may lose has been earned.

        The first pays for what all share, such as a model's pass; as many follow as double the price.
        """
        states, most = plan.decodes, self._reading.most
        rows = [index for index in idle if not num_drafts[index]]
        if most:
            rows = [index for index in rows if self._reading.num_behind(states[index]) <= most]
        rows = nlargest(
            min(MOST_PROBES, plan.num_tokens_left - sum(num_drafts)),
            rows,
            key=lambda index: self._book.of(states[index]).num_idle,
        )
        if not rows:
            return
        extent = self._extent(num_drafts)
        before = cost.seconds(*extent)

        def loss(num: int) -> float:
            """Return the seconds that probes of the first rows are expected to lose; infinite if too many."""
            probed = [states[index] for index in rows[:num]]
            num_all, num_rows, num_passes = extent
            num_passes = max(1, num_passes) if self._config.runs_model else 0
            catch_up = self._reading.sums(probed, plan.block_size)
            after = cost.seconds(num_all + num, num_rows + num, num_passes, catch_up)
            gain = sum(self._book.of(state).acceptance for state in probed) * cost.plain / value
            return max(0.0, after - before - gain)

        num, price = 1, loss(1)
        most_price = min(2 * price, cost.plain)
        while 2 * num <= len(rows) and (more := loss(2 * num)) <= most_price:
            num, price = 2 * num, more
        if self._probing.pay(price):
            for index in rows[:num]:
                num_drafts[index] = 1

    def _extent(self, num_drafts: list[int]) -> tuple[int, int, int]:
        """Return how many drafts there are, in how many rows, and the passes that they take."""
        num_passes = max(num_drafts) if self._config.runs_model else 0
        return sum(num_drafts), sum(map(bool, num_drafts)), num_passes

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


def _saved(choice: Choice, cost: StepCost, value: float) -> float:
    """Return the seconds that drafts save: what their tokens would take without, less what they take."""
    return cost.plain * choice.gain / value - (choice.seconds - cost.plain)
