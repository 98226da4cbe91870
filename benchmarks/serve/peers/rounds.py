"""The measurement itself: rounds in which every server gets every load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .client import LoadClient
from .machine import cpu_time, measure_limits
from .order import order_of_turns
from .stage import Stage, Turn
from .workload import Cell

FIRST_WARM_UPS, WARM_UPS = 8, 2
NOISY_SHARE = 0.05
"""Of all cores; what others may take during a run before it is worth a warning."""

Runs = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What is offered.

    Parameters
    ----------
    salt : of the whole measurement; every round adds its own, so that no prefix cache helps.
    """

    client: LoadClient
    cells: Sequence[Cell]
    salt: str

    def take_turn(self, turn: Turn, name: str, cells: Sequence[Cell], label: str) -> Runs:
        """Warm a server up and offer it loads."""
        salt = f"{self.salt}/{label}"
        num_warm_ups = FIRST_WARM_UPS if turn.is_first else WARM_UPS
        self.client.warm_up(turn.target, cells[0], num_requests=num_warm_ups, salt=f"{salt}/{cells[0].name}")
        return [self._run(turn, name, cell, salt) for cell in cells]

    def _run(self, turn: Turn, name: str, cell: Cell, salt: str) -> dict[str, Any]:
        start = cpu_time(turn.session)
        numbers = self.client.run(turn.target, cell, salt=salt)
        shares = cpu_time(turn.session).shares_since(start)
        run = {"server": name, "load": cell.name, "concurrency": cell.concurrency, **numbers, "cpu": shares}
        print(_line(run), flush=True)
        _check(run)
        return run


def run_rounds(
    stage: Stage,
    loads: Loads,
    names: Sequence[str],
    num_rounds: int,
    on_round: Callable[[Runs, list[dict[str, float]]], None],
) -> None:
    """Do the rounds; `on_round` gets all runs and machine limits so far after each."""
    runs: Runs = []
    limits = [measure_limits()]
    for index in range(num_rounds):
        print(f"round {index + 1} of {num_rounds}; limits {limits[-1]}", flush=True)
        turns = order_of_turns(names, loads.cells, index, changes_with_load=stage.keeps_up)
        for name, cells in turns:
            with stage.turn(name) as turn:
                made = loads.take_turn(turn, name, cells, f"round {index}")
            runs += [run | {"round": index} for run in made]
        limits.append(measure_limits())
        on_round(runs, limits)


def _line(run: dict[str, Any]) -> str:
    def show(key: str) -> str:
        value = run[key]
        return "-" if value is None else f"{value:.0f}" if abs(value) >= 10 else f"{value:.2f}"

    return (
        f"  {run['server']:14} x {run['load']:16} {show('output_throughput'):>5} tok/s, TTFT P50/P99 "
        f"{show('p50_ttft_ms')}/{show('p99_ttft_ms')} ms, TBT P50/P99/max {show('p50_itl_ms')}/"
        f"{show('p99_itl_ms')}/{show('max_itl_ms')} ms, good {show('attainment')}, "
        f"others' CPU {run['cpu']['others']:.0%}"
    )


def _check(run: dict[str, Any]) -> None:
    """Say what makes a run hard to compare; a server that serves nothing ends the program."""
    if not run["completed"]:
        raise SystemExit(f"{run['server']} completed no request: {run['errors']}")
    if run["failed"]:
        print(f"  warning: {run['failed']} requests failed: {run['errors']}", flush=True)
    if run["num_short_answers"]:
        print(f"  warning: {run['num_short_answers']} answers ended before their length", flush=True)
    if run["cpu"]["others"] > NOISY_SHARE:
        print(f"  warning: others took {run['cpu']['others']:.0%} of the CPU time", flush=True)
