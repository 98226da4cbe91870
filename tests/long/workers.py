"""Workers that other processes can find."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.planner.parallel import Pool, TaskContext


def square(task: int, context: TaskContext) -> int:
    context.report(f"squaring {task}")
    return task * task


def fail(task: int, context: TaskContext) -> int:
    if task == 1:
        raise ConfigError("task 1 is wrong")
    return task


def die(task: int, context: TaskContext) -> int:
    if task == 1:
        os._exit(9)
    return task


def wait_for_the_end(task: Path, context: TaskContext) -> str:
    """Say that it runs; return when asked to end."""
    task.touch()
    deadline = time.monotonic() + 30
    while not context.is_stopped() and time.monotonic() < deadline:
        time.sleep(0.01)
    return "stopped" if context.is_stopped() else "never asked to stop"


def stop_at_two(task: int, context: TaskContext) -> int:
    if task == 2:
        context.stop()
    return task


def write_own_id(task: Path, context: TaskContext) -> None:
    """Write down which process this is, and go on for ever."""
    task.write_text(str(os.getpid()))
    while not context.is_stopped():
        time.sleep(0.01)


def run_in(num_processes: int, worker: Any, tasks: Any, **heard: Any) -> list[Any]:
    """Run tasks in so many processes, which end with them."""
    with Pool(num_processes) as pool:
        return pool.run(worker, tasks, **heard)
