"""The number of drafts with the largest goodput."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from onbeat.scheduler.replica.speculation.menu import Ranking
from onbeat.scheduler.replica.speculation.step_cost import StepCost

_PRECISION = 24
"""Of a number of drafts, one in so many; the peak is flat."""


class Choice(NamedTuple):
    """The first drafts of a ranking, and what they do for the step (a named tuple: a step weighs tens)."""

    ranking: Ranking
    num_drafts: int
    gain: float
    """Worth of the tokens that they are expected to bring."""
    seconds: float
    """The step's time with them; infinite where the plan's budget does not allow it."""
    goodput: float
    """Worth of the step over its time."""


class GoodputSearch:
    """Looks for the best prefix of a ranking with few questions to the step-time model.

    Gains fall along a ranking and time grows, mostly ever faster, so goodput has one peak; but the first
    draft has costs that later ones share. So sizes that double are looked at first, all of them, and then
    the peak beside the best is climbed: some 2 log2(n) questions.

    Parameters
    ----------
    ranking : the drafts.
    cost : their time.
    value : worth of the step without drafts.
    num_passes : of the proposer's model.
    """

    def __init__(self, ranking: Ranking, cost: StepCost, *, value: float, num_passes: int) -> None:
        self._ranking = ranking
        self._cost = cost
        self._value = value
        self._num_passes = num_passes
        self._known: dict[int, Choice] = {}

    def best(self, most: int) -> Choice | None:
        """Return the best of 1 to `most` drafts, the fewest of equals; None where the budget allows none."""
        choices: list[Choice] = []
        size = 1
        while size <= most and (not choices or choices[-1].seconds < inf):
            choices.append(self._at(size))
            size = 2 * size if 2 * size <= most or size == most else most
        if not choices or choices[0].seconds == inf:
            return None
        peak = max(range(len(choices)), key=lambda index: choices[index].goodput)
        low = choices[max(0, peak - 1)].num_drafts
        high = choices[min(len(choices) - 1, peak + 1)].num_drafts
        return self._climb(choices[peak], low, high)

    def _climb(self, best: Choice, low: int, high: int) -> Choice:
        """Follow the slope between two sizes to the peak, if it is above the best known."""
        while high - low > high // _PRECISION:
            middle = (low + high) // 2
            here, next_ = self._at(middle), self._at(middle + 1)
            best = max(best, here, next_, key=lambda choice: (choice.goodput, -choice.num_drafts))
            if here.goodput < next_.goodput:
                low = middle + 1
            else:
                high = middle
        return best

    def _at(self, num_drafts: int) -> Choice:
        choice = self._known.get(num_drafts)
        if choice is None:
            gain, num_rows = self._ranking.first(num_drafts)
            seconds = self._cost.seconds(num_drafts, num_rows, self._num_passes)
            choice = Choice(self._ranking, num_drafts, gain, seconds, (self._value + gain) / seconds)
            self._known[num_drafts] = choice
        return choice
