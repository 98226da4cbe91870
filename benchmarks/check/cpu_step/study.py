"""Rounds of steps between measurements of the machine, and steps beside a busy neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .driver import StepDriver, StepSeconds
from .floor import Case
from .limits import LimitsMeter
from .neighbour import Neighbour

WARM_UPS = 2
"""First steps of a case in every round, which are not counted."""
DECODE_STEPS, PREFILL_STEPS, NEIGHBOUR_STEPS = 24, 3, 60


def measure_steps(
    driver: StepDriver, meter: LimitsMeter, cases: Sequence[Case], num_rounds: int
) -> list[dict[str, Any]]:
    """Return of every round the times of all steps, and the machine's limits before and after each case.

    A machine shared with others changes from second to second, so that limits are measured beside each case.
    Every second round takes the cases from the end, so that a drift of the machine favours none.
    """
    rounds = []
    for index in range(num_rounds):
        ordered = cases if index % 2 == 0 else list(reversed(cases))
        steps, limits = {}, {}
        before = meter.measure()
        for case in ordered:
            steps[case.name] = run(driver, case)
            after = meter.measure()
            limits[case.name] = [asdict(before), asdict(after)]
            before = after
        rounds.append({"limits": limits, "steps": steps})
        print(f"round {index + 1} of {num_rounds}, limits {before}", flush=True)
    return rounds


def measure_beside_neighbour(
    driver: StepDriver, cases: Sequence[Case], num_rounds: int
) -> list[dict[str, Any]]:
    """Return of every round the times of steps without and with one busy foreign process."""
    rounds = []
    with Neighbour() as neighbour:
        for index in range(num_rounds):
            quiet = {case.name: run(driver, case, NEIGHBOUR_STEPS) for case in cases}
            with neighbour.busy():
                busy = {case.name: run(driver, case, NEIGHBOUR_STEPS) for case in cases}
            rounds.append({"quiet": quiet, "busy": busy})
            print(f"round {index + 1} of {num_rounds} with a busy neighbour", flush=True)
    return rounds


def run(driver: StepDriver, case: Case, num_steps: int | None = None) -> dict[str, list[float]]:
    """Run a case and return its steps' seconds: whole, and in the forward pass."""
    if num_steps is None:
        num_steps = DECODE_STEPS if case.new_tokens == 1 else PREFILL_STEPS
    steps: list[StepSeconds] = driver.run(case, num_steps + WARM_UPS)[WARM_UPS:]
    return {"whole": [step.whole for step in steps], "forward": [step.forward for step in steps]}
