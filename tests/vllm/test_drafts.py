"""vLLM's speculative decoding under our plans: a decode takes its token and the drafts that it verifies."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError

pytest.importorskip("vllm.v1.core.sched.scheduler")

from tests.vllm.harness import BOTH_RUNNERS, Clock, check_ended, make_request, make_scheduler, model_folder
from tests.vllm.test_plans import OBJECTIVES, check_any_plan, check_planned, serve, workload

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("how", BOTH_RUNNERS)
@pytest.mark.parametrize("mode", ["stream", "gap"])
def test_every_step_is_as_planned(folder, how, mode):
    requests = workload(60, 4.0, **OBJECTIVES)
    engine = serve(folder, requests, **how, num_drafts=3, options={"mode": mode})
    check_ended(engine, requests)
    check_planned(engine)
    assert engine.num_accepted > 500


@pytest.mark.parametrize("how", BOTH_RUNNERS)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_where_memory_is_short_streams_are_preempted_and_end(folder, how, prefix_caching):
    requests = workload(60, 20.0, long_every=0, **OBJECTIVES)
    engine = serve(folder, requests, **how, num_drafts=3, num_blocks=90, prefix_caching=prefix_caching)
    check_ended(engine, requests)
    check_planned(engine)
    assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("how", BOTH_RUNNERS)
def test_a_small_budget_holds_tokens_and_drafts(folder, how):
    requests = workload(40, 10.0, long_every=4, **OBJECTIVES)
    engine = serve(folder, requests, **how, num_drafts=3, max_num_seqs=16, max_num_batched_tokens=80)
    check_ended(engine, requests)
    check_planned(engine)


@pytest.mark.parametrize("how", BOTH_RUNNERS)
def test_a_prompt_that_is_cached_but_for_a_token_gets_room_for_drafts(folder, how):
    requests = [make_request(f"r{index}", 33, 20, 1000.0 + 0.1 * index, **OBJECTIVES) for index in range(8)]
    for request in requests:
        request._all_token_ids[:] = requests[0].prompt_token_ids
        request.block_hashes[:] = requests[0].block_hashes
    engine = serve(folder, requests, **how, num_drafts=3, prefix_caching=True)
    check_ended(engine, requests)
    check_planned(engine)
    assert engine.num_cached == 7 * 32


@pytest.mark.parametrize("how", BOTH_RUNNERS)
@pytest.mark.parametrize("seed", range(3))
def test_any_plan_is_carried_out(folder, how, seed):
    check_any_plan(folder, seed, shares_prefixes=False, **how, num_blocks=400, num_drafts=3)


def test_the_first_runner_with_overlapped_steps_is_refused(folder):
    with pytest.raises(ConfigError, match="--no-async-scheduling"):
        make_scheduler(folder, Clock(), is_async=True, num_drafts=3)


def test_more_drafts_than_a_block_are_refused(folder):
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        make_scheduler(folder, Clock(), num_drafts=20)
