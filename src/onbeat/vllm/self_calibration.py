"""Measures vLLM's steps from inside its scheduler, while nobody is served.

The steps are those of made-up requests, which vLLM plans, runs and ends like any others: plans of our own
(`compose`) say what each step holds. A real request ends the stage under way at once, and it is begun anew
when nobody is left. So a real request waits for one step at most.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from math import inf
from statistics import median

from onbeat.perfmodel.profile import MeasuredStep
from onbeat.scheduler.replica.parts import QueueOrder
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.filler import RESERVATION
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.server.objectives import RequestObjectives
from onbeat.vllm.batches import BatchLimits, Stage, stages
from onbeat.vllm.impose import Imposed, impose
from onbeat.vllm.made_up import RequestMaker
from onbeat.vllm.steps import EngineSteps, NotedStep
from onbeat.vllm.surface import EngineRequest

logger = logging.getLogger("onbeat.vllm")

ROUNDS = 3
"""Each step is run so often, and the run of median length counts: a stall or a compilation comes once."""
MOST_SECONDS = 30.0
"""After so long no further round is begun."""
LONGEST_STEP = 1.0
"""Seconds. Once two steps in a row take longer, none with as many tokens is measured: requests may wait."""
_MOST_PLANS = 20_000
"""Plans after which it is given up: something does not go on."""

_PREFIX = "onbeat-calibration-"

_Key = tuple[int, int]
"""A stage by its place, and a step of it."""


class SelfCalibration:
    """Runs stages of steps, and keeps what they took. It is the composer of its own plans.

    Parameters
    ----------
    engine : plans for it; its requests are none of those that are served.
    limits : what steps may hold.
    maker : of requests.

    Attributes
    ----------
    is_done, was_given_up : whether all is measured, or it was given up.
    seconds : that it has taken.
    """

    def __init__(self, engine: EngineSteps, limits: BatchLimits, maker: RequestMaker) -> None:
        planner = engine.planner
        planner.policy = dataclasses.replace(planner.policy, composer=self)
        self._engine, self._surface, self._maker = engine, engine.surface, maker
        self._stages = list(enumerate(stages(limits)))
        self._left = deque(self._stages)
        """Stages of the round under way that have yet to be run, the one under way first."""
        self._round = 1
        self._names: list[str] = []
        """Of the requests of the stage under way; empty where none is."""
        self._next_step = 0
        self._planned: _Key | None = None
        """What the plan under way is for."""
        self._keys: dict[int, tuple[NotedStep, _Key]] = {}
        """Steps in flight."""
        self._times: dict[_Key, list[MeasuredStep]] = {}
        self._most_tokens = inf
        self._was_long = False
        self._num_made = self._num_plans = 0
        self.is_done = self.was_given_up = False
        self.seconds = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether made-up requests run, or a step of them does."""
        return bool(self._names or self._keys)

    @property
    def steps(self) -> list[MeasuredStep]:
        """What was measured: of each step, the run of median length."""
        found = []
        for runs in self._times.values():
            middle = median([run.seconds for run in runs])
            found.append(min(runs, key=lambda run: abs(run.seconds - middle)))
        return found

    @property
    def what_was_left_out(self) -> str:
        """Which steps were not measured since they take too long; empty where there were none."""
        if self._most_tokens == inf:
            return ""
        return f"steps of {self._most_tokens:g} tokens take more than {LONGEST_STEP:g} s here"

    def owns(self, request_id: str) -> bool:
        """Whether it has made a request up."""
        return request_id in self._names

    # --- a step ---------------------------------------------------------------------------------------

    def plan(self, now: float) -> Imposed | None:
        """Return the plan of the next step to measure; None where it is not its turn, or all is done."""
        self._num_plans += 1
        if self._num_plans > _MOST_PLANS:
            self.stop()
            logger.warning("step times: measuring them has stopped, and is given up")
        if self.is_done or not (self._names or self._begin_stage()):
            return None
        engine = self._engine
        plan = engine.plan(now)
        engine.commit(plan)
        if plan.is_empty and not engine.in_flight:
            self._end_stage()  # which cannot go on
            return None
        return impose(plan, engine.table, self._surface, lambda state: state.sort_key[1:])

    def note_step(self, output: object, now: float) -> None:
        """Remember a step that vLLM has planned."""
        noted = self._engine.note_step(output, now)
        if noted is not None and self._planned is not None:
            self._keys[id(noted)] = noted, self._planned

    def take(self, output: object, now: float) -> bool:
        """Measure a step whose results vLLM has taken; return whether it was one of its own."""
        taken = self._engine.take(output, now)
        if taken is None:
            return False
        seconds = taken.seconds
        self.seconds += seconds
        _, key = self._keys.pop(id(taken.noted), (None, None))
        if key is not None and seconds > 0:
            self._times.setdefault(key, []).append(MeasuredStep(taken.noted.shape, seconds))
            is_long = seconds > LONGEST_STEP
            if is_long and self._was_long:
                self._most_tokens = min(self._most_tokens, taken.noted.shape.num_new_tokens)
            self._was_long = is_long
        return True

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:  # noqa: ARG002 -- a composer's
        """Fill a plan with the next step of the stage; where that is not to be had, with a later one."""
        stage = self._left[0][1]
        self._planned = None
        while self._next_step < len(stage.steps) and plan.is_empty:
            self._planned = self._left[0][0], self._next_step
            for place, num in stage.steps[self._next_step]:
                state = self._engine.table.states.get(self._names[place])
                if state is not None:
                    _give(plan, state, num)
            self._next_step += 1

    def commit(self, plan: StepPlan) -> None:
        """Do nothing: a plan of it changes nothing else."""

    # --- stages ---------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Let a real request have the machine; the stage is begun anew later."""
        self._end_requests()

    def stop(self) -> None:
        """Give it up for good."""
        self.is_done = self.was_given_up = True
        self._end_requests()

    def take_in(self, request: EngineRequest, now: float) -> None:
        """Follow a request of its own that vLLM has taken."""
        self._engine.add(request, self._engine.table.asked(request, RequestObjectives(), now), now)

    def _begin_stage(self) -> bool:
        """Send the requests of the next stage; return whether there are any."""
        if self._keys or self._surface.scheduler.requests:
            return False  # steps in flight, or somebody is served
        while self._left and self._left[0][1].largest >= self._most_tokens:
            self._left.popleft()
        if not self._left and not self._begin_round():
            self.is_done = True
            return False
        stage: Stage = self._left[0][1]
        self._next_step = 0
        for num_prompt in stage.prompts:
            self._num_made += 1
            self._names.append(f"{_PREFIX}{self._num_made}")
            request = self._maker.make(self._names[-1], num_prompt, stage.num_output)
            self._surface.scheduler.add_request(request)
        return True

    def _begin_round(self) -> bool:
        if self._round == ROUNDS or self.seconds > MOST_SECONDS:
            return False
        self._round += 1
        self._left.extend(stage for stage in self._stages if stage[1].largest < self._most_tokens)
        return bool(self._left)

    def _end_stage(self) -> None:
        self._end_requests()
        self._left.popleft()

    def _end_requests(self) -> None:
        names, self._names = self._names, []
        for name in names:
            if name in self._surface.scheduler.requests:
                self._surface.end(name)
            self._engine.forget(name)


def is_made_up(request_id: str) -> bool:
    """Whether a request is one that nobody has sent."""
    return request_id.startswith(_PREFIX)


def _give(plan: StepPlan, state: RequestState, num: int) -> None:
    """Give a request its tokens of a step, as far as there is room."""
    if state.num_in_flight_tokens and state.will_be_full:
        return
    if state.status is not RequestStatus.RUNNING:
        plan.admit(state, [], min(num, state.num_tokens), RESERVATION)
        return
    wanted = state.num_wanted_tokens
    if wanted > 1:
        plan.chunks.append((state, min(num, wanted)))
        plan.num_tokens_left -= min(num, wanted)
    elif wanted == 1 and (not plan.num_growing([state]) or plan.take_block()):
        plan.decodes.append(state)
        plan.num_tokens_left -= 1
