"""The hard limits of the queue, as the choices of one request meet them."""

from __future__ import annotations

import pytest

from onbeat.core.errors import InvalidRequest, Overloaded
from onbeat.core.request import WholeRequest
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request
from tests.told import numbers


def choices(driver: TimedDriver, name: str, number: int, *, num_prompt: int = 10) -> list[str]:
    """Let a request with so many choices arrive; return those that were refused."""
    whole = WholeRequest(name, number, number * num_prompt)
    ids = [f"{name}-{index}" for index in range(number)]
    for request_id in ids:
        driver.add(make_request(request_id, num_prompt, 4, arrival=driver.now, whole=whole))
    return [request_id for request_id in ids if request_id in driver.rejected]


def make_driver(policy: str, **limits: int) -> TimedDriver:
    return TimedDriver(make_config(policy, max_num_seqs=4, **limits), FakeStepTime())


@pytest.mark.parametrize("policy", ["slo", "sarathi"])
class TestChoicesOfOneRequest:
    def test_an_idle_server_takes_what_runs_and_what_may_wait(self, policy: str) -> None:
        driver = make_driver(policy, max_num_queued_reqs=2)
        assert choices(driver, "a", 6) == []
        driver.serve([])
        assert len(driver.finished) == 6

    def test_more_than_that_could_never_be_taken_and_says_so(self, policy: str) -> None:
        driver = make_driver(policy, max_num_queued_reqs=2)
        assert len(choices(driver, "a", 7)) == 7
        error = driver.rejected["a-0"]
        assert isinstance(error, InvalidRequest)
        assert error.param == "n"
        assert numbers(error)[:3] == [7, 4, 2]

    def test_those_of_others_count(self, policy: str) -> None:
        driver = make_driver(policy, max_num_queued_reqs=2)
        assert choices(driver, "a", 3) == []
        driver.step()
        assert choices(driver, "b", 4) == ["b-0", "b-1", "b-2", "b-3"], "one would run, three wait"
        error = driver.rejected["b-0"]
        assert isinstance(error, Overloaded)
        assert error.reason == "queue_full"
        assert choices(driver, "c", 3) == []
        assert driver.scheduler.num_unfinished == 6

    def test_the_whole_is_taken_or_nothing(self, policy: str) -> None:
        """The first choice was taken for all, whatever others came since."""
        driver = make_driver(policy, max_num_queued_reqs=1)
        whole = WholeRequest("a", 3, 30)
        driver.add(make_request("a-0", 10, 4, whole=whole))
        for name in "bcdef":
            driver.add(make_request(name, 10, 4))
        assert list(driver.rejected) == ["f"]
        for index in (1, 2):
            driver.add(make_request(f"a-{index}", 10, 4, whole=whole))
        assert list(driver.rejected) == ["f"]

    @pytest.mark.parametrize("num_running", [0, 2, 4])
    def test_a_burst_fills_the_free_places_and_the_queue(self, policy: str, num_running: int) -> None:
        driver = make_driver(policy, max_num_queued_reqs=2)
        for index in range(num_running):
            driver.add(make_request(f"r{index}", 10, 40))
        driver.step()
        for index in range(12):
            driver.add(make_request(f"b{index}", 10, 4, arrival=driver.now))
        assert len(driver.rejected) == 12 - 2 - (4 - num_running)

    def test_places_that_memory_does_not_fill_are_not_free(self, policy: str) -> None:
        driver = make_driver(policy, max_num_queued_reqs=2, num_blocks=32, max_model_len=512)
        driver.add(make_request("r", 400, 40))
        driver.step()
        for index in range(4):
            driver.add(make_request(f"b{index}", 200, 4, arrival=driver.now))
        assert list(driver.rejected) == ["b2", "b3"]

    def test_prompt_tokens_are_those_of_all(self, policy: str) -> None:
        driver = make_driver(policy, max_num_queued_tokens=500)
        assert choices(driver, "long", 4, num_prompt=300) == [], "nothing else waits"
        driver.add(make_request("b", 1, 4))
        assert isinstance(driver.rejected["b"], Overloaded)
        driver.step()
        driver.serve([])
        driver.add(make_request("c", 100, 4, arrival=driver.now))
        assert len(choices(driver, "d", 2, num_prompt=250)) == 2
        assert " 500" in str(driver.rejected["d-0"])


def test_replicas_share_the_choices() -> None:
    assert WholeRequest("a", 7, 70).share(3) == WholeRequest("a", 3, 24)
    assert WholeRequest("a", 7, 70).share(0) == WholeRequest("a", 7, 70)
