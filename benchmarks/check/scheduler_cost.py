"""What planning costs: `schedule`, `update`, `add` and `load`, by the batch and by the queue.

    python -m benchmarks.check.scheduler_cost [--states full urgent patient full-patient] [--runs 3]
        [--json FILE]

`full`: every slot is taken, and every row decodes. The queue behind a token budget grows by a factor of
1,000: the cost of a step may grow with the batch, not with the queue. `urgent`: slots are free, and the
waiting prompts cannot all be in time, so each step sorts them out. `patient`: slots are free, and 100,000
wait that all have an hour; `full-patient`: the same with every slot taken.

All requests have objectives. Whoever is admitted or given up is replaced, so that batch and queue keep their
size. Steps last as long as the model says, so that each run of a case decides the same: of each call the
shortest time of several runs is taken, which other load on the machine disturbs least.

Policies that plan with predicted times get the roofline of Mistral-7B-v0.3 on an A100-80, which learns.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from onbeat.core.request import Request, SamplingParams
from onbeat.core.settled_memory import settled_memory
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import BatchShape, ModelRunnerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.simulation_config import make_scheduler

NUM_STEPS = 400
NUM_WARM_UP_STEPS = 300
"""Until streams have spent the slack that they earned while the batch filled."""
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 1500
STATES = ("full", "urgent", "patient", "full-patient")
OBJECTIVES = SLO(ttft=2.0, tbt=0.1)
"""About half of a queue of 256 can be in time."""
PATIENT = SLO(ttft=3600.0, tbt=0.1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A state in which steps are planned."""

    policy: str
    num_running: int = 256
    num_waiting: int = 0
    state: str = "full"
    """One of `STATES`."""


@dataclass(frozen=True)
class Cost:
    """Microseconds."""

    policy: str
    state: str
    num_running: int
    num_waiting: int
    schedule_us: float
    schedule_us_p99: float
    update_us: float
    total_us_p99: float
    add_us: float
    add_us_p99: float
    load_us: float
    load_us_p99: float


CASES = [
    *(Case(policy=policy) for policy in POLICIES),
    *(Case(policy="sarathi", num_waiting=num) for num in (100, 10_000)),
    *(Case(policy="sarathi", num_running=num) for num in (32, 64, 128, 512)),
    *(Case(policy=policy, num_running=64, num_waiting=100) for policy in ("sarathi", "slo")),
    Case(policy="slo", num_waiting=256),
    Case(policy="slo", num_waiting=256, state="urgent"),
    Case(policy="slo", num_waiting=100_000, state="patient"),
    Case(policy="slo", num_waiting=100_000, state="full-patient"),
]


class Bench:
    """A scheduler that is kept in one state, and the times that its calls take."""

    def __init__(self, case: Case, step_time: StepTimeModel) -> None:
        self._case = case
        self._model = step_time
        num_seqs = case.num_running if case.state.startswith("full") else 2 * case.num_running
        config = SchedulerConfig(
            num_blocks=128 * num_seqs,
            max_num_seqs=num_seqs,
            max_model_len=2048,
            max_num_batched_tokens=max(2048, num_seqs),
            policy=case.policy,
        )
        self.scheduler = make_scheduler(config, step_time)
        self.now = 0.0
        self.schedule_times: list[float] = []
        self.update_times: list[float] = []
        self.add_times: list[float] = []
        self.load_times: list[float] = []
        self._ids = count()
        self._slo = OBJECTIVES
        self._fill_batch()

    def run(self) -> list[list[float]]:
        """Return the seconds of each `schedule`, `update`, `add` and `load`."""
        if self._case.state.endswith("patient"):
            self._slo = PATIENT
        self._fill_queue()
        for _ in range(NUM_WARM_UP_STEPS):
            self._step()
            self._keep()
        for times in (self.schedule_times, self.update_times, self.add_times, self.load_times):
            times.clear()
        while len(self.schedule_times) < NUM_STEPS:
            self.add_times.append(self._time_add())
            self._step()
            self._keep()
        return [self.schedule_times, self.update_times, self.add_times, self.load_times]

    def _fill_batch(self) -> None:
        """Let as many requests generate as the case wants.

        With deadlines they come one after the other, so that none has much slack or is late.
        """
        num_running = self._case.num_running
        if POLICIES[self._case.policy].keeps_deadlines:
            for _ in range(num_running):
                self._add()
                self._step()
        else:
            for _ in range(num_running):
                self._add()
        while self._step().num_decodes < num_running:
            pass

    def _make_request(self) -> Request:
        index = next(self._ids)
        return Request(
            request_id=f"r{index}",
            prompt_token_ids=tuple(range(index, index + PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS),
            arrival=self.now,
            slo=self._slo,
            shed=ShedMode.RELEGATE,
        )

    def _add(self) -> None:
        self.scheduler.add(self._make_request(), self.now)

    def _time_add(self) -> float:
        """Return what it takes to add one more request, which then goes."""
        request = self._make_request()
        start = time.perf_counter()
        self.scheduler.add(request, self.now)
        seconds = time.perf_counter() - start
        self.scheduler.abort([request.request_id])
        return seconds

    def _step(self) -> BatchShape:
        start = time.perf_counter()
        scheduled = self.scheduler.schedule(self.now)
        middle = time.perf_counter()
        assert scheduled is not None
        self.now += self._model.step_time(scheduled.shape)
        result = ModelRunnerOutput([[7] for row in scheduled.rows if row.samples])
        before_update = time.perf_counter()
        self.scheduler.update(scheduled, result, self.now)
        end = time.perf_counter()
        self.scheduler.load(self.now)
        self.load_times.append(time.perf_counter() - end)
        self.schedule_times.append(middle - start)
        self.update_times.append(end - before_update)
        return scheduled.shape

    def _keep(self) -> None:
        """Bring batch and queue back to their sizes, with nobody in the queue who was given up."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        surplus = [state.request_id for state in running][self._case.num_running :]
        given_up = [state.request_id for state in waiting.best_effort.first(len(waiting))]
        self.scheduler.abort([*surplus, *given_up])
        self._fill_queue()

    def _fill_queue(self) -> None:
        while len(self.scheduler.waiting) < self._case.num_waiting:
            self._add()


def measure(case: Case, settings: Deployment, num_runs: int) -> Cost:
    """Return what a case costs."""
    runs = []
    for _ in range(num_runs):
        step_time = resolve(settings).step_time  # it learns: each run begins with the same
        with settled_memory():  # as an engine process does
            runs.append(Bench(case, step_time).run())
    schedule, update, add, load = (
        [min(times) for times in zip(*each, strict=True)] for each in zip(*runs, strict=True)
    )
    totals = [a + b for a, b in zip(schedule, update, strict=True)]
    return Cost(
        case.policy,
        case.state,
        case.num_running,
        case.num_waiting,
        quantile_us(schedule, 0.5),
        quantile_us(schedule, 0.99),
        quantile_us(update, 0.5),
        quantile_us(totals, 0.99),
        quantile_us(add, 0.5),
        quantile_us(add, 0.99),
        quantile_us(load, 0.5),
        quantile_us(load, 0.99),
    )


def quantile_us(seconds: list[float], q: float) -> float:
    return sorted(seconds)[int(len(seconds) * q)] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--runs", type=int, default=3, help="of each case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = Deployment(model="mistralai/Mistral-7B-v0.3", device="a100-80-sxm")
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}; microseconds")
    print(
        f"{'policy':14} {'state':>12} {'running':>7} {'waiting':>7} {'schedule':>8} {'p99':>6} {'update':>7} "
        f"{'p99 of both':>11} {'add':>5} {'p99':>6} {'load':>5} {'p99':>6}"
    )
    costs = []
    for case in CASES:
        if case.state not in args.states:
            continue
        cost = measure(case, settings, args.runs)
        costs.append(cost)
        print(
            f"{cost.policy:14} {cost.state:>12} {cost.num_running:7} {cost.num_waiting:7} "
            f"{cost.schedule_us:8.0f} {cost.schedule_us_p99:6.0f} {cost.update_us:7.0f} "
            f"{cost.total_us_p99:11.0f} {cost.add_us:5.0f} {cost.add_us_p99:6.0f} "
            f"{cost.load_us:5.1f} {cost.load_us_p99:6.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
