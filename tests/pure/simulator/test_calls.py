"""What a simulated request costs, in calls of Python functions: these do not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest

from benchmarks.check.paths import arguments, one_request, replica_calls, walk
from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.simulate import simulate
from onbeat.workload.slo_classes import SLOClass
from tests.pure.simulator.loads import linear_time, make_config, random_load

NUM_REQUESTS = 60
OBJECTIVES = SLOClass(name="chat", slo=SLO(ttft=2.0, tbt=0.05), share=1.0)


def calls_a_request(policy: str, *, objectives: bool) -> float:
    """Return the calls of a simulation whose replica runs some five requests at once."""
    load = random_load(NUM_REQUESTS, rate=4, seed=1, prompt=1000, output=200)
    if objectives:
        load = load.with_classes((OBJECTIVES,), seed=1)
    limits = {"num_blocks": 4096, "max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    config = make_config(policy, scheduler=limits)
    return (
        num_calls(
            partial(simulate, load, config, Predictor(linear_time().seconds, ResidualModel.log_normal(0.05)))
        )
        / NUM_REQUESTS
    )


def num_calls(run: Callable[[], object]) -> int:
    """Return how many calls of Python functions something makes."""
    num_calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return num_calls


@pytest.mark.parametrize(
    ("policy", "objectives", "most"), [("sarathi", False, 269), ("slo", False, 484), ("slo", True, 542)]
)
def test_a_request_costs_no_more_calls_than_it_did(policy, objectives, most):
    """The bounds are what was counted, and some 2 %: who needs more raises them, and says what for."""
    assert calls_a_request(policy, objectives=objectives) <= most


@pytest.mark.parametrize(("policy", "most"), [("sarathi", 25), ("slo", 33)])
def test_a_request_goes_through_no_more_files_than_it_did(policy, most):
    settings = make(Deployment, model="mistralai/Mistral-7B-v0.3", device="h100-sxm", policy=policy)
    assert len(set(one_request(settings))) <= most


@pytest.mark.parametrize(("call", "most", "most_files"), [("add", 30, 10), ("schedule", 54, 12)])
def test_a_plan_and_an_arrival_call_no_more_functions_than_they_did(call, most, most_files):
    """Beside 32 streams and 8 prompts under `slo`; the bounds are what was counted."""
    settings = make(Deployment, model="mistralai/Mistral-7B-v0.3", device="h100-sxm", policy="slo")
    called = replica_calls("slo", resolve(settings).step_time)[call]
    assert len(called) <= most
    assert len(set(called)) <= most_files


@pytest.mark.parametrize(
    ("policy", "handed", "most", "most_returns"),
    [("sarathi", False, 65, 38), ("slo", False, 77, 47), ("sarathi", True, 35, 15), ("slo", True, 35, 15)],
)
def test_the_way_from_flags_to_what_is_simulated_is_no_longer_than_it_was(policy, handed, most, most_returns):
    """The bounds are what was counted, and some 4 %: a function that moves elsewhere is a stay or two."""
    num_stays, num_returns = walk(arguments(policy, handed=handed))
    assert num_stays <= most
    assert num_returns <= most_returns


@pytest.mark.parametrize("router", ["round-robin", "least-outstanding", "prefix-affinity", "slo"])
def test_what_a_fleet_does_to_start_grows_with_its_replicas_and_no_faster(router):
    few, many = (calls_to_start(num_replicas, router) for num_replicas in (100, 400))
    assert many < 4.4 * few


def calls_to_start(num_replicas: int, router: str) -> int:
    config = make_config(replicas=num_replicas, router=router)
    load = random_load(1, rate=1, seed=1)
    run = partial(simulate, load, config, linear_time(), on_decision=lambda event, now, actions: None)
    run()
    return num_calls(run)
