"""The measurement itself: rounds in which every server gets every load, as many as the time allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.machine import cpu_time, measure_limits
from peers.order import order_of_turns
from peers.stage import Stage, Turn

from .client import TaskClient
from .servers import names_at
from .tasks import Task, draw_tasks
from .verdict import DISTURBED_SHARE, Cell, is_settled, undisturbed

NUM_TASKS = {1: 4, 2: 6, 4: 8, 8: 16, 16: 24, 32: 32}
"""Of a run, by concurrency: few, so that servers take turns quickly, for the machine changes its speed."""
QUICK_TASKS = {1: 2, 2: 2, 4: 4}
FIRST_WARM_UPS, WARM_UP_TOKENS = 3, 16

Runs = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Parameters
    ----------
    minutes : no round is begun that would end later, going by the latest.
    """

    task_sets: Mapping[str, Sequence[Task]]
    num_tasks: Mapping[int, int]
    rounds: int
    minutes: float
    seed: int

    @property
    def cells(self) -> list[Cell]:
        return [Cell(task_set, level) for task_set in self.task_sets for level in self.num_tasks]

    def tasks(self, cell: Cell, index: int) -> list[Task]:
        """Return what every server is asked in a round of a cell."""
        place = list(self.task_sets).index(cell.task_set)
        key = (self.seed, index, place, cell.concurrency)
        return draw_tasks(self.task_sets[cell.task_set], self.num_tasks[cell.concurrency], *key)


def run_rounds(
    stage: Stage, client: TaskClient, plan: Plan, on_round: Callable[[Runs, list[dict[str, float]]], None]
) -> None:
    """Do the rounds, without the loads that are settled; `on_round` gets all runs and limits after each."""
    runs: Runs = []
    limits = [measure_limits()]
    start, latest = time.monotonic(), 0.0
    for index in range(plan.rounds):
        begin = time.monotonic()
        if index and begin - start + latest > plan.minutes * 60:
            print(f"no time for round {index + 1}", flush=True)
            return
        counting = undisturbed(runs)
        left = [cell for cell in plan.cells if not is_settled(counting, cell)]
        if not left:
            print("all loads are settled", flush=True)
            return
        print(f"round {index + 1} of {plan.rounds}; limits {limits[-1]}", flush=True)
        for position, cell in enumerate(left):
            tasks = plan.tasks(cell, index)
            turns = order_of_turns(
                names_at(cell.concurrency), [cell], index + position, changes_with_load=True
            )
            for name, _ in turns:
                with stage.turn(name) as turn:
                    numbers = take_turn(client, turn, cell, tasks)
                runs.append({"server": name, **cell._asdict(), "round": index, **numbers})
                report_run(runs[-1])
        limits.append(measure_limits())
        latest = time.monotonic() - begin
        on_round(runs, limits)


def take_turn(client: TaskClient, turn: Turn, cell: Cell, tasks: Sequence[Task]) -> dict[str, Any]:
    """Warm a server up and give it its tasks."""
    warm_ups = [
        Task(task.prompt, WARM_UP_TOKENS) for task in tasks[-(FIRST_WARM_UPS if turn.is_first else 1) :]
    ]
    client.run(turn.target, warm_ups, 1)
    start = cpu_time(turn.session)
    numbers = client.run(turn.target, tasks, cell.concurrency)
    return numbers | {"cpu": cpu_time(turn.session).shares_since(start)}


def report_run(run: Mapping[str, Any]) -> None:
    """Print a line, and what makes the run hard to compare; a server that serves nothing ends the program."""
    if not run["completed"]:
        raise SystemExit(f"{run['server']} completed no request: {run['errors']}")
    drafted = run["num_drafted"]
    accepted = f", {run['num_accepted'] / drafted:.0%} of {drafted} drafts accepted" if drafted else ""
    print(
        f"  {run['task_set']:8} x {run['concurrency']:<3} {run['server']:9} "
        f"{run['output_throughput']:6.1f} tok/s, TPOT {run['mean_tpot_ms']:6.2f} ms{accepted}, "
        f"{run['copied_share']:.0%} copied, others' CPU {run['cpu']['others']:.0%}",
        flush=True,
    )
    if run["failed"]:
        print(f"  warning: {run['failed']} requests failed: {run['errors']}", flush=True)
    if run["cpu"]["others"] > DISTURBED_SHARE:
        print("  warning: others disturbed it; the round will not count for this load", flush=True)
