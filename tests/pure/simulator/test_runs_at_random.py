"""Runs of steps and streams in lockstep leave the records of single steps, whatever is simulated.

Each seed is a load, a policy, limits and a fleet. Cases that once told the two ways apart have their tests.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.replica import lockstep
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.scheduler_config import DraftLength, SpeculationConfig
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import FleetChange, KVLink, SimulationConfig
from onbeat.simulator.speculation import Acceptance
from onbeat.workload.job_kinds import JOB_KINDS, draw_jobs, job_load
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from tests.examples import examples
from tests.pure.simulator.loads import ShapeTime, StepByStep, linear_time, make_config, make_load, random_load

OBJECTIVES = (
    *(SLO(), SLO(ttft=0.5, tbt=0.05), SLO(ttft=2.0, tbt=0.02), SLO(tbt=0.009), SLO(ttft=0.1)),
    *(SLO(e2e=3.0), SLO(ttft=0.3, tbt=0.03, e2e=1.5), SLO(ttft=1.0, tbt=0.2)),
)
LONGEST = 240


def random_lengths(draw: Random) -> OfferedLoad:
    """Return requests that come at random, or at ends of steps, some with shared prefixes or priorities."""
    num = draw.choice([3, 8, 20, 40, 80])
    prompts = [draw.randint(1, most) for most in [draw.choice([20, 60, 150])] * num]
    outputs = [draw.randint(1, most) for most in [draw.choice([5, 40, 90])] * num]
    is_even, rate = draw.random() < 0.3, draw.choice([1, 4, 12, 40, 120])
    gaps = [draw.randint(0, 12) / 8 if is_even else draw.expovariate(rate) for _ in range(num)]
    columns: dict[str, Any] = {}
    if draw.random() < 0.4:
        groups = draw.choice([2, 5, 50])
        columns["block_size"] = draw.choice([16, 32])
        columns["ids_cover_output"] = draw.random() < 0.5
        columns["block_ids"] = tuple(
            tuple(1000 * draw.randint(0, groups) + block for block in range(LONGEST // columns["block_size"]))
            for _ in range(num)
        )
    if draw.random() < 0.25:
        columns["priorities"] = np.array([draw.randint(0, 2) for _ in range(num)])
    is_closed = draw.random() < 0.3
    return make_load(prompts, outputs, None if is_closed else np.cumsum(gaps), **columns)


def random_jobs(draw: Random) -> OfferedLoad:
    """Return short jobs, whose calls come when others have ended."""
    rng = np.random.default_rng(draw.randint(0, 1 << 30))
    kind, num = draw.choice(JOB_KINDS), draw.randint(1, 6)
    jobs = draw_jobs(kind, num, rng, deadline=draw.choice([None, 20.0, 200.0]))
    starts = np.cumsum(rng.exponential(draw.choice([0.1, 1.0]), num))
    return job_load(kind, jobs, None if draw.random() < 0.3 else starts)


def random_fleet(draw: Random, limits: dict[str, Any]) -> dict[str, Any]:
    """Return what is around a replica, and what happens to it; the limits of a replica may grow."""
    fleet: dict[str, Any] = {"replicas": draw.choice([1, 1, 1, 2, 3])}
    fleet["router"] = draw.choice(["round-robin", "least-outstanding", "slo", "prefix-affinity"])
    if draw.random() < 0.1:
        return fleet | {"pipeline": 2}
    fleet["steps_ahead"] = draw.choice([0, 0, 1])
    if draw.random() < 0.2:
        fleet["kv_link"] = KVLink(bytes_per_token=1000.0, bandwidth=draw.choice([1e5, 1e7]))
    if draw.random() < 0.15:
        changes = ["0.4 kill 0", "0.7 restart 0", "0.5 scale 2", "1.1 scale 1"]
        texts = sorted(draw.sample(changes, draw.randint(1, 3)))
        parts = [text.split() for text in texts]
        fleet["fleet_changes"] = tuple(FleetChange(float(a), b, int(c)) for a, b, c in parts)  # type: ignore[arg-type]
    elif draw.random() < 0.15:
        lengths: tuple[DraftLength, ...] = ("fixed", "adaptive")
        length = draw.choice(lengths)
        limits["speculation"] = SpeculationConfig(num_speculative_tokens=3, draft_length=length)
        fleet["acceptance"] = Acceptance(rate=draw.choice([0.3, 0.9]))
    return fleet


def random_case(seed: int) -> tuple[OfferedLoad, SimulationConfig, ShapeTime, int]:
    """Return a load, what it runs on, what a step takes, and from how many streams on these are counted."""
    draw = Random(seed)
    has_jobs = draw.random() < 0.1
    load = random_jobs(draw) if has_jobs else random_lengths(draw)
    if not has_jobs and (num := draw.randint(0, 4)):
        has_tenants = draw.random() < 0.3
        classes = tuple(
            SLOClass(
                name=f"c{index}",
                slo=draw.choice(OBJECTIVES),
                share=1 / num,
                tenant=f"t{index}" if has_tenants else None,
                weight=draw.choice([1.0, 1.0, 3.0]),
            )
            for index in range(num)
        )
        load = load.with_classes(classes, seed=seed)
    policy = draw.choice(["slo"] * 6 + sorted(POLICIES))
    limits: dict[str, Any] = {
        "num_blocks": draw.choice([2000, 9000] if has_jobs else [24, 40, 60, 400]),
        "max_num_seqs": draw.choice([2, 4, 8, 32, 64]),
        "slo_mode": draw.choice(["stream", "gap"]),
        "max_model_len": 32_000 if has_jobs else 256,
        "enable_prefix_caching": load.block_ids is not None or draw.random() < 0.8,
    }
    is_slo = policy == "slo"
    limits["shed_order"] = draw.choice(["most", "longest-wait"]) if is_slo else "most"
    ranks = draw.random() < 0.2 and policy not in ("slo", "edf")
    limits["scheduling_policy"] = "priority" if ranks else "fcfs"
    limits["max_num_queued_reqs"] = draw.choice([None, None, None, 1, 10])
    limits["max_queue_seconds"] = draw.choice([None, None, None, 0.2, 1.0]) if is_slo else None
    least = limits["max_model_len"] if POLICIES[policy].whole_prompts else limits["max_num_seqs"]
    limits["max_num_batched_tokens"] = max(draw.choice([32, 64, 256]), least)
    config = make_config(
        policy,
        scheduler=limits,
        host_overhead=draw.choice([0.0, 1e-3]),
        step_noise=draw.choice([0.0, 0.0, 0.3, 2.0]),
        shed=ShedMode(draw.choice(["off", "relegate", "reject"])),
        max_concurrency=draw.choice([1, 2, 5, 20, *[None] * (5 if load.arrivals is not None else 0)]),
        guided_share=draw.choice([0.0, 0.0, 0.0, 0.3]),
        request_overhead=draw.choice([0.0, 0.0, 0.004]),
        declared_max_tokens=draw.choice([None, None, None, 60]),
        seed=seed,
        **random_fleet(draw, limits),
    )
    of_context = draw.choice([4.7e-8, 4.7e-8, 2e-5])
    model = ShapeTime(
        lambda shape: 5e-3 + 2.7e-5 * shape.num_new_tokens + of_context * shape.decode_context_tokens
    )
    if draw.random() < 0.15:
        model = ShapeTime(lambda shape: 0.125)
    return load, config, model, draw.choice([1, 1, 16])


def compare(load: OfferedLoad, config: SimulationConfig, model: ShapeTime | None = None) -> None:
    """Simulate both ways."""
    model = model or linear_time()
    at_once = simulate(load, config, model)
    one_by_one = simulate(load, config, model, observer=StepByStep())
    assert at_once.records == one_by_one.records
    assert at_once.replicas == one_by_one.replicas
    assert at_once.duration == one_by_one.duration


@given(seed=st.integers(0, 1 << 30))
@examples(200)
def test_a_random_simulation_is_the_same_in_runs_and_in_single_steps(seed: int) -> None:
    load, config, model, least = random_case(seed)
    with mock.patch.object(lockstep, "LEAST", least):
        compare(load, config, model)


def test_a_run_ends_where_an_objective_may_bind_again() -> None:
    """Costs are taken anew in the middle of it, and a step may then be as short as a stream asks for."""
    classes = tuple(SLOClass(name=str(tbt), slo=SLO(tbt=tbt), share=0.5) for tbt in (0.009, 0.2))
    load = random_load(40, rate=20, seed=2, prompt=60, output=90).with_classes(classes, seed=2)
    limits = {"slo_mode": "gap", "num_blocks": 60}
    compare(load, make_config("slo", scheduler=limits, step_noise=0.3, max_concurrency=5, seed=2))


def test_a_run_learns_no_further_than_to_who_comes_in_place_of_one_that_was_refused() -> None:
    """It comes at the instant of the refusal, which clients have not heard of when steps are predicted."""
    classes = (
        SLOClass(name="a", slo=SLO(ttft=0.1), share=0.5),
        SLOClass(name="b", slo=SLO(tbt=0.02), share=0.5),
    )
    load = replace(random_load(30, rate=5, seed=3, prompt=150, output=60), arrivals=None)
    config = make_config(
        "slo",
        scheduler={"slo_mode": "gap", "num_blocks": 400},
        steps_ahead=1,
        shed=ShedMode.REJECT,
        max_concurrency=2,
        host_overhead=1e-3,
        step_noise=0.3,
        seed=3,
    )
    compare(load.with_classes(classes, seed=3), config)
