"""Prompts and decodes on replicas of their own, on timelines worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.simulator.config import DisaggregationConfig, KVTransfer, PoolConfig, SimulationConfig
from onbeat.simulator.simulate import simulate
from tests.examples import examples
from tests.pure.simulator.loads import ShapeTime, StepByStep, Watching, make_load, random_load

LIMITS: dict[str, Any] = {
    "num_blocks": 64,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}


def prompt_time() -> ShapeTime:
    """10 ms for each prompt token."""
    return ShapeTime(lambda shape: 0.01 * shape.num_new_tokens)


def decode_time() -> ShapeTime:
    """1 s for a step of decodes; prompts as in `prompt_time`."""
    return ShapeTime(lambda shape: 1.0 + 0.01 * (shape.num_new_tokens - shape.num_decodes))


def make_config(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    transfer: KVTransfer | None = None,
    cap: int | None = None,
    **changes,
) -> SimulationConfig:
    prefill_scheduler = SchedulerConfig(**(LIMITS | {"policy": "hybrid-only"} | (prefill or {})))
    decode_scheduler = SchedulerConfig(**(LIMITS | {"policy": "hybrid-only"} | (decode or {})))
    pools = DisaggregationConfig(
        prefill=PoolConfig(num_replicas=num_prefill, scheduler=prefill_scheduler, step_time=prompt_time()),
        decode=PoolConfig(num_replicas=num_decode, scheduler=decode_scheduler, step_time=decode_time()),
        transfer=transfer or KVTransfer(bytes_per_token=1, bandwidth=1000, latency=0.05),
        decode_kv_cap_tokens=cap,
    )
    return SimulationConfig(
        scheduler=replace(prefill_scheduler, num_micro_batches=1), disaggregation=pools, **changes
    )


def run(load, config, **options):
    return simulate(load, config, prompt_time(), **options)


class TestTimeline:
    def test_prompt_transfer_decodes(self):
        (record,) = run(make_load([100], [4], [0.5]), make_config()).records
        first = 0.5 + 1.0
        start = first + 0.05 + 0.1  # latency, and 100 tokens at 1000 a second
        assert list(record.delivery_times) == pytest.approx([first, start + 1, start + 2, start + 3])
        assert record.scheduled == pytest.approx(0.5)
        assert record.end == pytest.approx(start + 3)
        assert record.num_output_tokens == 4
        assert record.finish_reason == "length"
        assert record.replica == "0+1"
        assert record.num_cached_tokens == 0

    def test_one_token_is_never_handed_over(self):
        result = run(make_load([100], [1], [0.0]), make_config())
        assert list(result.records[0].delivery_times) == pytest.approx([1.0])
        assert result.records[0].replica == "0"
        assert result.replicas[1].num_steps == 0

    def test_decodes_do_not_wait_for_prompts(self):
        records = run(make_load([100, 200], [6, 2], [0.0, 1.5]), make_config()).records
        gaps = [b - a for a, b in zip(records[0].delivery_times, records[0].delivery_times[1:], strict=False)]
        assert gaps[1:] == pytest.approx([1.0] * 4)

    def test_waiting_for_room_counts_after_the_first_token(self):
        config = make_config(decode={"max_num_seqs": 1})
        first, second = run(make_load([100, 100], [4, 4], [0.0, 0.0]), config).records
        assert second.ttft == first.ttft == pytest.approx(2.0)
        assert second.delivery_times[1] == pytest.approx(first.end + 0.15 + 1.0)

    def test_cap_on_decode_kv(self):
        load = make_load([200, 200], [4, 4], [0.0, 0.0])
        prefill = {"max_num_batched_tokens": 512}
        free = run(load, make_config(prefill=prefill)).records
        capped = run(load, make_config(prefill=prefill, cap=256)).records
        assert free[1].delivery_times[1] == free[0].delivery_times[1]
        assert capped[1].ttft == free[1].ttft
        assert capped[1].delivery_times[1] > capped[0].end

    def test_prefill_keeps_kv_until_it_is_pulled(self):
        config = make_config(decode={"max_num_seqs": 1}, prefill={"num_blocks": 16})
        first, second, third, fourth = run(make_load([120] * 4, [4] * 4, [0.0] * 4), config).records
        assert first.ttft == second.ttft == pytest.approx(2.4)
        assert third.ttft == pytest.approx(2.4 + 0.17 + 1.2)  # the first one's KV has been pulled
        assert fourth.ttft == pytest.approx(first.end + 0.17 + 1.2)  # the second's, once the first has ended

    def test_pools_share_their_requests(self):
        config = make_config(num_prefill=2, num_decode=2)
        records = run(make_load([100] * 4, [9] * 4, [0.0, 0.1, 0.2, 0.3]), config).records
        assert [record.replica for record in records] == ["0+2", "1+3", "0+2", "1+3"]

    def test_preempted_decodes_run_again_and_all_tokens_come_once(self):
        config = make_config(decode={"num_blocks": 16})
        result = run(make_load([100, 100], [60, 60], [0.0, 0.0]), config)
        assert result.num_preemptions > 0
        assert [record.num_output_tokens for record in result.records] == [60, 60]
        assert result.records[1].num_preemptions > 0

    def test_closed_loop(self):
        result = run(make_load([50] * 5, [3] * 5), make_config(max_concurrency=1))
        ends = [record.end for record in result.records]
        assert [record.arrival for record in result.records[1:]] == ends[:-1]

    def test_stages(self):
        config = make_config(decode={"num_micro_batches": 2}, prefill={"num_micro_batches": 2})
        (record,) = run(make_load([100], [3], [0.0]), config).records
        assert list(record.delivery_times) == pytest.approx([1.0, 2.15, 3.15])


class TestInvariants:
    @examples(25)
    @given(
        seed=st.integers(0, 10_000),
        policy=st.sampled_from(["hybrid-only", "sarathi", "orca", "prefill-first"]),
        decode_policy=st.sampled_from(["hybrid-only", "sarathi", "orca", "prefill-first"]),
        stages=st.sampled_from([1, 2]),
        cap=st.sampled_from([None, 256, 500]),
        rate=st.sampled_from([0.3, 3.0, 50.0]),
    )
    def test_every_token_comes_once_and_no_kv_is_left(self, seed, policy, decode_policy, stages, cap, rate):
        load = random_load(30, rate=rate, seed=seed)
        config = make_config(
            num_prefill=2,
            num_decode=2,
            prefill={"policy": policy, "num_blocks": 20},
            decode={"policy": decode_policy, "num_micro_batches": stages},
            cap=cap,
        )
        result = run(load, config)
        assert result.is_complete
        assert [record.num_output_tokens for record in result.records] == load.num_output_tokens.tolist()
        for record in result.records:
            assert list(record.delivery_times) == sorted(record.delivery_times)
            assert record.arrival <= record.scheduled <= record.delivery_times[0]
            assert record.end == record.delivery_times[-1]
        assert all(replica.num_leaked_blocks == 0 for replica in result.replicas)

    @pytest.mark.parametrize("cap", [None, 300])
    def test_steps_taken_at_once_make_no_difference(self, cap):
        load = random_load(60, rate=2.0, seed=3)
        config = make_config(num_decode=2, cap=cap)
        single = run(load, config, observer=StepByStep())
        together = run(load, config, observer=Watching())
        assert single.records == together.records == run(load, config).records


class TestRefusals:
    def test_a_full_prefill_queue_refuses_and_the_rest_goes_on(self):
        config = make_config(prefill={"max_num_seqs": 1, "max_num_queued_reqs": 1})
        load = make_load([100] * 5, [4] * 5, [0.0, 0.1, 0.2, 0.3, 2.5])
        result = run(load, config)
        assert [record.finish_reason for record in result.records] == [
            *("length", "length", "rejected", "rejected", "length")
        ]
        refused = result.records[2]
        assert (refused.is_rejected, refused.replica, refused.arrival, refused.end) == (True, "0", 0.2, 0.2)
        assert all(each.num_leaked_blocks == 0 for each in result.replicas)

    def test_closed_loop(self):
        config = make_config(
            prefill={"max_num_seqs": 1, "max_num_queued_reqs": 1}, max_concurrency=4, num_prefill=2
        )
        result = run(make_load([50] * 30, [3] * 30), config)
        assert result.num_completed + result.num_rejected == 30
        assert result.num_rejected > 0

    def test_the_decode_pool_takes_all_that_have_their_first_token(self):
        config = make_config(decode={"max_num_seqs": 1, "max_num_queued_reqs": 1})
        assert run(make_load([50] * 8, [6] * 8, [0.0] * 8), config).num_completed == 8


class TestBadInput:
    def test_policies_that_plan_with_deadlines(self, monkeypatch):
        monkeypatch.setitem(
            POLICIES, "clairvoyant", lambda: replace(POLICIES["sarathi"](), needs_step_time=True)
        )
        with pytest.raises(ConfigError, match="'clairvoyant' plans a request from its arrival"):
            make_config(decode={"policy": "clairvoyant"})

    def test_cap_below_a_request(self):
        with pytest.raises(ConfigError, match="decode_kv_cap_tokens is 200"):
            make_config(cap=200)

    def test_static_prefill(self):
        with pytest.raises(ConfigError, match="static"):
            make_config(prefill={"policy": "static"})

    def test_no_replica(self):
        with pytest.raises(ConfigError, match="0 replicas"):
            make_config(num_decode=0)

    def test_longer_than_a_pool_takes(self):
        config = make_config(decode={"max_model_len": 128})
        config = replace(config, scheduler=config.disaggregation.prefill.scheduler)
        with pytest.raises(ConfigError, match="128"):
            run(make_load([100], [100], [0.0]), config)

    @pytest.mark.parametrize(
        "change", [{"bandwidth": 0}, {"bandwidth": float("nan")}, {"bytes_per_token": -1}, {"latency": -1}]
    )
    def test_impossible_links(self, change):
        with pytest.raises(ConfigError, match=next(iter(change))):
            KVTransfer(**({"bytes_per_token": 1, "bandwidth": 1} | change))
