"""Earliest deadline first, with the chunks of a fixed token budget."""

from __future__ import annotations

import pytest

from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request


def driver_for(*requests, **changes) -> TimedDriver:
    driver = TimedDriver(make_config("edf", **changes), FakeStepTime())
    for request in requests:
        driver.add(request)
    return driver


def rows_of(driver: TimedDriver, index: int = -1) -> dict[str, int]:
    return {row.request_id: row.num_new_tokens for row in driver.log[index].rows}


def test_the_earliest_deadline_is_served_first_whoever_came_first():
    driver = driver_for(
        make_request("loose", 100, 2, slo=SLO(ttft=9.0)),
        make_request("middle", 100, 2, slo=SLO(ttft=3.0), arrival=0.5),
        make_request("tight", 100, 2, slo=SLO(ttft=1.0), arrival=1.0),
    )
    driver.step()
    assert list(rows_of(driver)) == ["tight", "middle", "loose"]


def test_requests_without_a_ttft_objective_come_last_by_arrival():
    driver = driver_for(
        make_request("none-1", 50, 2),
        make_request("tbt", 50, 2, slo=SLO(tbt=0.01), arrival=0.1),
        make_request("none-2", 50, 2, arrival=0.2),
        make_request("loose", 50, 2, slo=SLO(ttft=3600.0), arrival=0.3),
    )
    driver.step()
    assert list(rows_of(driver)) == ["loose", "none-1", "tbt", "none-2"]


def test_an_e2e_objective_is_a_deadline_for_the_first_token_too():
    driver = driver_for(
        make_request("ttft", 50, 10, slo=SLO(ttft=2.0)), make_request("e2e", 50, 10, slo=SLO(e2e=2.0))
    )
    driver.step()
    assert list(rows_of(driver)) == ["e2e", "ttft"]


def test_an_urgent_prompt_waits_for_one_that_has_begun_but_not_for_one_that_has_not():
    budget = {"max_num_batched_tokens": 64}
    driver = driver_for(make_request("a", 100, 9, slo=SLO(ttft=9.0)), **budget)
    driver.add(make_request("b", 100, 9, slo=SLO(ttft=10.0)))
    driver.step()
    driver.add(make_request("urgent", 20, 9, slo=SLO(ttft=0.1)))
    driver.step()
    assert rows_of(driver) == {"a": 36, "urgent": 20, "b": 8}


@pytest.mark.parametrize("budget", [16, 17, 64, 512, 2048])
def test_works_with_any_budget_and_fills_it(budget):
    requests = [
        make_request(f"r{i}", 40 + 60 * i, 8, slo=SLO(ttft=9.0 - i) if i % 3 else None) for i in range(9)
    ]
    driver = driver_for(*requests, max_num_batched_tokens=budget)
    driver.serve([])
    num_prompt = sum(len(request.prompt_token_ids) for request in requests)
    first = sum(rows_of(driver, 0).values())
    assert first == min(budget, num_prompt)
    assert driver.finished == {request.request_id: FinishReason.LENGTH for request in requests}
