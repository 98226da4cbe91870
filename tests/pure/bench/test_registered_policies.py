"""Policies of the benchmarks keep what those of the scheduler keep, once they stand in its table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policies.fastserve import FASTSERVE
from benchmarks.policies.niyama import NIYAMA
from benchmarks.policies.scorpio import SCORPIO
from benchmarks.policies.triaged import TRIAGED
from onbeat.cli.main import main
from onbeat.core.errors import ConfigError
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.token_budget import default_token_budget
from tests.examples import examples
from tests.pure.scheduler.driver import make_config
from tests.pure.scheduler.test_properties import loads, run_load
from tests.pure.scheduler.test_steady import ARRIVALS, run

PUBLISHED = {"niyama": NIYAMA, "fastserve": FASTSERVE, "scorpio": SCORPIO, **TRIAGED}


@pytest.fixture(autouse=True, scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        for name, policy in PUBLISHED.items():
            patch.setitem(POLICIES, name, policy)
        yield


@pytest.mark.parametrize("policy", PUBLISHED)
@pytest.mark.parametrize("depth", [1, 2])
@examples(15)
@given(load=loads)
def test_decisions_repeat_exactly_and_tokens_are_those_of_any_policy(policy, depth, load) -> None:
    first = run_load(load, policy, depth=depth, num_blocks=24)
    assert first.log == run_load(load, policy, depth=depth, num_blocks=24).log
    assert first.outputs == run_load(load, "sarathi", num_blocks=200).outputs


@examples(25)
@given(load=loads)
def test_first_come_is_first_scheduled_under_niyama(load) -> None:
    driver = run_load(load, "niyama", num_blocks=24)
    assert driver.first_scheduled == [
        f"r{i}" for i in sorted(range(len(load)), key=lambda i: (load[i][2], f"r{i}"))
    ]


@examples(40)
@given(st.sampled_from(sorted(PUBLISHED)), ARRIVALS, st.integers(16, 40), st.booleans())
def test_repeated_steps_equal_single_steps(policy, arrivals, num_blocks, prefix) -> None:
    config = make_config(policy, num_blocks=num_blocks, enable_prefix_caching=prefix)
    assert run(config, arrivals, at_once=True) == run(config, arrivals, at_once=False)


def test_a_first_token_gives_a_request_its_place_among_niyamas_decodes() -> None:
    arrivals = [(0, 1, 3), (0, 32, 2)]
    config = make_config("niyama", num_blocks=16)
    assert run(config, arrivals, at_once=True) == run(config, arrivals, at_once=False)


@pytest.mark.parametrize(
    ("policy", "budget"), [("niyama", 8192), ("simple", 8192), ("sarathi-triage", 512), ("edf-triage", 512)]
)
def test_tokens_are_only_a_cap_where_time_is_the_budget(policy, budget) -> None:
    assert default_token_budget(policy, max_model_len=4096, max_num_seqs=64) == budget


@pytest.mark.parametrize("policy", PUBLISHED)
def test_the_product_does_not_offer_them(policy, monkeypatch, capsys) -> None:
    for name in PUBLISHED:
        monkeypatch.delitem(POLICIES, name)
    with pytest.raises(SystemExit):
        main(["simulate", "--model", "meta-llama/Llama-3.1-8B", "--device", "h100-sxm", "--policy", policy])
    assert f"invalid choice: '{policy}'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"policy '{policy}'; .* static, "):
        default_token_budget(policy, max_model_len=4096, max_num_seqs=64)
