"""A scheduler under one policy, and what its steps hold."""

from __future__ import annotations

from tests.pure.scheduler.driver import Driver, make_config


def rows_of(driver: Driver, index: int = -1) -> dict[str, int]:
    """Return request id -> new tokens of one step."""
    return {row.request_id: row.num_new_tokens for row in driver.log[index].rows}


def driver_with(policy: str, *requests, **changes) -> Driver:
    driver = Driver(make_config(policy, **changes))
    for request in requests:
        driver.add(request)
    return driver
