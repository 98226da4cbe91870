"""What is remembered of requests: who is late and what becomes of them, tenants, weights, counters."""

from __future__ import annotations

import pytest

from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.slo import SLO, Fate, ShedMode
from onbeat.core.step_stats import SchedulerState
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.tracker import SLOTracker
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request, make_state

INFEASIBLE = SLO(ttft=2e-3, tbt=0.1)


def delivery(state: RequestState, num_tokens: int) -> RequestOutput:
    return RequestOutput(state.request_id, [1] * num_tokens)


class Watch(TimedDriver):
    """Remembers who was served as best effort."""

    def __init__(self, model: FakeStepTime | None = None, *, depth: int = 1, **changes) -> None:
        config = make_config(**({"num_blocks": 4096, "max_num_seqs": 64} | changes))
        super().__init__(config, model or FakeStepTime(), depth=depth)
        self.relegated: set[str] = set()

    def receive(self, outputs) -> None:
        self.relegated |= {output.request_id for output in outputs if output.fate is Fate.RELEGATED}
        super().receive(outputs)

    @property
    def state(self) -> SchedulerState:
        state = self.scheduler.planner.state()
        assert state is not None
        return state

    def is_good(self, request_id: str) -> bool:
        late = [lateness > 1e-9 for lateness in self.lateness(request_id)]
        return not late[0] and sum(late) <= 0.01 * len(late)

    def attainment(self, requests: list[Request]) -> float:
        return sum(self.is_good(request.request_id) for request in requests) / len(requests)


def relegatable(request_id: str, num_prompt: int, max_tokens: int, **changes) -> Request:
    return make_request(request_id, num_prompt, max_tokens, **({"shed": ShedMode.RELEGATE} | changes))


class TestLost:
    def test_prompts_that_cannot_be_in_time_come_after_those_that_can(self):
        driver = Watch()
        now = driver.now
        late = [relegatable(f"l{i}", 500, 2, slo=INFEASIBLE, arrival=now) for i in range(3)]
        slo = SLO(ttft=1.0, tbt=0.1)
        others = [relegatable(f"r{i}", 500, 2, slo=slo, arrival=now) for i in range(3)]
        driver.serve([*late, *others])
        assert max(driver.times[f"r{i}"][0] for i in range(3)) < min(
            driver.times[f"l{i}"][0] for i in range(3)
        )
        assert driver.relegated == {"l0", "l1", "l2"}
        assert all(driver.finished[f"l{i}"] is FinishReason.LENGTH for i in range(3))

    def test_they_are_served_in_the_order_in_which_they_came(self):
        driver = Watch()
        now = driver.now
        slos = [INFEASIBLE, SLO(ttft=1e-3), SLO(ttft=0.03), None, INFEASIBLE]
        late = [relegatable(f"l{i}", 500, 2, slo=slo, arrival=now + 1e-3 * i) for i, slo in enumerate(slos)]
        busy = relegatable("busy", 900, 2, slo=SLO(ttft=1.0), arrival=now)
        driver.serve([busy, *late])
        assert driver.first_scheduled == ["busy", *(f"l{i}" for i in range(5))]

    def test_time_that_streams_leave_is_theirs(self):
        driver = Watch()
        streams = [relegatable(f"s{i}", 20, 200, slo=SLO(ttft=0.1, tbt=0.01)) for i in range(4)]
        driver.serve([*streams, relegatable("late", 900, 2, slo=INFEASIBLE, arrival=0.1)])
        assert driver.times["late"][-1] < driver.times["s0"][-1]
        assert all(driver.is_good(f"s{i}") for i in range(4))

    def test_a_stream_that_misses_its_objective_bounds_no_step_any_more(self):
        driver = Watch()
        driver.add(relegatable("r", 10, 60, slo=SLO(ttft=0.1, tbt=3e-3)))
        driver.serve([], until=0.05)
        driver.now += 5.0
        driver.serve([])
        assert driver.log[-1].budget is None
        assert driver.relegated == {"r"}
        assert (driver.state.num_missed, driver.state.num_relegated) == (1, 0)
        assert len(driver.outputs["r"]) == 60

    def test_without_an_objective_none_is_missed(self):
        driver = Watch()
        driver.serve([relegatable(f"r{i}", 900, 5) for i in range(5)])
        assert not driver.relegated
        assert driver.state.num_relegated == driver.state.num_missed == 0


class TestTenants:
    slo = SLO(ttft=0.5, tbt=0.1)

    def make_load(self, name: str, rate: float, seconds: float, tenant: str, **changes) -> list[Request]:
        """300 tokens take 36 ms."""
        return [
            relegatable(
                f"{name}{i}", 300, 8, slo=self.slo, tenant=tenant, arrival=(i + 0.5) / rate, **changes
            )
            for i in range(int(rate * seconds))
        ]

    @pytest.mark.parametrize("share", [1.2, 1.6, 2.5])
    def test_one_that_floods_does_not_push_down_the_other(self, share):
        """Both together want more than there is; one sends four times as much as the other."""
        rate = share * 20
        flood = self.make_load("f", 0.8 * rate, 10, "flood")
        small = self.make_load("s", 0.2 * rate, 10, "small")
        driver = Watch()
        driver.serve([*flood, *small])
        assert driver.attainment(small) >= driver.attainment(flood) - 0.05
        assert driver.attainment([*flood, *small]) >= 0.7 / share, "the machine is used all the same"

    def test_its_share_is_larger_than_without_names(self):
        flood = self.make_load("f", 48, 10, "flood")
        small = self.make_load("s", 12, 10, "small")
        nameless = self.make_load("s", 12, 10, "flood")
        apart, together = Watch(), Watch()
        apart.serve([*flood, *small])
        together.serve([*flood, *nameless])
        assert apart.attainment(small) > 1.3 * together.attainment(nameless)

    def test_without_another_tenant_worth_is_weight(self):
        tracker = SLOTracker()
        state = make_state(make_request("r", 10, 1, weight=3.0))
        tracker.tenants.on_arrival(state.request.tenant)
        tracker.on_deliveries([(state, 4096, delivery(state, 4096))], 0.0)
        assert tracker.worth(state) == 3.0

    def test_worth_falls_with_service_and_at_most_fourfold(self):
        tracker = SLOTracker()
        states = [make_state(make_request(name, 8, 1, tenant=name)) for name in ("a", "b")]
        for state in states:
            tracker.tenants.on_arrival(state.request.tenant)
        assert [tracker.worth(state) for state in states] == [1.0, 1.0]
        worths = []
        for _ in range(5):
            tracker.on_deliveries([(states[0], 4096, delivery(states[0], 4096))], 0.0)
            worths.append(tracker.worth(states[0]))
            assert tracker.worth(states[1]) == pytest.approx(1 / worths[-1])
        assert worths == sorted(worths, reverse=True)
        assert worths[0] < 1.0
        assert worths[-1] == pytest.approx(0.25)


def test_of_more_than_can_be_served_the_heavier_are():
    slo = SLO(ttft=0.5, tbt=0.1)
    load = [
        relegatable(f"r{i}", 300, 8, slo=slo, weight=(1.0, 4.0)[i % 2], arrival=i / 50) for i in range(400)
    ]
    driver = Watch()
    driver.serve(load)
    light, heavy = driver.attainment(load[::2]), driver.attainment(load[1::2])
    assert heavy > 1.5 * light
    assert heavy > 0.7


def test_answers_that_may_have_one_token_teach_nothing_of_lengths():
    """They are all that end on a replica that computes prompts for others: L would be 1 there."""
    driver = Watch()
    driver.serve(make_request(f"r{i}", 50, 1 + i % 2, slo=SLO(e2e=10.0)) for i in range(40))
    lengths = driver.scheduler.policy.slo.tracker.lengths
    assert lengths.remaining(None, 0, q=0.01, limit=100) == 2


class TestState:
    def test_counts_what_became_of_requests(self):
        driver = Watch()
        driver.add(relegatable("good", 100, 30, slo=SLO(ttft=1.0, tbt=0.1)))
        driver.step()
        driver.add(relegatable("relegated", 900, 2, slo=INFEASIBLE))
        driver.add(relegatable("refused", 900, 2, slo=INFEASIBLE, shed=ShedMode.REJECT))
        driver.add(relegatable("expires", 100, 2, slo=SLO(ttft=1.0), shed=ShedMode.REJECT))
        driver.now += 3.0
        driver.serve([])
        state = driver.state
        assert list(driver.rejected) == ["refused"]
        assert state.num_rejected == {"slo_unattainable": 1, "deadline_exceeded": 1}
        assert state.num_relegated == 1
        assert driver.scheduler.planner.num_relegated == 1

    def test_gauges_are_those_of_the_next_step(self):
        driver = Watch(max_num_seqs=4)
        slo = SLO(ttft=1.0, tbt=0.05)
        driver.serve([relegatable(f"s{i}", 50, 300, slo=slo) for i in range(3)], until=0.2)
        for index in range(3):
            driver.add(relegatable(f"b{index}", 50, 300, arrival=driver.now))
        driver.step()
        due = [1.0 + 0.05 * len(driver.times[f"s{i}"]) for i in range(3)]
        assert driver.state.decode_slacks == pytest.approx([each - driver.now for each in due])
        assert driver.state.num_best_effort == 3
        driver.serve([])
        assert driver.state.num_best_effort == 0 or driver.state.decode_slacks == []

    def test_a_prompt_of_best_effort_counts_while_it_runs(self):
        driver = Watch(FakeStepTime(), max_model_len=16384)
        driver.add(relegatable("long", 8000, 2))
        counts = []
        while not driver.times.get("long"):
            counts.append(driver.state.num_best_effort)
            driver.step()
        assert len(counts) > 2
        assert set(counts) == {1}

    def test_with_a_step_in_flight_the_next_one_starts_when_that_ends(self):
        driver = Watch(depth=2)
        driver.serve([relegatable("s", 50, 300, slo=SLO(ttft=1.0, tbt=0.05))], until=0.2)
        (in_flight,) = driver.in_flight
        end = driver.now + driver.model.step_time(in_flight.shape)
        due = 1.0 + 0.05 * (len(driver.times["s"]) + 1)
        assert driver.state.decode_slacks == pytest.approx([due - end])

    def test_predicted_wait_is_that_of_the_prompts_in_time(self):
        driver = Watch()
        for index in range(5):
            driver.add(relegatable(f"r{index}", 900, 1, slo=SLO(ttft=5.0)))
        assert driver.state.predicted_wait == 0.0
        driver.step()
        predicted, now = driver.state.predicted_wait, driver.now
        driver.serve([])
        assert predicted == pytest.approx(driver.times["r4"][0], rel=0.25)
        assert now < predicted

    def test_a_policy_without_deadlines_has_no_state(self):
        assert TimedDriver(make_config("sarathi"), FakeStepTime()).scheduler.planner.state() is None
