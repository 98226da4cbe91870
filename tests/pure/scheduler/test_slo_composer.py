"""Which step the policy plans: its time, who is in it, and what becomes of streams and prompts."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from onbeat.core.request import Request
from onbeat.core.slo import SLO, SLO_MODES, ShedMode, SLOMode
from onbeat.core.step import BatchShape, SchedulerOutput
from onbeat.scheduler.replica.policies import POLICIES, make_slo_policy
from onbeat.scheduler.replica.slo.prefill_work import PrefillWork
from onbeat.scheduler.replica.slo.tuning import SLOTuning
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request

ROOMY = {"num_blocks": 8192, "max_num_seqs": 64}


class Watch(TimedDriver):
    """Remembers when each step was planned."""

    def __init__(self, model: FakeStepTime | None = None, policy: str = "slo", **changes) -> None:
        super().__init__(make_config(policy, **(ROOMY | changes)), model or FakeStepTime())
        self.planned_at: list[float] = []

    def check_step(self, scheduled: SchedulerOutput) -> None:
        super().check_step(scheduled)
        self.planned_at.append(self.now)

    def next_due(self, request_id: str) -> float:
        """Deadline of the next token in `stream` mode."""
        request, times = self.requests[request_id], self.times[request_id]
        slo = request.slo
        assert slo is not None
        due = request.arrival + (slo.ttft or 0.0)
        return max(due, times[0]) + len(times) * (slo.tbt or inf)

    def gaps(self, request_id: str) -> list[float]:
        times = self.times[request_id]
        return [after - before for before, after in pairwise(times)]

    def ttft(self, request_id: str) -> float:
        return self.times[request_id][0] - self.requests[request_id].arrival

    def is_good(self, request_id: str) -> bool:
        """Whether the first token and 99 % of all were in time."""
        if request_id not in self.finished or not self.times[request_id]:
            return False
        late = [lateness > 1e-9 for lateness in self.lateness(request_id)]
        return not late[0] and sum(late) <= 0.01 * len(late)

    def chunk_tokens(self, start: int = 0) -> list[int]:
        """Prompt tokens of each step."""
        return [step.shape.num_new_tokens - step.shape.num_decodes for step in self.log[start:]]


def with_tuning(monkeypatch: pytest.MonkeyPatch, **changes) -> None:
    tuning = SLOTuning(**changes)
    monkeypatch.setitem(POLICIES, "slo", lambda: make_slo_policy(tuning))


def efficient_chunk(model: FakeStepTime) -> int:
    work = PrefillWork()
    work.refresh(model, None)
    return work.efficient_chunk


class LongTail(FakeStepTime):
    """Of a hundred steps more than one takes twice as long, fewer than five do."""

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        return super().step_time(shape) * (2.0 if q is not None and q > 0.95 else 1.0)


class TestBudget:
    def test_is_the_least_slack_of_the_streams(self):
        driver = Watch()
        driver.add(make_request("a", 10, 60, slo=SLO(ttft=0.3, tbt=0.02)))
        driver.add(make_request("b", 10, 60, slo=SLO(ttft=0.05, tbt=0.05)))
        driver.serve([], until=0.01)
        names = set()
        while len(driver.finished) < 1:
            due = {name: driver.next_due(name) for name in ("a", "b")}
            now, first = driver.now, min(due, key=due.__getitem__)
            driver.step()
            assert driver.log[-1].budget_request_id == first
            assert driver.log[-1].budget == pytest.approx(due[first] - now)
            names.add(first)
        assert names == {"a", "b"}

    def test_foresees_rarer_long_steps_in_gap_mode(self, monkeypatch):
        """There one in a hundred is what a P99 allows, and nothing earned makes up for it."""
        careful = {mode: self.most_of_budget(mode) for mode in SLO_MODES}
        with_tuning(monkeypatch, gap_quantile=0.95)
        bold = {mode: self.most_of_budget(mode) for mode in SLO_MODES}
        assert careful["gap"] <= 0.5 + 1e-9
        assert 0.9 < careful["stream"] <= 1 + 1e-9
        assert 0.9 < bold["gap"] <= 1 + 1e-9
        assert careful["stream"] == bold["stream"]

    def most_of_budget(self, mode: SLOMode) -> float:
        """Return the largest share that a step with prompts has taken of its budget."""
        driver = Watch(LongTail(), slo_mode=mode)
        stream = make_request("stream", 10, 200, slo=SLO(ttft=1.0, tbt=0.012))
        prompts = [make_request(f"r{i}", 1000, 2, slo=SLO(ttft=0.3), arrival=0.1) for i in range(5)]
        driver.serve([stream, *prompts])
        return max(
            driver.model.step_time(step.shape) / step.budget
            for step in driver.log
            if step.budget is not None and step.shape.num_new_tokens > step.shape.num_decodes
        )

    def test_is_not_set_by_a_token_that_is_late_whatever_is_done(self):
        driver = Watch()
        driver.add(make_request("late", 10, 900, slo=SLO(ttft=0.1, tbt=0.05)))
        driver.add(make_request("next", 10, 900, slo=SLO(ttft=5.0, tbt=0.05)))
        driver.serve([], until=0.05)
        assert driver.log[-1].budget_request_id == "late"
        driver.now = 2.0
        driver.step()
        assert driver.log[-1].budget_request_id == "next"
        assert driver.log[-1].budget == pytest.approx(driver.next_due("next") - 2.0 - 0.05, rel=0.01)
        assert {row.request_id for row in driver.log[-1].rows} == {"late", "next"}

    @pytest.mark.parametrize("slo", [None, SLO(ttft=3.0)], ids=["none", "no tbt"])
    def test_nothing_is_bounded_where_nothing_is_promised(self, slo):
        driver = Watch()
        driver.serve([make_request(f"r{i}", 300, 5, slo=slo) for i in range(3)])
        assert {(step.budget, step.budget_request_id) for step in driver.log} == {(None, None)}

    def test_a_natural_step_beside_prompts_spends_no_slack_that_was_earned(self):
        """The stream is 3 s ahead, yet its gaps keep to the objective while nobody is in danger."""
        driver = Watch()
        stream = make_request("stream", 10, 200, slo=SLO(ttft=3.0, tbt=0.03))
        prompts = [make_request(f"r{i}", 1000, 2, slo=SLO(ttft=9.0), arrival=0.1) for i in range(5)]
        driver.serve([stream, *prompts])
        assert max(driver.gaps("stream")) <= 0.03 + 1e-9

    def test_no_stream_is_late_beside_long_prompts(self):
        driver = Watch()
        streams = [make_request(f"s{i}", 10, 100, slo=SLO(ttft=0.2, tbt=0.02)) for i in range(5)]
        prompts = [make_request(f"r{i}", 1000, 2, slo=SLO(ttft=0.5), arrival=0.3) for i in range(5)]
        driver.serve([*streams, *prompts])
        assert all(max(driver.lateness(f"s{i}")) <= 1e-9 for i in range(5))

    def test_the_quantile_is_planned_with(self):
        model = FakeStepTime(spread=1.0)
        driver = Watch(model)
        streams = [make_request(f"s{i}", 10, 100, slo=SLO(ttft=0.2, tbt=0.03)) for i in range(5)]
        driver.serve([*streams, make_request("prompt", 1000, 2, slo=SLO(ttft=0.9), arrival=0.1)])
        beside = [step for step in driver.log if step.shape.num_chunks and step.budget is not None]
        assert beside
        assert all(model.step_time(step.shape, 0.95) <= step.budget + 1e-9 for step in beside)


class TestPacing:
    """A stream whose TBT objective leaves far more room than a prompt needs."""

    stream = make_request("stream", 10, 150, slo=SLO(ttft=0.1, tbt=0.1))
    prompt = make_request("prompt", 1000, 2, slo=SLO(ttft=3.0), arrival=0.2)

    def worst_gap(self) -> float:
        driver = Watch()
        driver.serve([self.stream, self.prompt])
        assert driver.ttft("prompt") <= 3.0
        return max(driver.gaps("stream"))

    def test_steps_are_short_while_prompts_have_time(self, monkeypatch):
        paced = self.worst_gap()
        with_tuning(monkeypatch, paces=False)
        unpaced = self.worst_gap()
        assert paced < 0.5 * unpaced
        assert unpaced <= 0.1 + 1e-9

    def test_the_less_time_prompts_have_the_longer_the_steps(self):
        tokens = []
        for ttft in (3.0, 1.0, 0.5):
            driver = Watch()
            prompts = [make_request(f"r{i}", 700, 2, slo=SLO(ttft=ttft), arrival=0.2) for i in range(3)]
            driver.serve([self.stream, *prompts])
            assert all(driver.ttft(f"r{i}") <= ttft for i in range(3))
            tokens.append(max(step.shape.num_new_tokens for step in driver.log[1:] if step.budget))
        assert tokens[0] < tokens[1] <= tokens[2]


class TestDanger:
    def test_steps_grow_beyond_what_is_efficient_only_where_that_saves_prompts(self, monkeypatch):
        with_tuning(monkeypatch, busy=float("inf"))  # a busy replica always takes long steps
        model = FakeStepTime(fixed=1e-3, per_token=1e-4)
        chunk = efficient_chunk(model)
        largest = {}
        for ttft in (9.0, 0.85):
            driver = Watch(model)
            streams = [make_request(f"s{i}", 10, 400, slo=SLO(ttft=0.2, tbt=0.5)) for i in range(40)]
            prompts = [make_request(f"r{i}", 800, 1, slo=SLO(ttft=ttft), arrival=0.5) for i in range(7)]
            driver.serve([*streams, *prompts], until=2.0)
            largest[ttft] = max(driver.chunk_tokens(1))
        assert largest[9.0] <= chunk < largest[0.85]

    def sat_out(self, ttft: float) -> tuple[int, list[bool]]:
        """Steps with prompts but without the streams, and which prompts were in time."""
        driver = Watch()
        slo = SLO(ttft=2.0, tbt=0.05)
        streams = [make_request(f"s{i}", 10, 200, slo=slo) for i in range(40)]
        prompts = [make_request(f"r{i}", 600, 2, slo=SLO(ttft=ttft), arrival=0.5) for i in range(4)]
        driver.serve([*streams, *prompts])
        assert all(max(driver.lateness(f"s{i}")) <= 1e-9 for i in range(40)), "they had that slack"
        beside = [step for step in driver.log[8:] if step.shape.num_chunks]
        return sum(step.shape.num_decodes < 40 for step in beside), [
            driver.is_good(f"r{i}") for i in range(4)
        ]

    def test_streams_with_slack_sit_out_where_that_saves_prompts(self, monkeypatch):
        with_tuning(monkeypatch, reach=0.0)  # long steps would save them, too
        num_steps, good = self.sat_out(0.38)
        assert num_steps > 0
        assert all(good)
        with_tuning(monkeypatch, reach=0.0, skips=False)
        num_steps, good = self.sat_out(0.38)
        assert num_steps == 0
        assert not all(good)

    def test_nobody_sits_out_where_prompts_have_time(self):
        num_steps, good = self.sat_out(5.0)
        assert num_steps == 0
        assert all(good)

    def test_prompts_that_cannot_all_be_in_time_do_not_drag_each_other_down(self, monkeypatch):
        def num_good() -> int:
            driver = Watch()
            driver.serve([make_request(f"r{i}", 900, 1, slo=SLO(ttft=0.5 + 0.01 * i)) for i in range(12)])
            return sum(driver.is_good(f"r{i}") for i in range(12))

        one = FakeStepTime().idle_seconds(900, 0)
        with_triage = num_good()
        assert with_triage >= int(0.5 / one) - 1
        with_tuning(monkeypatch, triages=False)
        assert num_good() <= with_triage


class TestClasses:
    @pytest.mark.parametrize("mode", ["gap", "stream"])
    def test_loose_streams_sit_out_beside_tight_ones_where_not_all_fit(self, mode):
        """All decodes together take 6 ms, longer than the tight ones may wait."""
        driver = Watch(slo_mode=mode)
        loose = [make_request(f"l{i}", 10, 120, slo=SLO(ttft=3.0, tbt=0.2)) for i in range(40)]
        tight = [make_request(f"t{i}", 10, 300, slo=SLO(ttft=3.0, tbt=5e-3), arrival=0.1) for i in range(4)]
        driver.serve([*loose, *tight])
        steps = [step for step in driver.log if step.budget_request_id and step.budget_request_id[0] == "t"]
        assert any(step.shape.num_decodes < 44 for step in steps)
        for index in range(4):
            gaps = sorted(driver.gaps(f"t{index}"))
            assert gaps[int(0.99 * len(gaps))] <= 5e-3 + 1e-9 or mode == "stream"
            assert driver.is_good(f"t{index}")
        for index in range(40):
            assert driver.is_good(f"l{index}"), "they are served all the same"
            assert max(driver.gaps(f"l{index}")) <= 0.2 or mode == "stream"

    def test_streams_come_back_into_a_step_without_prompts_only_as_far_as_they_fit(self):
        """Beside those that are in it already, such as one without a deadline for its tokens."""
        tight, loose = SLO(ttft=0.1, tbt=0.006), SLO(ttft=0.5, tbt=0.05)
        load = [
            make_request("long", 600, 60, slo=tight),
            make_request("best effort", 94, 30, arrival=0.055),
            make_request("loose", 279, 10, arrival=0.119, slo=loose),
            make_request("gaps alone", 405, 13, arrival=0.157, slo=SLO(tbt=0.02)),
            make_request("short", 64, 26, arrival=0.237, slo=tight),
            make_request("first token alone", 16, 13, arrival=0.284, slo=SLO(ttft=0.3)),
            make_request("late", 218, 4, arrival=0.319, slo=tight),
            make_request("last", 242, 1, arrival=0.331, slo=tight),
        ]
        watch = Watch(FakeStepTime(per_context=1e-6, per_pair=1e-7), num_blocks=80, max_num_seqs=16)
        watch.serve(load)  # each step is held against its budget
        assert set(watch.finished) == {request.request_id for request in load}

    def test_where_all_fit_nobody_sits_out(self):
        driver = Watch(slo_mode="gap")
        requests = [make_request(f"l{i}", 10, 50, slo=SLO(ttft=3.0, tbt=0.2)) for i in range(10)]
        requests += [make_request(f"t{i}", 10, 50, slo=SLO(ttft=3.0, tbt=5e-3)) for i in range(4)]
        driver.serve(requests)
        assert len({len(driver.times[request.request_id]) for request in requests}) == 1
        both = [step for step in driver.log if not step.shape.num_chunks]
        assert all(len(step.rows) == 14 for step in both[:40])


def make_arrivals(rate: float, count: int, num_prompt: int, num_output: int, slo: SLO) -> list[Request]:
    """Evenly spread, prompts by turns shorter and longer than the mean."""
    return [
        make_request(
            f"r{index}",
            int(num_prompt * (0.5, 1.5, 0.7, 1.3)[index % 4]),
            num_output,
            arrival=index / rate,
            slo=slo,
            shed=ShedMode.RELEGATE,
        )
        for index in range(count)
    ]


class TestAgainstAFixedBudget:
    """Below capacity, above it, and in a burst; Sarathi with the best of a few token budgets."""

    slo = SLO(ttft=1.0, tbt=0.04)

    def run(self, policy: str, load: list[Request], budget: int = 8192) -> Watch:
        model = FakeStepTime(fixed=4e-3, per_token=5e-5, per_pair=1e-8)
        driver = Watch(model, policy, max_num_batched_tokens=budget)
        driver.serve(load)
        return driver

    def p99_gap(self, driver: Watch) -> float:
        gaps = sorted(gap for request_id in driver.times for gap in driver.gaps(request_id))
        return gaps[int(0.99 * len(gaps))]

    def num_good(self, driver: Watch) -> int:
        return sum(map(driver.is_good, driver.requests))

    def test_below_capacity_gaps_are_shorter_at_the_same_throughput(self):
        load = make_arrivals(8, 80, 500, 30, self.slo)
        ours, fixed = self.run("slo", load), self.run("sarathi", load, 512)
        assert self.num_good(ours) == self.num_good(fixed) == len(load)
        assert ours.now == pytest.approx(fixed.now, rel=0.02)
        assert self.p99_gap(ours) < 0.8 * self.p99_gap(fixed)

    @pytest.mark.parametrize("rate", [40, 60])
    def test_above_capacity_more_requests_are_good(self, rate):
        load = make_arrivals(rate, 200, 500, 30, self.slo)
        ours = self.num_good(self.run("slo", load))
        fixed = max(self.num_good(self.run("sarathi", load, budget)) for budget in (256, 512, 1024))
        assert ours >= 1.3 * fixed
        assert ours >= 0.3 * len(load)

    def test_a_burst_is_taken_without_paying_for_it_before(self):
        """A fixed budget either makes all gaps long, or is too small for the burst."""
        streams = [make_request(f"s{i}", 50, 200, slo=self.slo) for i in range(20)]
        single = [make_request(f"r{i}", 600, 2, slo=self.slo, arrival=0.5 + 0.3 * i) for i in range(3)]
        burst = [make_request(f"b{i}", 600, 2, slo=SLO(ttft=0.75), arrival=1.5) for i in range(18)]

        def gap_before(driver: Watch) -> float:
            ends = [time for time in driver.times["s0"] if 0.4 < time < 1.5]
            return max(after - before for before, after in pairwise(ends))

        ours = self.run("slo", [*streams, *single, *burst])
        assert all(map(ours.is_good, ours.requests))
        for budget in (128, 256, 512, 1024, 2048):
            fixed = self.run("sarathi", [*streams, *single, *burst], budget)
            holds = all(map(fixed.is_good, fixed.requests))
            assert not holds or gap_before(fixed) > 1.5 * gap_before(ours)
