"""The grid of configurations, and the rate at which their search begins."""

from __future__ import annotations

import pickle

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.options import change, make
from onbeat.planner.capacity import service_rate
from onbeat.planner.cases import ReplicaCase, case_name, settings_grid
from onbeat.simulator.deployment import Deployment
from tests.pure.planner.fakes import FakeCase, make_load

BASE = Deployment(model="meta-llama/Llama-3.1-8B", device="h100-sxm")


def test_holds_every_combination_in_order() -> None:
    grid = settings_grid(BASE, {"tensor_parallel": [1, 2], "max_num_batched_tokens": [256, 512]})
    assert [case_name(labels) for labels, _ in grid] == [
        "tp 1, budget 256",
        "tp 1, budget 512",
        "tp 2, budget 256",
        "tp 2, budget 512",
    ]
    assert [settings.tensor_parallel for _, settings in grid] == [1, 1, 2, 2]


def test_without_axes_there_is_the_base_alone() -> None:
    assert settings_grid(BASE, {}) == [((), BASE)]
    assert case_name(()) == "as given"


def test_policies_that_run_whole_prompts_take_no_chunk_budget() -> None:
    grid = settings_grid(BASE, {"policy": ["sarathi", "prefill-first"], "max_num_batched_tokens": [256, 512]})
    assert [case_name(labels) for labels, _ in grid] == [
        "policy sarathi, budget 256",
        "policy sarathi, budget 512",
        "policy prefill-first",
    ]
    assert grid[-1][1].limits.max_num_batched_tokens is None


def test_policies_that_leave_nobody_behind_take_no_order_of_shedding() -> None:
    grid = settings_grid(BASE, {"policy": ["slo", "edf"], "shed_order": ["most", "longest-wait"]})
    assert [case_name(labels) for labels, _ in grid] == [
        "policy slo, shed order most",
        "policy slo, shed order longest-wait",
        "policy edf",
    ]
    assert [settings.limits.shed_order for _, settings in grid] == ["most", "longest-wait", "most"]
    given = change(BASE, shed_order="longest-wait")
    grid = settings_grid(given, {"policy": ["slo", "edf"]})
    assert [settings.limits.shed_order for _, settings in grid] == ["longest-wait", "most"]


def test_a_policy_alone_keeps_the_budget_it_was_given() -> None:
    grid = settings_grid(BASE, {"policy": ["prefill-first"], "max_num_batched_tokens": [4096, 8192]})
    assert [settings.limits.max_num_batched_tokens for _, settings in grid] == [4096, 8192]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor_paralel": [1]}, r"'tensor_paralel'; .* tensor_parallel"),
        ({"policy": ["sarathi", "sarati"]}, "policy 'sarati'"),
    ],
)
def test_says_what_is_wrong_with_an_axis(axes: dict[str, list[object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_grid(BASE, axes)


def test_a_case_travels_to_other_processes() -> None:
    case = ReplicaCase(settings=BASE, labels=(("policy", "sarathi"),), tbt=0.1)
    assert pickle.loads(pickle.dumps(case)) == case


def test_a_case_is_built_anew_each_time() -> None:
    case = ReplicaCase(settings=BASE)
    assert case.build().step_time is not case.build().step_time
    assert case.build().num_devices == 1


def test_an_automatic_budget_follows_the_objective() -> None:
    budgets = []
    for tbt in (0.02, 0.05):
        settings = make(
            Deployment,
            model=BASE.model,
            device=BASE.device,
            max_num_seqs=64,
            max_num_batched_tokens="auto",
        )
        case = ReplicaCase(settings=settings, tbt=tbt, context_tokens=1000)
        budgets.append(case.build().config.scheduler.max_num_batched_tokens)
    assert budgets[0] < budgets[1]
    assert all(budget % 128 == 0 for budget in budgets)


def test_the_search_begins_where_full_batches_serve() -> None:
    # One request of 128 tokens a step of a second, and of 10 tokens a request in batches of 4.
    assert service_rate(*FakeCase(1.0).build()[:2], make_load(10)) == pytest.approx(1.0, rel=0.02)
    decoding = FakeCase(0.1, 0.0, max_num_seqs=4, token_budget=4096).build()
    assert service_rate(*decoding[:2], make_load(100, output=10)) == pytest.approx(4 / (10 * 0.1))


def test_requests_without_output_have_a_service_rate() -> None:
    case = FakeCase(0.1, 0.0, max_num_seqs=4, token_budget=4096).build()
    assert service_rate(*case[:2], make_load(100, prompt=10, output=0)) == pytest.approx(4 / 0.1)


def test_prompts_bound_the_service_rate_of_a_small_budget() -> None:
    case = FakeCase(0.1, 0.0, max_num_seqs=4, token_budget=64).build()
    load = make_load(100, prompt=600, output=10)
    assert service_rate(*case[:2], load) == pytest.approx(1 / (600 / 60 * 0.1))
