"""Prompts and tokens on replicas of their own, on timelines worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PoolSizes
from onbeat.core.slo import SLO, Fate
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import FleetChange, FleetTimes, KVLink, ReplicaKind, SimulationConfig
from onbeat.workload.slo_classes import SLOClass
from tests.examples import examples
from tests.pure.simulator.loads import (
    HearsOfRequests,
    ShapeTime,
    StepByStep,
    fleet_config,
    linear_time,
    make_load,
    random_load,
)

pytestmark = pytest.mark.usefixtures("comparators")
RULES = ("adaptive", "distserve", "splitwise")

LIMITS: dict[str, Any] = {
    "num_blocks": 64,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}
MESSAGES = 3 * 0.002
"""Room, stop and copy are heard of after so long each; the change is not waited for."""
COPY = 0.05 + 0.112
"""Latency, and seven blocks of 16 tokens at 1,000 a second."""


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
    **changes: Any,
) -> SimulationConfig:
    prompts = SchedulerConfig(**(LIMITS | {"policy": "hybrid-only"} | (prefill or {})))
    tokens = SchedulerConfig(**(LIMITS | {"policy": "hybrid-only"} | (decode or {})))
    given: dict[str, Any] = {
        "replicas": num_prefill + num_decode,
        "disaggregate": PoolSizes(prefill=num_prefill, decode=num_decode) if num_prefill else None,
        "router": "least-outstanding",
        "pool_rule": "distserve",
        "kinds": (
            *(ReplicaKind(scheduler=prompts, step_time=prompt_time()),) * num_prefill,
            ReplicaKind(scheduler=tokens, step_time=decode_time()),
        ),
        "kv_link": KVLink(bytes_per_token=1, bandwidth=1000, latency=0.05),
    }
    scheduler = SchedulerConfig(**(LIMITS | {"policy": "hybrid-only"}))
    return fleet_config(scheduler, **(given | changes))


def run(load, config, **options):
    return simulate(load, config, prompt_time(), **options)


class TestTimeline:
    def test_prompt_transfer_decodes(self):
        result = run(make_load([100], [4], [0.5]), make_config())
        (record,) = result.records
        first = 0.5 + 1.0
        start = first + MESSAGES + COPY
        assert list(record.delivery_times) == pytest.approx([first, start + 1, start + 2, start + 3])
        assert record.scheduled == pytest.approx(0.5)
        assert record.end == pytest.approx(start + 3)
        assert record.num_output_tokens == 4
        assert record.finish_reason == "length"
        assert record.replica == "0+1"
        assert record.num_cached_tokens == 0
        assert result.decisions == {"start": 2, "load": 1, "moved: prefill": 1}

    def test_a_state_goes_with_its_stream(self):
        limits = {"num_snapshots": 2}
        link = KVLink(bytes_per_token=1, bandwidth=1000, latency=0.05, state_bytes=500)
        config = make_config(prefill=limits, decode=limits, kv_link=link)
        (record,) = run(make_load([100], [4], [0.5]), config).records
        assert record.replica == "0+1"
        start = 1.5 + MESSAGES + COPY + 0.5
        assert list(record.delivery_times) == pytest.approx([1.5, start + 1, start + 2, start + 3])

    def test_one_token_is_never_handed_over(self):
        result = run(make_load([100], [1], [0.0]), make_config())
        assert list(result.records[0].delivery_times) == pytest.approx([1.0])
        assert result.records[0].replica == "0"
        assert result.replicas[1].num_steps == 0

    def test_decodes_do_not_wait_for_prompts(self):
        records = run(make_load([100, 200], [6, 2], [0.0, 1.5]), make_config()).records
        gaps = [b - a for a, b in zip(records[0].delivery_times, records[0].delivery_times[1:], strict=False)]
        assert gaps[1:] == pytest.approx([1.0] * 4)

    def test_transfers_share_the_link(self):
        """Both copies leave one replica at once, so each has half of its link."""
        records = run(make_load([100, 100], [4, 4], [0.0, 0.0]), make_config(num_decode=2)).records
        starts = [record.delivery_times[1] - record.ttft - 1.0 for record in records]
        assert starts == pytest.approx([MESSAGES + 0.05 + 2 * 0.112] * 2)

    def test_a_copy_takes_memory_bandwidth_from_steps(self):
        config = make_config()
        charged = tuple(
            ReplicaKind(scheduler=each.scheduler, step_time=each.step_time, memory_bandwidth=1120)
            for each in config.kinds
        )
        (record,) = run(make_load([100], [4], [0.0]), make_config(kinds=charged)).records
        start = 1.0 + MESSAGES + COPY
        assert list(record.delivery_times[1:]) == pytest.approx([start + 1.1, start + 2.1, start + 3.1])

    def test_waiting_for_room_counts_after_the_first_token(self):
        config = make_config(decode={"max_num_seqs": 1})
        first, second = run(make_load([100, 100], [4, 4], [0.0, 0.0]), config).records
        assert second.ttft == first.ttft == pytest.approx(2.0)
        # its report is heard of, too
        assert second.delivery_times[1] == pytest.approx(first.end + 0.002 + MESSAGES + COPY + 1.0)

    def test_prefill_keeps_kv_until_it_is_pulled(self):
        config = make_config(decode={"max_num_seqs": 1}, prefill={"num_blocks": 16})
        first, second, third, fourth = run(make_load([120] * 4, [4] * 4, [0.0] * 4), config).records
        copy = MESSAGES + 0.05 + 0.128
        assert first.ttft == second.ttft == pytest.approx(2.4)
        assert third.ttft == pytest.approx(2.4 + copy + 1.2)  # the first one's KV has been pulled
        # the second's, once the first has ended
        assert fourth.ttft == pytest.approx(first.end + 0.002 + copy + 1.2)

    def test_a_stream_goes_on_where_it_is_if_that_is_the_rule(self):
        config = make_config(decode={"max_num_seqs": 1}, pool_rule="adaptive")
        first, second = run(make_load([100, 100], [40, 40], [0.0, 0.0]), config).records
        assert first.replica == "0+1"
        assert second.delivery_times[1] == pytest.approx(2.01)

    def test_a_prompt_is_copied_as_it_is_computed(self):
        """In four chunks, the last of 4 tokens: two copies, of two blocks each, end before it does."""
        chunks = {"policy": "sarathi", "max_num_batched_tokens": 32}
        config = make_config(pool_rule="splitwise", prefill=chunks)
        (record,) = run(make_load([100], [20], [0.0]), config).records
        assert record.ttft == pytest.approx(1.0)
        third = 0.96 + 0.002 + 0.05 + 0.032 + 0.002  # it has been asked for when the first token comes
        last = third + 0.002 + 0.05 + 0.016 + 0.002
        assert record.delivery_times[1] == pytest.approx(last + 1.0)
        assert record.replica == "0+1"
        before = make_config(pool_rule="distserve", prefill=chunks)
        assert run(make_load([100], [20], [0.0]), before).records[0].delivery_times[1] > last + 1.05

    def test_what_one_pool_has_no_room_for_goes_to_the_other(self):
        config = make_config(pool_rule="splitwise", num_prefill=2, num_decode=2, decode={"max_num_seqs": 1})
        records = run(make_load([100] * 6, [30] * 6, [0.0] * 6), config).records
        assert {record.replica for record in records} >= {"0+2", "1+3"}
        assert all(record.num_output_tokens == 30 for record in records)
        assert any("+" not in record.replica for record in records), "some stay where their prompts were"

    def test_pools_share_their_requests(self):
        config = make_config(num_prefill=2, num_decode=2)
        records = run(make_load([100] * 4, [9] * 4, [0.0, 0.1, 0.2, 0.3]), config).records
        assert [record.replica for record in records] == ["0+2", "1+3", "0+2", "1+3"]

    def test_preempted_decodes_run_again_and_all_tokens_come_once(self):
        config = make_config(decode={"num_blocks": 24})
        result = run(make_load([100, 100], [120, 120], [0.0, 0.0]), config)
        assert result.total.num_preemptions > 0
        assert [record.num_output_tokens for record in result.records] == [120, 120]
        assert result.records[1].num_preemptions > 0

    def test_closed_loop(self):
        result = run(make_load([50] * 5, [3] * 5), make_config(max_concurrency=1))
        ends = [record.end for record in result.records]
        assert [record.arrival for record in result.records[1:]] == ends[:-1]

    def test_stages(self):
        config = make_config(decode={"num_micro_batches": 2}, prefill={"num_micro_batches": 2})
        (record,) = run(make_load([100], [3], [0.0]), config).records
        start = 1.0 + MESSAGES + COPY
        assert list(record.delivery_times) == pytest.approx([1.0, start + 1, start + 2])


class TestInvariants:
    @examples(25)
    @given(
        seed=st.integers(0, 10_000),
        policy=st.sampled_from(["hybrid-only", "sarathi", "orca", "prefill-first", "slo"]),
        decode_policy=st.sampled_from(["hybrid-only", "sarathi", "orca", "prefill-first", "slo"]),
        stages=st.sampled_from([1, 2]),
        num_blocks=st.sampled_from([20, 64]),
        rule=st.sampled_from(RULES),
        rate=st.sampled_from([0.3, 3.0, 50.0]),
    )
    def test_every_token_comes_once_and_no_kv_is_left(
        self, seed, policy, decode_policy, stages, num_blocks, rule, rate
    ):
        load = random_load(30, rate=rate, seed=seed)
        config = make_config(
            num_prefill=2,
            num_decode=2,
            prefill={"policy": policy, "num_blocks": 20},
            decode={"policy": decode_policy, "num_micro_batches": stages, "num_blocks": num_blocks},
            pool_rule=rule,
        )
        result = run(load, config)
        assert result.is_complete
        assert [record.num_output_tokens for record in result.records] == load.num_output_tokens.tolist()
        for record in result.records:
            assert list(record.delivery_times) == sorted(record.delivery_times)
            assert record.arrival <= record.scheduled <= record.delivery_times[0]
            assert record.end == record.delivery_times[-1]
        assert all(replica.num_leaked_blocks == 0 for replica in result.replicas)

    @examples(40)
    @given(
        changes=st.lists(
            st.builds(
                FleetChange,
                st.floats(0, 30),
                st.sampled_from(["kill", "drain", "restart", "scale"]),
                st.integers(0, 4),
            ),
            max_size=8,
        ),
        rule=st.sampled_from(RULES),
        move_rule=st.sampled_from(["mend", "llumnix"]),
        num_prefill=st.sampled_from([0, 2]),
        policy=st.sampled_from(["hybrid-only", "slo"]),
        bandwidth=st.sampled_from([20.0, 1000.0]),
        seed=st.integers(0, 100),
    )
    # A request is to go back to a replica at the instant at which its drain is over.
    @example(
        changes=[FleetChange(1.0, "kill", 1), FleetChange(15.0, "drain", 0), FleetChange(23.0, "kill", 1)],
        rule="adaptive",
        move_rule="mend",
        num_prefill=0,
        policy="hybrid-only",
        bandwidth=20.0,
        seed=0,
    )
    # A drain is over at the instant at which the destination of a stream that is about to stop dies.
    @example(
        changes=[
            FleetChange(0.25, "kill", 0),
            FleetChange(6.0, "kill", 0),
            FleetChange(22.0, "drain", 0),
            FleetChange(30.0, "kill", 1),
        ],
        rule="adaptive",
        move_rule="mend",
        num_prefill=0,
        policy="hybrid-only",
        bandwidth=20.0,
        seed=2,
    )
    def test_whatever_happens_everybody_ends_or_is_told(
        self, changes, rule, move_rule, num_prefill, policy, bandwidth, seed
    ):
        """Copies that take seconds, so that deaths and drains meet every stage of a move."""
        changes = [each for each in changes if (each.number if each.kind == "scale" else each.number < 4)]
        config = make_config(
            num_prefill=2,
            num_decode=2,
            prefill={"policy": policy},
            decode={"policy": policy, "num_blocks": 32},
            pool_rule=rule,
            move_rule=move_rule,
            kv_link=KVLink(bytes_per_token=1, bandwidth=bandwidth),
            fleet_changes=tuple(changes),
            fleet_times=FleetTimes(start_seconds=2.0, drain_seconds=8.0),
        )
        config = make_config(**_all_alike(config)) if not num_prefill else config
        result = run(random_load(40, rate=2.0, seed=seed), config)
        for record in result.records:
            if record.is_completed:
                assert record.num_output_tokens == record.offered_output_tokens == len(record.delivery_times)
            assert list(record.delivery_times) == sorted(record.delivery_times)
            assert record.finish_reason in ("length", "error", "rejected", "expired")
        assert all(each.num_leaked_blocks == 0 for each in result.replicas)

    @pytest.mark.parametrize("rule", RULES)
    def test_steps_taken_at_once_make_no_difference(self, rule):
        load = random_load(60, rate=2.0, seed=3)
        config = make_config(num_decode=2, pool_rule=rule, decode={"num_blocks": 24})
        single = run(load, config, observer=StepByStep())
        together = run(load, config, observer=HearsOfRequests())
        assert single.records == together.records == run(load, config).records


def _all_alike(config: SimulationConfig) -> dict[str, Any]:
    names = ("fleet_changes", "fleet_times", "kv_link")
    alike = {name: getattr(config, name) for name in names}
    return alike | {"num_prefill": 0, "num_decode": 4, "pool_rule": "adaptive", "kinds": config.kinds[-1:]}


class TestPolicySLO:
    def test_it_plans_both_pools(self):
        """Deadlines go with the stream, and the replica that generates keeps them."""
        classes = (SLOClass(name="all", slo=SLO(ttft=1.0, tbt=0.05)),)
        load = random_load(200, rate=20.0, seed=5)
        load = replace(load, classes=classes, class_ids=np.zeros(200, dtype=np.int64))
        config = make_config(prefill={"policy": "slo"}, decode={"policy": "slo"})
        kinds = tuple(ReplicaKind(scheduler=each.scheduler, step_time=linear_time()) for each in config.kinds)
        link = KVLink(bytes_per_token=1, bandwidth=1e6)
        config = make_config(router="slo", kinds=kinds, kv_link=link)
        result = run(load, config)
        moved = [record for record in result.records if record.replica == "0+1"]
        assert len(moved) > 150
        assert all(record.ttft < 1.0 and record.fate is not Fate.RELEGATED for record in result.records)


class TestRefusals:
    def test_a_full_queue_refuses_and_the_rest_goes_on(self):
        limits = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
        config = make_config(prefill=limits, decode=limits)
        load = make_load([100] * 8, [4] * 8, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 20.0])
        result = run(load, config)
        reasons = [record.finish_reason for record in result.records]
        assert {*reasons} == {"length", "rejected"}
        assert (reasons[0], reasons[-1]) == ("length", "length")
        refused = next(record for record in result.records if record.is_rejected)
        assert refused.arrival == refused.end
        assert all(each.num_leaked_blocks == 0 for each in result.replicas)

    def test_the_decode_pool_takes_all_that_have_their_first_token(self):
        config = make_config(decode={"max_num_seqs": 1, "max_num_queued_reqs": 1})
        assert run(make_load([50] * 8, [6] * 8, [0.0] * 8), config).num_completed == 8


class TestBadInput:
    def test_static(self):
        with pytest.raises(ConfigError, match="'static'"):
            make_config(prefill={"policy": "static"})

    def test_no_link(self):
        with pytest.raises(ConfigError, match="give kv_link"):
            make_config(kv_link=None)

    def test_unlike_blocks(self):
        with pytest.raises(ConfigError, match=r"16 and.*32 tokens"):
            make_config(decode={"block_size": 32})

    def test_unknown_rule(self):
        with pytest.raises(ConfigError, match=r"pool_rule.*'splitwize'"):
            make_config(pool_rule="splitwize")

    @pytest.mark.parametrize(
        "change", [{"bandwidth": 0}, {"bandwidth": float("nan")}, {"bytes_per_token": -1}, {"latency": -1}]
    )
    def test_impossible_links(self, change):
        with pytest.raises(ConfigError, match=next(iter(change))):
            KVLink(**({"bytes_per_token": 1, "bandwidth": 1} | change))
