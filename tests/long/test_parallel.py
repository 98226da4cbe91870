"""Tasks in this process and in others: the same results, told as they come, and ended when asked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.planner.capacity import CapacityTask, find_capacity
from onbeat.planner.objectives import VIDUR
from onbeat.planner.search import SearchOptions
from tests.cpu.e2e.program import is_running
from tests.long import workers
from tests.pure.planner.fakes import FakeCase, make_load
from tests.waiting import wait_for


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_are_in_the_order_of_the_tasks(jobs: int) -> None:
    events: list[tuple[int, Any]] = []
    results: list[tuple[int, int]] = []
    found = workers.run_in(
        jobs,
        workers.square,
        [3, 1, 2],
        on_event=lambda index, event: events.append((index, event)),
        on_result=lambda index, result: results.append((index, result)),
    )
    assert found == [9, 1, 4]
    assert sorted(results) == [(0, 9), (1, 1), (2, 4)]
    assert sorted(events) == [(0, "squaring 3"), (1, "squaring 1"), (2, "squaring 2")]


def test_two_processes_find_what_one_finds() -> None:
    tasks = [
        CapacityTask(
            case=FakeCase(0.5),
            load=make_load(200, seed=seed),
            objective=VIDUR,
            options=SearchOptions(),
        )
        for seed in range(3)
    ]
    alone = workers.run_in(1, find_capacity, tasks)
    assert None not in alone
    assert workers.run_in(2, find_capacity, tasks) == alone


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_a_task_comes_out(jobs: int) -> None:
    with pytest.raises(ConfigError, match="task 1 is wrong"):
        workers.run_in(jobs, workers.fail, [0, 1, 2])


def test_a_killed_worker_is_an_error_that_says_so() -> None:
    with pytest.raises(OnbeatError, match="fewer --jobs"):
        workers.run_in(2, workers.die, [0, 1, 2])


def test_a_task_that_was_stopped_is_the_last() -> None:
    assert workers.run_in(1, workers.stop_at_two, [1, 2, 3]) == [1, 2, None]


def test_ctrl_c_ends_running_tasks_and_starts_no_others(tmp_path: Path) -> None:
    tasks = [tmp_path / str(index) for index in range(8)]

    def interrupt_when_running() -> None:
        deadline = time.monotonic() + 30
        while not all(task.exists() for task in tasks[:2]) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_when_running).start()
    results = workers.run_in(2, workers.wait_for_the_end, tasks)
    assert results[:2] == ["stopped", "stopped"]
    assert results[-1] is None


def test_workers_end_when_their_parent_was_killed(tmp_path: Path) -> None:
    tasks = [tmp_path / str(index) for index in range(2)]
    parent = multiprocessing.get_context("spawn").Process(
        target=workers.run_in, args=(2, workers.write_own_id, tasks)
    )
    parent.start()
    wait_for(lambda: all(task.exists() and task.read_text() for task in tasks), timeout=30)
    pids = [int(task.read_text()) for task in tasks]
    parent.kill()
    parent.join()
    wait_for(lambda: not any(map(is_running, pids)), timeout=30)
