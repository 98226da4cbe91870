"""One SHA-256 a policy and case of everything that the scheduler decides, to compare two versions of it.

    python -m benchmarks.check.decision_digest --shared DIRECTORY > before.txt      # with the code as it was
    python -m benchmarks.check.decision_digest --shared DIRECTORY > after.txt       # with the change
    diff before.txt after.txt

DIRECTORY (or the variable ONBEAT_SHARED) has `data/traces`. A line is a policy, a case, how many steps, rows,
preemptions, prompt tokens from the prefix cache and ended requests it had, and the digest: of each step when
it was planned, its rows and blocks, who was admitted and released, and its time budget; of each request when
its tokens came and how it ended. Two minutes.

========  ===========================================================================================
azure-N   400 requests with lengths of Azure's conversations and two classes of objectives, seed N
blocks    the same with so few KV blocks that requests are preempted
declared  the same, where each request declares twice the output that it has
priority  the same under `--scheduling-policy priority` (policies with an order of their own have none)
pipeline  the same in two pipeline stages
prefix    400 requests of Mooncake's conversations, which share prefixes
calls     a scheduler called directly, two steps ahead: random aborts, failures, early ends, shared prefixes
========  ===========================================================================================

Policies that ask for step times get the device's own, and nobody learns: that is the step-time model's
matter, not the scheduler's.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks.policies.register  # noqa: F401 (their decisions are compared, too)
from onbeat.core.errors import RequestRejected
from onbeat.core.options import change, make
from onbeat.core.request import Request, RequestOutput, SamplingParams
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.result import SimulationObserver
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import make_scheduler
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.trace import Trace, read_trace

NUM_REQUESTS = 400
SETTINGS = make(
    Deployment,
    max_queue_seconds=0.0,  # digests are of who runs when, of all requests
    model="meta-llama/Llama-3.1-8B",
    device="a100-80-sxm",
    max_model_len=8192,
    max_num_seqs=64,
)
CLASSES = (
    SLOClass(name="fast", slo=SLO(ttft=0.5, tbt=0.05), share=0.5, weight=2.0),
    SLOClass(name="slow", slo=SLO(ttft=10.0, tbt=0.5), share=0.5),
)
STOP_TOKEN_ID, OTHER_TOKEN_ID = -1, 0


@dataclass
class Digest:
    """What a run decided."""

    num_steps: int = 0
    num_rows: int = 0
    num_ended: int = 0
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    _hash: Any = field(default_factory=sha256)

    def add(self, *values: object) -> None:
        """Count values in; the digits of a number are all there."""
        self._hash.update(repr(values).encode())

    def add_step(self, now: float, step: SchedulerOutput) -> None:
        self.num_steps += 1
        self.num_rows += len(step.rows)
        rows = [tuple(row) for row in step.rows]
        admitted = [
            (each.request.request_id, each.output_token_ids, each.block_ids) for each in step.admitted
        ]
        budget = (step.budget, step.budget_request_id)
        self.add(now, step.step_id, rows, admitted, list(step.released_ids), budget)

    def add_outputs(self, now: float, outputs: Sequence[RequestOutput]) -> None:
        self.num_ended += sum(output.finish_reason is not None for output in outputs)
        self.add(now, [(each.request_id, each.new_token_ids, each.finish_reason) for each in outputs])

    @property
    def counts(self) -> str:
        return (
            f"{self.num_steps} steps {self.num_rows} rows {self.num_preemptions} preemptions "
            f"{self.num_prefix_hits} hits {self.num_ended} ended"
        )

    def __str__(self) -> str:
        return str(self._hash.hexdigest())


class StillModel(StepTimeModel):
    """A step-time model that does not learn, and is its own copy for every replica."""

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model

    def with_learning(self) -> StillModel:
        return self

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        return self._model.step_time(shape, q)

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        return self._model.max_chunk_tokens(shape, cached_tokens, budget, q)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


@contextmanager
def listening(digest: Digest, change: Callable[[Request], Request]) -> Iterator[None]:
    """Have every scheduler tell what it plans, and change the requests that come to it."""
    schedule, add = Scheduler.schedule, Scheduler.add

    def listened(self: Scheduler, now: float) -> SchedulerOutput | None:
        self.table.makes_rows = True  # of simulated decodes, too
        step = schedule(self, now)
        if step is not None:
            digest.add_step(now, step)
        return step

    def changed(self: Scheduler, request: Request, now: float | None = None) -> None:
        add(self, change(request), now)

    Scheduler.schedule, Scheduler.add = listened, changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scheduler.schedule, Scheduler.add = schedule, add  # type: ignore[method-assign]


# Simulated loads


@dataclass(frozen=True)
class Case:
    """A load on a replica."""

    workload: str = "azure2023_conv.csv.gz"
    seed: int = 0
    rate: float = 12.0
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the replica's settings."""
    change: Callable[[Request], Request] = lambda request: request


def with_priority(request: Request) -> Request:
    return replace(request, priority=int(request.request_id) * 7 % 3)


CASES = {
    "azure-0": Case(),
    "azure-1": Case(seed=1),
    "azure-2": Case(seed=2),
    "blocks": Case(changes={"num_blocks": 1500}),
    "declared": Case(changes={"declared_max_tokens": 1024, "num_blocks": 3000}),
    "priority": Case(changes={"scheduling_policy": "priority", "num_blocks": 1500}, change=with_priority),
    "pipeline": Case(changes={"pipeline_parallel": 2}),
    "prefix": Case("mooncake_fast25_conversation_trace.csv.gz", rate=1.5, changes={"max_model_len": 32768}),
}


def make_load(trace: Trace, case: Case, max_model_len: int) -> OfferedLoad:
    """Return rows of a trace with Poisson arrivals: drawn ones, or the first where they share prefixes."""
    rng = np.random.default_rng(case.seed)
    num_tokens = trace.num_prompt_tokens + trace.num_output_tokens
    fitting = np.flatnonzero((trace.num_prompt_tokens > 0) & (num_tokens < max_model_len))
    rows = fitting[:NUM_REQUESTS] if trace.block_ids is not None else rng.choice(fitting, NUM_REQUESTS)
    chosen = trace.take(rows)
    return OfferedLoad(
        name="digest",
        arrivals=gamma_arrivals(NUM_REQUESTS, rate=case.rate, rng=rng),
        num_prompt_tokens=chosen.num_prompt_tokens,
        num_output_tokens=np.maximum(1, chosen.num_output_tokens),
        block_ids=chosen.block_ids,
        block_size=chosen.block_size,
    ).with_classes(CLASSES, seed=case.seed)


def simulated(policy: str, case: Case, trace: Trace) -> Digest:
    """Run a case; return what was decided."""
    digest = Digest()
    simulation = resolve(change(SETTINGS, policy=policy, **case.changes))
    load = make_load(trace, case, simulation.config.scheduler.max_model_len)
    observer = SimulationObserver()  # whose presence has every step planned by itself
    with listening(digest, case.change):
        result = simulate(load, simulation.config, StillModel(simulation.step_time), observer=observer)
    for record in result.records:
        digest.num_ended += 1
        digest.add(record.request_id, list(record.delivery_times), record.end, record.finish_reason)
    digest.num_preemptions = result.total.num_preemptions
    digest.num_prefix_hits = result.total.num_prefix_hits
    return digest


# Direct calls


def called(policy: str) -> Digest:
    """Call a scheduler as an engine might that has two steps in flight; with everything that can happen."""
    digest, rng = Digest(), random.Random(1)
    config = SchedulerConfig(
        num_blocks=40,
        block_size=16,
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=256 if POLICIES[policy].whole_prompts else 48,
        policy=policy,
    )
    model = StillModel(resolve(SETTINGS).step_time)
    scheduler = make_scheduler(config, model)
    in_flight: deque[SchedulerOutput] = deque()
    now, num_added = 0.0, 0
    while num_added < NUM_REQUESTS or scheduler.num_unfinished or in_flight:
        while num_added < NUM_REQUESTS and rng.random() < 0.35:
            add_random(scheduler, digest, rng, num_added, now)
            num_added += 1
        if rng.random() < 0.03 and num_added:
            digest.add_outputs(now, scheduler.abort([str(rng.randrange(num_added))]))
        step = scheduler.schedule(now)
        digest.add_outputs(now, scheduler.planner.take_expired())
        if step is not None:
            digest.add_step(now, step)
            in_flight.append(step)
        if len(in_flight) == 2 or (step is None and in_flight):
            oldest = in_flight.popleft()
            now += model.step_time(oldest.shape)
            digest.add_outputs(now, scheduler.update(oldest, random_results(oldest, rng), now))
        now += 1e-3
        assert now < 1e4, "requests are left but nothing is planned"
    scheduler.check_invariants()
    digest.num_preemptions = scheduler.table.num_preemptions
    digest.num_prefix_hits = scheduler.table.num_prefix_hits
    return digest


def add_random(scheduler: Scheduler, digest: Digest, rng: random.Random, index: int, now: float) -> None:
    """Offer a request whose prompt begins as that of some others."""
    prefix = rng.randrange(3)
    prompt = [prefix] * rng.choice((0, 16, 40, 64)) + [1000 + index] * rng.randint(1, 90)
    request = Request(
        request_id=str(index),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=rng.randint(1, 80), stop_token_ids=(STOP_TOKEN_ID,)),
        arrival=now,
        slo=rng.choice(CLASSES).slo,
    )
    try:
        scheduler.add(request, now)
    except RequestRejected as error:
        digest.add(request.request_id, str(error.code))


def random_results(step: SchedulerOutput, rng: random.Random) -> ModelRunnerOutput:
    """Return tokens, some of which end their request, and now and then a failure."""
    sampled = [[STOP_TOKEN_ID if rng.random() < 0.01 else OTHER_TOKEN_ID] for row in step.rows if row.samples]
    failed = {row.request_id: "failed" for row in step.rows if rng.random() < 0.001}
    return ModelRunnerOutput(sampled, failed=failed or None)


def main() -> None:
    """Print a line a policy and case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = os.environ.get("ONBEAT_SHARED")
    parser.add_argument("--shared", type=Path, default=shared, required=shared is None)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--cases", nargs="+", choices=(*CASES, "calls"), default=(*CASES, "calls"))
    args = parser.parse_args()
    traces = {
        name: read_trace(args.shared / "data" / "traces" / name)
        for name in {CASES[case].workload for case in args.cases if case in CASES}
    }
    for policy in args.policies:
        for name in args.cases:
            if name == "priority" and POLICIES[policy].order is not None:
                continue
            case = CASES.get(name)
            run = called(policy) if case is None else simulated(policy, case, traces[case.workload])
            print(policy, name, run.counts, run, flush=True)


if __name__ == "__main__":
    main()
