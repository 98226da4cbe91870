"""What decides on drafts: how many a row can have, how likely they are accepted, and how many pay.

Goodput is the tokens that a step is expected to deliver over the time that it is predicted to take (Liu et
al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", SmartSpec, arXiv
2406.14066): each draft is accepted with probability alpha if those before it were.

What is estimated of a draft is the *conditional* rate of a token: accepted drafts over drafts that had a
chance. A draft behind a rejected one had none, so each row counts its accepted drafts, and one more where one
was rejected. (Accepted over drafted, as SmartSpec's code has it, is biased low for every row with more than
one draft.)

What a draft model has read of the requests, and which of them are worth reading.

A draft model is never told of prompts: a request for which drafts are planned, and with which it is far
behind, it reads instead, so many tokens in a step. That takes time, which the plan of the step has to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from itertools import compress
from math import inf
from typing import NamedTuple

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.view import decode_shape
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.replica.tracker import OutputLengths
from onbeat.scheduler.scheduler_config import SpeculationConfig


class DraftReading:
    """Keeps count of what the draft model has read, going by what was planned.

    What it may have of a prompt from an earlier request is not known here, so that a plan asks for too much
    time rather than for too little.

    Parameters
    ----------
    most : tokens that it reads in a step, over all requests that are more than a block behind; 0 where it
        reads nothing.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lengths = OutputLengths()

    def finish(self, state: RequestState) -> None:
        """Learn how long an answer was."""
        self._lengths.observe(state.request.slo_class, state.num_output_tokens)

    def num_behind(self, state: RequestState) -> int:
        """Return how many tokens the draft model has not seen, the request's last one included."""
        return state.num_tokens + state.num_in_flight_tokens - _num_read(state)

    def is_far(self, state: RequestState, block_size: int) -> bool:
        """Whether a request has to be read before it can have drafts."""
        return self.most > 0 and self.num_behind(state) > block_size

    def fitting(self, states: list[RequestState]) -> list[RequestState]:
        """Return those of which the draft model can read all that it missed in one step, nearest first."""
        num_left, found = self.most, []
        for state in sorted(states, key=self.num_behind):
            num_left -= self.num_behind(state)
            if num_left < 0:
                break
            found.append(state)
        return found

    def worthwhile(self, states: list[RequestState], *, saved: float, per_token: float) -> list[RequestState]:
        """Return the requests for which drafts save more time than reading them takes, nearest first.

        They save it until the answer ends, of which the median is taken; no more are returned than the draft
        model can begin with in one step.

        Parameters
        ----------
        saved : seconds that drafts save with each token of a request.
        per_token : seconds to read one.
        """
        num_left, found = self.most, []
        for state in sorted(states, key=self.num_behind):
            if num_left <= 0:
                break
            limit = max(1, state.max_total_tokens - state.num_tokens)
            num_more = self._lengths.remaining(
                state.request.slo_class, state.num_output_tokens, q=0.5, limit=limit
            )
            if saved * num_more >= per_token * self.num_behind(state):
                found.append(state)
                num_left -= self.num_behind(state)
        return found

    def sums(self, states: Iterable[RequestState], block_size: int) -> tuple[int, int]:
        """Return what a step reads of these, as `BatchShape.num_catch_up_tokens` and `catch_up_pairs`."""
        sums = BatchShape()
        for _, num_read, num_tokens in self.catch_ups(states, block_size):
            sums.add_catch_up(num_read, num_tokens)
        return sums.num_catch_up_tokens, sums.catch_up_pairs

    def count(self, plan: StepPlan) -> None:
        """Count what the draft model reads in a step that is carried out."""
        if not self.most:
            return
        for state in compress(plan.decodes, plan.num_drafts):
            if not self.is_far(state, plan.kv.block_size):
                _set_num_read(state, _num_read(state) + self.num_behind(state))
        for state, num_read, num_tokens in plan.catch_ups:
            _set_num_read(state, num_read + num_tokens)

    def catch_ups(
        self, states: Iterable[RequestState], block_size: int
    ) -> list[tuple[RequestState, int, int]]:
        """Return what a step with drafts for these has the draft model read first: see `StepPlan.catch_ups`.

        Of those that are more than a block behind, nearest first.
        """
        num_left, chunks = self.most, []
        far = [state for state in states if self.is_far(state, block_size)]
        for state in sorted(far, key=self.num_behind):
            num = min(self.num_behind(state), num_left)
            num_left -= num
            if num:
                chunks.append((state, _num_read(state), num))
        return chunks


def _num_read(state: RequestState) -> int:
    draft = state.draft
    return draft.num_read if draft.read_life == state.num_preemptions else 0


def _set_num_read(state: RequestState, num_tokens: int) -> None:
    state.draft.num_read, state.draft.read_life = num_tokens, state.num_preemptions


KEPT = 0.97
"""Of what is known, with each step: it is 33 steps old in the mean. A fall of the rate from 0.9 to 0.3 is
followed to within 0.05 in 150 steps, as with the 100 steps of SmartSpec's window, and more smoothly."""
LEAST_TRIES = 16.0
"""What is known never counts for less than so many drafts, however old it is, nor does what was configured:
a few drafts of one row say little."""


class AcceptanceRate:
    """The acceptance of a class of requests; that of newer steps counts more.

    Parameters
    ----------
    initial : what to believe at first.
    step : the number of steps so far.
    kept : share of what is known that is kept with each step.
    """

    __slots__ = ("_kept", "_num_accepted", "_num_tried", "_step")

    def __init__(self, initial: float, *, step: int, kept: float) -> None:
        self._num_accepted = initial * LEAST_TRIES
        self._num_tried = LEAST_TRIES
        self._step = step
        self._kept = kept

    @property
    def value(self) -> float:
        """Probability that a draft is accepted if those before it are."""
        return self._num_accepted / self._num_tried

    def observe(self, num_accepted: int, num_tried: int, step: int) -> None:
        """Count a row's drafts.

        Parameters
        ----------
        num_tried : drafts that had a chance.
        step : the number of steps so far.
        """
        if step != self._step:
            kept = max(self._kept ** (step - self._step), LEAST_TRIES / self._num_tried)
            self._num_accepted *= kept
            self._num_tried *= kept
            self._step = step
        self._num_accepted += num_accepted
        self._num_tried += num_tried


class AcceptanceRates:
    """The rates of all classes of objectives. A new class begins with that of all requests together.

    Parameters
    ----------
    initial : acceptance to begin with, in (0, 1).
    kept : share of what is known that is kept with each step.
    """

    def __init__(self, initial: float, *, kept: float = KEPT) -> None:
        self._kept = kept
        self._step = 0
        self._all = AcceptanceRate(initial, step=0, kept=kept)
        self._classes: dict[str | None, AcceptanceRate] = {}

    def begin_step(self) -> None:
        """Let what is known be a step older."""
        self._step += 1

    def of(self, state: RequestState) -> float:
        """Return the probability that a draft for a request is accepted if those before it are."""
        return self._classes.get(state.request.slo_class, self._all).value

    def observe(
        self, state: RequestState, *, num_drafted: int, num_accepted: int, num_available: int | None
    ) -> None:
        """Learn what became of a row that delivered tokens, and how many drafts there are for its next step.

        Parameters
        ----------
        num_drafted : drafts that were verified.
        num_accepted : of these.
        num_available : drafts that are ready for the next step; None where any number can be made.
        """
        state.draft.num_ready = num_available
        if not num_drafted:
            return
        name = state.request.slo_class
        rate = self._classes.get(name)
        if rate is None:
            rate = AcceptanceRate(self._all.value, step=self._step, kept=self._kept)
            self._classes[name] = rate
        num_tried = num_accepted + (num_accepted < num_drafted)
        rate.observe(num_accepted, num_tried, self._step)
        self._all.observe(num_accepted, num_tried, self._step)


def most_drafts(state: RequestState, limit: int) -> int:
    """Return how many drafts may become output of a decode row: none beyond its last token.

    Parameters
    ----------
    limit : most of any row.
    """
    if state.status is not RequestStatus.RUNNING:
        return 0
    num_left = state.max_total_tokens - state.num_tokens - state.num_in_flight_tokens - 1
    if num_left >= limit:
        return limit
    return max(0, num_left)


def fit_blocks(plan: StepPlan, state: RequestState, num_drafts: int, *, num_kept: int = 0) -> int:
    """Return as many of the drafts as find a KV slot without preemption, and set the blocks aside.

    A request's own token already has its slot, in a block that the plan has set aside where it takes one.

    Parameters
    ----------
    num_kept : free blocks that drafts leave to others.
    """
    size, num_allocated = plan.kv.block_size, state.num_allocated_tokens
    if state.num_computed_tokens >= num_allocated:
        num_allocated += size
    while state.num_computed_tokens + 1 + num_drafts > num_allocated:
        if plan.num_blocks_left <= num_kept or not plan.take_block():
            return num_allocated - state.num_computed_tokens - 1
        num_allocated += size
    return num_drafts


PROBE_SHARE = 0.005
"""Of the time, that drafts for the sake of learning may take: where each of them costs its full time, as much
as one step in 200, after which SmartSpec's code looks again."""


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return how many tokens a row with drafts delivers on average, the target's own one included.

    `1 + a + a^2 + ... + a^k = (1 - a^(k+1)) / (1 - a)`; 1 without drafts, k + 1 where all are accepted.

    Parameters
    ----------
    acceptance : a, the share of drafts that are accepted of those whose predecessors were; in [0, 1].
    num_drafts : k.
    """
    if acceptance >= 1.0:
        return 1.0 + num_drafts
    return float((1.0 - acceptance ** (num_drafts + 1)) / (1.0 - acceptance))


def set_drafts(
    plan: StepPlan, num_drafts: list[int], acceptance: AcceptanceRates, *, runs_model: bool
) -> None:
    """Give a plan its drafts and the output tokens that are expected of them.

    Parameters
    ----------
    num_drafts : of each of `plan.decodes`; blocks and tokens for them have been taken already.
    runs_model : whether a model makes them, one pass for each position.
    """
    expected = 0.0
    for state, num in zip(plan.decodes, num_drafts, strict=True):
        if num:
            num_ready = state.draft.num_ready
            expected += expected_tokens(
                acceptance.of(state), num if num_ready is None else min(num, num_ready)
            )
        else:
            expected += state.status is RequestStatus.RUNNING  # a padding row delivers nothing
    plan.expected_tokens = expected
    if any(num_drafts):
        plan.num_drafts = num_drafts
        plan.num_draft_passes = max(num_drafts) if runs_model else 0


class DraftCurve:
    """What k drafts for each row that may have them bring a step.

    Parameters
    ----------
    num_tokens : that the step delivers without drafts.
    rows : (acceptance, most drafts) of each row that may have any.

    Attributes
    ----------
    deepest : most drafts of any row.
    num_rows : rows that may have any.
    num_drafts, gains : at index k, the drafts of all rows and the tokens that these are expected to add, if
        each row has k of them, or as many as it may.
    """

    def __init__(self, num_tokens: float, rows: Iterable[tuple[float, int]]) -> None:
        alike = Counter(rows)
        self.num_tokens = num_tokens
        self.deepest = max((most for _, most in alike), default=0)
        self.num_rows = alike.total()
        self.num_drafts, self.gains = [0], [0.0]
        for k in range(1, self.deepest + 1):
            num, gain = self.num_drafts[-1], self.gains[-1]
            for (acceptance, most), count in alike.items():
                if most >= k:
                    num += count
                    gain += count * acceptance**k
            self.num_drafts.append(num)
            self.gains.append(gain)

    def goodput(self, k: int, seconds: float) -> float:
        """Return tokens a second."""
        return (self.num_tokens + self.gains[k]) / seconds


class Verified(NamedTuple):
    """The drafts of a step (a named tuple: a step weighs some ten of them)."""

    num_drafts: int
    """Of all rows together."""
    num_rows: int
    """Rows that have any."""
    num_passes: int
    """Of the model that makes them; 0 where none runs."""
    catch_up: tuple[int, int] = (0, 0)
    """What that model reads before, as `BatchShape.num_catch_up_tokens` and `catch_up_pairs`."""


class StepCost:
    """The time of a step as a function of its drafts.

    Parameters
    ----------
    shape : the step without drafts; at least one decode row.
    model : predicts.
    limit : seconds that the step may take; infinite where nothing binds it.
    quantile : of the step time that must be within the limit; None is the mean.

    Attributes
    ----------
    plain : seconds without drafts.
    """

    def __init__(
        self, shape: BatchShape, model: StepTimeModel, *, limit: float = inf, quantile: float | None = None
    ) -> None:
        self._shape, self._trial = shape, shape.copy()
        self._model = model
        self._limit = limit
        self._quantile = quantile
        self._known: dict[Verified, float] = {}
        self.plain = model.step_time(shape)

    def seconds(self, drafts: Verified) -> float:
        """Return the step's time with drafts."""
        seconds = self._known.get(drafts)
        if seconds is None:
            seconds = self._known[drafts] = self._model.step_time(self._with(drafts))
        return seconds

    def fits(self, drafts: Verified) -> bool:
        """Return whether the step stays within its limit with them."""
        return self._limit == inf or self._model.step_time(self._with(drafts), self._quantile) <= self._limit

    def _with(self, drafts: Verified) -> BatchShape:
        """Return the step's shape with drafts, to be used at once."""
        base, trial = self._shape, self._trial
        num_drafts = trial.num_draft_tokens = drafts.num_drafts
        trial.num_new_tokens = base.num_new_tokens + num_drafts
        trial.decode_context_tokens = base.decode_context_tokens + num_drafts
        trial.num_lm_head_rows = base.num_lm_head_rows + num_drafts
        trial.num_verify_rows = drafts.num_rows
        trial.num_draft_passes = drafts.num_passes
        trial.num_catch_up_tokens, trial.catch_up_pairs = drafts.catch_up
        return trial


class Drafting(ABC):
    """Decides how many draft tokens each decode row of a step verifies.

    Parameters
    ----------
    config : most drafts of a row, and whether a model makes them.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._acceptance = AcceptanceRates(config.initial_acceptance)
        self._reading = DraftReading(config.max_catch_up_tokens)

    @abstractmethod
    def plan(self, plan: StepPlan) -> None:
        """Set `plan.num_drafts`, one number for each of `plan.decodes`, and `plan.expected_tokens`.

        It comes last: rows, chunks and admissions are settled. Drafts take what they leave: tokens
        (`num_tokens_left`), KV blocks (`take_block`), and time (`budget`). Nothing but the plan changes.
        """

    def commit(self, plan: StepPlan) -> None:
        """Hear that a step with decodes is carried out as planned: count it, and what is read for it."""
        self._acceptance.begin_step()
        self._reading.count(plan)

    def observe(
        self, state: RequestState, *, num_drafted: int, num_accepted: int, num_available: int | None
    ) -> None:
        """Learn what became of a row that delivered tokens.

        Parameters
        ----------
        num_drafted : drafts that were verified; 0 where none were asked for, or none could be proposed.
        num_accepted : of these.
        num_available : drafts that are ready for the request's next step; None where any number can be made.
        """
        self._acceptance.observe(
            state, num_drafted=num_drafted, num_accepted=num_accepted, num_available=num_available
        )

    def finish(self, state: RequestState) -> None:
        """Learn how long an answer was: of a request that has all its tokens."""
        self._reading.finish(state)


class FixedDrafts(Drafting):
    """Plans as many drafts as there may be for every row, whatever the load (vLLM's way)."""

    def plan(self, plan: StepPlan) -> None:
        """Give each row its drafts, first come first."""
        num_drafts = []
        for state in plan.decodes:
            most = max(0, min(most_drafts(state, self._config.num_speculative_tokens), plan.num_tokens_left))
            num_drafts.append(fit_blocks(plan, state, most))
            plan.num_tokens_left -= num_drafts[-1]
        set_drafts(plan, num_drafts, self._acceptance, runs_model=self._config.runs_model)
        plan.catch_ups = self._reading.catch_ups(compress(plan.decodes, num_drafts), plan.kv.block_size)


class GoodputDrafts(Drafting):
    """Gives every decode row of a step the same number of drafts, the one with the largest goodput.

    The number k runs from 0 to `num_speculative_tokens`, and a row has fewer where it needs fewer or the
    proposer has fewer ready. Tokens are expected by the acceptance of the row's class, and the time is that
    of the whole step, passes of a draft model included. Among the k from 1 on goodput has one peak (tokens
    are concave in k, time is not), so that the first k after it ends the search; k = 0 is compared with them
    all, since the first draft has costs that later ones share.

    Prompts in the step count, too. In the time that they take, the decodes alone would get tokens at the
    goodput that is best for them, and a second is worth so many tokens: k maximises the tokens that drafts
    add, less what their time is worth. Without prompts this is the largest goodput itself (Dinkelbach, 1967).
    SmartSpec divides by the time of the whole step instead; then a long prompt makes drafts look cheap.

    Where the policy plans against deadlines, the step stays within its slack with the policy's own quantile;
    and while prompts run or wait, streams with a deadline have none: they need tokens in time, not sooner.
    No request is preempted for a draft, and drafts leave a free block for each row's next token.

    Without drafts nothing is learnt of their acceptance. So a step has one for each row all the same once its
    time, as if none were accepted, is at most `PROBE_SHARE` of that since the last drafts.

    A draft model first has to read a request (`DraftReading`). It does where no prompt waits and drafts would
    save more time until the answer ends than reading takes.

    Parameters
    ----------
    config : most drafts of a row, and whether a model makes them.
    model : predicts the time of steps.
    quantile : of a step's time that must be within the plan's budget; None is the mean.
    """

    def __init__(
        self, config: SpeculationConfig, model: StepTimeModel, *, quantile: float | None = None
    ) -> None:
        super().__init__(config)
        self._model = model
        self._quantile = quantile
        self._without = 0.0
        """Predicted seconds of the steps since the last drafts, of those that could have had some."""

    def plan(self, plan: StepPlan) -> None:
        """Choose the drafts of each decode row. See `Drafting.plan`."""
        most = self._most(plan)
        plan.seconds_without_drafts = self._without
        num_drafts = [0] * len(most)
        if any(most):
            num_drafts = self._choose(plan, most)
        num_kept = len(num_drafts)
        for index, num in enumerate(num_drafts):
            if num:
                num_drafts[index] = fit_blocks(plan, plan.decodes[index], num, num_kept=num_kept)
        plan.num_tokens_left -= sum(num_drafts)
        set_drafts(plan, num_drafts, self._acceptance, runs_model=self._config.runs_model)
        if plan.num_drafts:
            plan.seconds_without_drafts = 0.0
            if plan.slack is not None and plan.budget is not None:
                plan.budget = plan.slack if plan.slack < inf else None
            plan.catch_ups = self._reading.catch_ups(compress(plan.decodes, num_drafts), plan.kv.block_size)

    def commit(self, plan: StepPlan) -> None:
        """Count a step, what is read for it, and the time without drafts. See `Drafting.commit`."""
        super().commit(plan)
        self._without = plan.seconds_without_drafts

    def _most(self, plan: StepPlan) -> list[int]:
        """Return how many drafts each decode row may have."""
        limit, found = self._config.num_speculative_tokens, []
        has_prompts = bool(plan.chunks or plan.admissions or plan.waiting)
        for state in plan.decodes:
            num_ready = state.draft.num_ready
            if num_ready == 0 or (has_prompts and state.slo.next_deadline < inf):
                found.append(0)
            else:
                found.append(most_drafts(state, limit if num_ready is None else min(num_ready, limit)))
        return found

    def _choose(self, plan: StepPlan, most: list[int]) -> list[int]:
        """Return the drafts of each decode row, blocks aside."""
        cost, alone = self._costs(plan)
        plan.seconds_without_drafts += cost.plain
        far = [
            bool(num) and self._reading.is_far(state, plan.kv.block_size)
            for state, num in zip(plan.decodes, most, strict=True)
        ]
        near = [0 if is_far else num for num, is_far in zip(most, far, strict=True)]
        curve = self._curve(plan, near)
        k = self._best(curve, cost, self._rate(curve, alone), plan.num_tokens_left)
        num_drafts = [min(num, k) for num in near]
        if any(far):
            self._read(plan, most, num_drafts, cost)
        if not any(num_drafts):
            self._probe(plan, near if any(near) else most, num_drafts, cost)
        return num_drafts

    def _costs(self, plan: StepPlan) -> tuple[StepCost, StepCost]:
        """Return the cost of a plan's whole step, within its slack, and that of its decode rows alone."""
        # What the budget is below the slack is for prompts, and drafts are weighed against them.
        bound = plan.budget if plan.slack is None else plan.slack
        limit = inf if bound is None else bound
        shape = decode_shape(plan.decodes)
        alone = StepCost(shape, self._model, limit=limit, quantile=self._quantile)
        if not (plan.chunks or plan.admissions):
            return alone, alone
        whole = shape.copy()
        _add_prompts(plan, whole)
        return StepCost(whole, self._model, limit=limit, quantile=self._quantile), alone

    def _curve(self, plan: StepPlan, most: list[int]) -> DraftCurve:
        num_tokens = sum([state.status is RequestStatus.RUNNING for state in plan.decodes])
        of = self._acceptance.of
        rows = [(of(state), num) for state, num in zip(plan.decodes, most, strict=True) if num]
        return DraftCurve(num_tokens, rows)

    def _verified(self, curve: DraftCurve, k: int) -> Verified:
        """Return the drafts of a step whose rows have k each."""
        return Verified(curve.num_drafts[k], curve.num_rows, k if self._config.runs_model else 0)

    def _rate(self, curve: DraftCurve, alone: StepCost) -> float:
        """Return the best goodput of the decodes alone, tokens a second: what a second is worth."""
        best, last = curve.goodput(0, alone.plain), 0.0
        for k in range(1, curve.deepest + 1):
            goodput = curve.goodput(k, alone.seconds(self._verified(curve, k)))
            if goodput < last:
                break
            best, last = max(best, goodput), goodput
        return best

    def _best(self, curve: DraftCurve, cost: StepCost, rate: float, most_tokens: int) -> int:
        """Return the k whose tokens are worth most over their time; the fewest of equals, 0 if none."""
        best_k, best, last = 0, 0.0, -inf
        for k in range(1, curve.deepest + 1):
            drafts = self._verified(curve, k)
            value = curve.gains[k] - rate * (cost.seconds(drafts) - cost.plain)
            if value < last or drafts.num_drafts > most_tokens or not cost.fits(drafts):
                break
            last = value
            if value > best:
                best_k, best = k, value
        return best_k

    def _read(self, plan: StepPlan, most: list[int], num_drafts: list[int], cost: StepCost) -> None:
        """Ask for a draft of each request that the draft model should read: it does that first."""
        if plan.chunks or plan.admissions or plan.waiting:
            return  # requests that wait for their first token come first
        curve = self._curve(plan, most)
        saved = 1.0 / curve.goodput(0, cost.plain) - 1.0 / self._rate(curve, cost)
        if saved <= 0.0:
            return
        states = [
            state
            for state, num in zip(plan.decodes, most, strict=True)
            if num and self._reading.is_far(state, plan.kv.block_size)
        ]
        drafts = self._drafts_of(num_drafts)
        catch_up = self._reading.sums(states, plan.kv.block_size)
        seconds = cost.seconds(drafts._replace(catch_up=catch_up)) - cost.seconds(drafts)
        per_token = seconds / catch_up[0]
        chosen = self._reading.worthwhile(states, saved=saved, per_token=per_token)
        self._add(plan, chosen, num_drafts, cost)

    def _probe(self, plan: StepPlan, most: list[int], num_drafts: list[int], cost: StepCost) -> None:
        """Give rows one draft each, if what that costs has been saved up for."""
        states = [state for state, num in zip(plan.decodes, most, strict=True) if num]
        if self._reading.most:
            states = self._reading.fitting(states)
        self._add(plan, states, num_drafts, cost, most_seconds=PROBE_SHARE * plan.seconds_without_drafts)

    def _add(
        self,
        plan: StepPlan,
        states: list[RequestState],
        num_drafts: list[int],
        cost: StepCost,
        most_seconds: float = inf,
    ) -> None:
        """Give requests one draft each, and the draft model what it has to read for them, where that fits.

        Parameters
        ----------
        most_seconds : that the step may take longer.
        """
        chosen = {id(state) for state in states}
        added = [num or id(state) in chosen for state, num in zip(plan.decodes, num_drafts, strict=True)]
        catch_up = self._reading.sums(compress(plan.decodes, added), plan.kv.block_size)
        drafts = self._drafts_of(added)._replace(catch_up=catch_up)
        if (
            drafts.num_drafts <= plan.num_tokens_left
            and cost.seconds(drafts) - cost.plain <= most_seconds
            and cost.fits(drafts)
        ):
            num_drafts[:] = map(int, added)

    def _drafts_of(self, num_drafts: list[int]) -> Verified:
        """Return the drafts of a step by those of its rows."""
        num_passes = max(num_drafts) if self._config.runs_model else 0
        return Verified(sum(num_drafts), sum(map(bool, num_drafts)), num_passes)


def _add_prompts(plan: StepPlan, shape: BatchShape) -> None:
    """Count a plan's chunks and admissions as the scheduler will."""
    for state, num_new in plan.chunks:
        shape.add(state.num_computed_tokens, num_new, samples=num_new == state.num_wanted_tokens)
    for admission in plan.admissions:
        num_cached = len(admission.cached_block_ids) * plan.kv.block_size
        num_new = admission.num_new_tokens
        shape.add(num_cached, num_new, samples=num_cached + num_new == admission.state.num_tokens)


def make_drafting(
    config: SpeculationConfig, model: StepTimeModel | None, *, quantile: float | None = None
) -> Drafting:
    """Return what plans drafts.

    Parameters
    ----------
    model : predicts step times; None without predictions.
    quantile : of a step's time that the policy plans with; None is the mean.

    Raises
    ------
    ConfigError : adaptive lengths without a step-time model.
    """
    if config.draft_length == "fixed":
        return FixedDrafts(config)
    if model is None:
        raise ConfigError(
            "draft_length 'adaptive' weighs drafts against predicted step times, but nothing predicts them; "
            "give a step-time model, or set draft_length to 'fixed'"
        )
    return GoodputDrafts(config, model, quantile=quantile)
