"""Models whose layers have KV of several kinds, under our plans."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError

pytest.importorskip("vllm.v1.core.sched.scheduler")
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from tests.vllm.harness import Clock, check_ended, make_request, make_scheduler, model_folder
from tests.vllm.test_plans import OBJECTIVES, check_any_plan, check_planned, serve, workload

pytestmark = pytest.mark.vllm
WINDOWS = [128]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("is_async", [False, True])
class TestSlidingWindowsBesideFullAttention:
    @pytest.mark.parametrize("windows", [[128], [128, 64]])
    def test_every_step_is_as_planned(self, folder, is_async, windows):
        requests = workload(60, 4.0, **OBJECTIVES)
        engine = serve(folder, requests, is_async=is_async, windows=windows)
        check_ended(engine, requests)
        check_planned(engine)

    @pytest.mark.parametrize("prefix_caching", [False, True])
    def test_where_memory_is_short_streams_are_preempted_and_end(self, folder, is_async, prefix_caching):
        requests = workload(60, 20.0, long_every=0, **OBJECTIVES)
        engine = serve(
            folder,
            requests,
            is_async=is_async,
            windows=WINDOWS,
            num_blocks=180,
            prefix_caching=prefix_caching,
        )
        check_ended(engine, requests)
        check_planned(engine)
        assert sum(request.num_preemptions for request in requests) > 0

    def test_a_prompt_longer_than_its_share_of_blocks_runs_beside_others(self, folder, is_async):
        requests = [
            make_request(f"r{index}", 60, 60, 1000.0 + 0.2 * index, **OBJECTIVES) for index in range(60)
        ]
        long = make_request("long", 3000, 20, 1001.0, **OBJECTIVES)
        engine = serve(
            folder,
            [*requests, long],
            is_async=is_async,
            windows=[64] * 5,
            num_blocks=600,
            max_num_batched_tokens=256,
        )
        check_ended(engine, [*requests, long])
        check_planned(engine)
        assert engine.tokens["long"][0][0] < 1003.0  # the last of the others comes at 1012

    def test_shared_prefixes_are_found_and_planned_with(self, folder, is_async):
        requests = [
            make_request(f"r{index}", 400, 20, 1000.0 + 0.05 * index, prefix=f"p{index % 4}", **OBJECTIVES)
            for index in range(60)
        ]
        engine = serve(folder, requests, is_async=is_async, windows=WINDOWS, prefix_caching=True)
        check_ended(engine, requests)
        check_planned(engine)
        assert engine.num_cached > 50 * 150

    @pytest.mark.parametrize("prefix_caching", [False, True])
    @pytest.mark.parametrize("seed", range(3))
    def test_any_plan_is_carried_out(self, folder, is_async, prefix_caching, seed):
        settings = {"windows": WINDOWS, "num_blocks": 800, "prefix_caching": prefix_caching}
        check_any_plan(folder, seed, is_async=is_async, **settings)


def test_blocks_of_different_sizes_are_refused(folder):
    mamba = MambaSpec(block_size=4096, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(ConfigError, match="different sizes"):
        make_scheduler(folder, Clock(), more_groups=[mamba])
