"""A scheduler that believes something else of its machine than what is true, and learns."""

from __future__ import annotations

import random
from collections.abc import Callable

from onbeat.core.request import Request
from onbeat.core.slo import SLO, Fate
from onbeat.core.step import BatchShape, SchedulerOutput
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, check_budget, make_request


class MisjudgedDriver(TimedDriver):
    """A `TimedDriver` whose scheduler has a model of its own.

    Parameters
    ----------
    model : what steps take.
    factor : what the scheduler's model says before it has learnt, over what `model` says.
    pace : from the number of steps that have run to what the next takes over what `model` says.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        model: FakeStepTime,
        *,
        factor: float = 1.0,
        pace: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        super().__init__(config, Machine(model, pace))
        self.believed = Predictor(
            lambda shape: factor * model.step_time(shape), ResidualModel.log_normal(0.1)
        ).with_learning()
        self.scheduler = Scheduler(config, self.believed)
        self.relegated: set[str] = set()

    def receive(self, outputs) -> None:
        self.relegated |= {output.request_id for output in outputs if output.fate is Fate.RELEGATED}
        super().receive(outputs)

    def check_step(self, scheduled: SchedulerOutput) -> None:
        super(TimedDriver, self).check_step(scheduled)
        check_budget(scheduled, self.believed, self.scheduler.config.slo_mode)

    def is_good(self, request_id: str) -> bool:
        """Whether a request met its objectives, as `metrics.attainment` counts it for streams."""
        if request_id in self.rejected or request_id in self.relegated:
            return False
        late = [seconds > 1e-9 for seconds in self.lateness(request_id)]
        return not late[0] and sum(late) * 100 <= len(late)


class Machine(FakeStepTime):
    """Runs steps: each call is one, with 5 % noise."""

    def __init__(self, model: FakeStepTime, pace: Callable[[int], float]) -> None:
        super().__init__(model.fixed, model.per_token, model.per_context, model.per_pair)
        self._pace = pace
        self._rng = random.Random(0)
        self._num_steps = 0

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        self._num_steps += 1
        noise = self._rng.lognormvariate(0.0, 0.05)
        return super().step_time(shape, q) * self._pace(self._num_steps) * noise


def steady_load(num_requests: int, *, rate: float, slo: SLO, seed: int = 0, **changes) -> list[Request]:
    """Requests of prompts of 20 to 400 tokens and answers of 10 to 60, at random times."""
    rng, arrival, requests = random.Random(seed), 0.0, []
    for index in range(num_requests):
        arrival += rng.expovariate(rate)
        sizes = rng.randint(20, 400), rng.randint(10, 60)
        requests.append(make_request(f"r{index}", *sizes, arrival=arrival, slo=slo, **changes))
    return requests
