"""What planning and arrivals cost does not grow with the queue: counted are looks, not seconds."""

from __future__ import annotations

from collections import Counter

import pytest

from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import BatchShape, ModelRunnerOutput
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.step_plan import _MOST_IN_BUCKET as BUCKET
from tests.pure.scheduler.timed import FakeStepTime, make_config, make_request, make_state

NUM_RUNNING = 256
OBJECTIVES = SLO(ttft=3600.0, tbt=0.5)
"""All can be in time, so that none is given up before the plan looks at it."""
LAST = SLO(ttft=3700.0, tbt=0.5)
"""Due after all that wait, so that whoever arrives with it is behind as many as a plan looks at."""


class CountingStepTime(FakeStepTime):
    """Counts what it is asked."""

    num_asked = 0

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        self.num_asked += 1
        return super().step_time(shape, q)


class Looks:
    """Counts how often any attribute of a request's state is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_of: Counter[int] = Counter()
        monkeypatch.setattr(RequestState, "__getattribute__", self._make_reader(), raising=False)

    @property
    def total(self) -> int:
        return self.num_of.total()

    def _make_reader(self):
        num_of, read = self.num_of, object.__getattribute__

        def reader(state: RequestState, name: str) -> object:
            num_of[id(state)] += 1
            return read(state, name)

        return reader


def make_crowded(num_waiting: int, *, has_room: bool) -> Scheduler:
    """Return a scheduler with 256 streams and a queue of prompts of several deadlines, some of none."""
    num_slots = NUM_RUNNING + (64 if has_room else 0)
    config = make_config(num_blocks=64 * num_slots, max_num_seqs=num_slots)
    scheduler = Scheduler(config, CountingStepTime(per_context=0.0))
    for index in range(NUM_RUNNING):
        scheduler.add(make_request(f"s{index}", 8, 500, slo=OBJECTIVES))
    now = 0.0
    while len(scheduler.running) < NUM_RUNNING or scheduler.waiting:
        now = run_step(scheduler, now)
    for index in range(num_waiting):
        slo = None if index % 10 == 0 else SLO(ttft=3600.0 + index % 7, tbt=0.5)
        state = make_state(make_request(f"w{index}", 100, 5, arrival=now, slo=slo, shed=ShedMode.RELEGATE))
        state.sort_key = (state.slo.rank, now, index)
        scheduler.table.add(state)  # what it may expect does not matter here
    return scheduler


def run_step(scheduler: Scheduler, now: float) -> float:
    scheduled = scheduler.schedule(now)
    assert scheduled is not None
    now += 0.05
    result = ModelRunnerOutput([[7] for row in scheduled.rows if row.samples])
    scheduler.update(scheduled, result, now)
    return now


@pytest.mark.parametrize("has_room", [False, True], ids=["every slot is taken", "slots are free"])
def test_a_queue_a_hundred_times_as_long_is_planned_and_joined_at_the_same_cost(has_room, monkeypatch):
    costs = {}
    for num_waiting in (200, 20_000):
        scheduler = make_crowded(num_waiting, has_room=has_room)
        model = scheduler.step_time_model
        assert isinstance(model, CountingStepTime)
        with monkeypatch.context() as patch:
            looks = Looks(patch)
            model.num_asked = 0
            plan = scheduler._compose(scheduler.planner.last_end)
            planning = looks.total, len(looks.num_of), model.num_asked
            assert (len(plan.admissions) > 0) == has_room
            looks.num_of.clear()
            model.num_asked = 0
            new = make_request(
                "new", 100, 5, arrival=scheduler.planner.last_end, slo=LAST, shed=ShedMode.RELEGATE
            )
            scheduler.add(new, scheduler.planner.last_end)
            costs[num_waiting] = [*planning, looks.total, len(looks.num_of), model.num_asked]
    short, long = costs[200], costs[20_000]
    assert all(b <= 1.02 * a + 25 for a, b in zip(short[:3], long[:3], strict=True)), (short, long)
    # Of one bucket of the queue, those are summed up that are due before the new one.
    most = 2 * BUCKET + 100
    assert all(b <= a + most for a, b in zip(short[3:5], long[3:5], strict=True)), (short, long)
    assert long[5] == short[5], "what the model is asked"
