"""The policy against Sarathi-Serve with the best of a few token budgets."""

from __future__ import annotations

import pytest

from onbeat.core.request import Request
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.replica.slo.composer import LONGEST_GAP
from tests.pure.scheduler.slo_watch import Watch
from tests.pure.scheduler.timed import FakeStepTime, make_request


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
    slo = SLO(ttft=1.0, tbt=0.04)

    def run(self, policy: str, load: list[Request], budget: int = 8192, **changes) -> Watch:
        model = FakeStepTime(fixed=4e-3, per_token=5e-5, per_pair=1e-8)
        driver = Watch(model, policy, max_num_batched_tokens=budget, **changes)
        driver.serve(load)
        return driver

    def p99_gap(self, driver: Watch) -> float:
        gaps = sorted(gap for request_id in driver.times for gap in driver.gaps(request_id))
        return gaps[int(0.99 * len(gaps))]

    def num_good(self, driver: Watch) -> int:
        return sum(map(driver.is_good, driver.requests))

    def test_below_capacity_all_are_good_at_the_same_throughput(self):
        load = make_arrivals(8, 80, 500, 30, self.slo)
        ours, fixed = self.run("slo", load), self.run("sarathi", load, 512)
        assert self.num_good(ours) == self.num_good(fixed) == len(load)
        assert ours.now == pytest.approx(fixed.now, rel=0.02)
        assert max(gap for name in ours.times for gap in ours.gaps(name)) <= LONGEST_GAP * 0.04

    @pytest.mark.parametrize("rate", [40, 60])
    def test_above_capacity_more_requests_are_good(self, rate):
        load = make_arrivals(rate, 200, 500, 30, self.slo)
        ours = self.num_good(self.run("slo", load))
        fixed = max(self.num_good(self.run("sarathi", load, budget)) for budget in (256, 512, 1024))
        assert ours >= 1.3 * fixed
        assert ours >= 0.3 * len(load)

    def test_one_rule_suits_tight_and_loose_objectives(self):
        """A fixed budget either makes tight gaps long, or is too small for a burst beside loose ones."""
        tight = [make_request(f"s{i}", 50, 200, slo=SLO(ttft=1.0, tbt=0.012)) for i in range(20)]
        tight += [make_request(f"r{i}", 600, 2, slo=SLO(ttft=1.0), arrival=0.5 + 0.2 * i) for i in range(3)]
        loose = [make_request(f"s{i}", 50, 200, slo=SLO(ttft=1.0, tbt=0.1)) for i in range(20)]
        loose += [make_request(f"b{i}", 600, 2, slo=SLO(ttft=0.75), arrival=1.2) for i in range(18)]

        def holds(policy: str, budget: int) -> list[bool]:
            drivers = [self.run(policy, load, budget, slo_mode="gap") for load in (tight, loose)]
            return [all(map(driver.has_kept_gaps, driver.requests)) for driver in drivers]

        assert holds("slo", 8192) == [True, True]
        assert [holds("sarathi", budget) for budget in (128, 256, 512, 1024, 2048)] == [
            [True, False],
            *[[False, True]] * 4,
        ]
