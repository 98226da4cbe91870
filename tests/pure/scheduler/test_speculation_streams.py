"""Whatever is drafted, accepted, preempted or aborted: every request gets exactly its own tokens."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from onbeat.core.slo import SLO_CLASSES
from onbeat.scheduler.replica.policies import POLICIES
from tests.examples import examples
from tests.many_cases import each_case
from tests.pure.scheduler.speculating import RandomDrafts, SpeculatingDriver, make_config, make_request

POLICY_NAMES = tuple(POLICIES)
KINDS = ("fixed", "adaptive", "random")


def make_driver(policy: str, kind: str, *, k: int, seed: int, depth: int, **changes) -> SpeculatingDriver:
    options = {name: changes.pop(name) for name in ("acceptance", "fewer") if name in changes}
    config = make_config(policy, k=k, draft_length="fixed" if kind == "random" else kind, **changes)
    drafting = RandomDrafts(k, Random(seed)) if kind == "random" else None
    return SpeculatingDriver(config, depth=depth, seed=seed, drafting=drafting, **options)


class SpeculationMachine(RuleBasedStateMachine):
    """Arrivals, aborts and steps in any order; the driver's runner checks the KV that each row reads."""

    @initialize(
        policy=st.sampled_from(POLICY_NAMES),
        kind=st.sampled_from(KINDS),
        order=st.sampled_from(["fcfs", "priority"]),
        depth=st.sampled_from([1, 2, 3]),
        is_pipeline=st.booleans(),
        num_blocks=st.integers(16, 40),
        prefix=st.booleans(),
        k=st.integers(1, 16),
        acceptance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        seed=st.integers(0, 1 << 16),
    )
    def start(self, policy, kind, order, depth, is_pipeline, num_blocks, prefix, k, acceptance, seed):
        if POLICIES[policy].order is not None:
            order = "fcfs"  # its own takes the place of priorities
        self.driver = make_driver(
            policy,
            kind,
            k=k,
            seed=seed,
            depth=depth,
            acceptance=acceptance,
            num_blocks=num_blocks,
            scheduling_policy=order,
            enable_prefix_caching=prefix,
            num_micro_batches=depth if is_pipeline else 1,
        )

    @rule(
        num_prompt=st.integers(1, 200),
        max_tokens=st.integers(1, 60),
        stop_at=st.none() | st.integers(0, 60),
        min_tokens=st.integers(0, 20),
        shared=st.booleans(),
        num_logprobs=st.sampled_from([None, 0]),
        slo=st.sampled_from([None, *SLO_CLASSES.values()]),
        priority=st.integers(-2, 2),
    )
    def arrive(self, num_prompt, max_tokens, stop_at, min_tokens, shared, num_logprobs, slo, priority):
        request_id = f"r{len(self.driver.requests)}"
        request = make_request(
            request_id,
            num_prompt,
            max_tokens,
            arrival=self.driver.now,
            salt="shared" if shared else request_id,
            stop_at=stop_at,
            min_tokens=min_tokens,
            num_logprobs=num_logprobs,
            slo=slo,
            priority=priority,
        )
        self.driver.add(request)

    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick):
        left = sorted(self.driver.requests.keys() - self.driver.finished.keys())
        if left:
            self.driver.abort(pick.choice(left))

    @rule(count=st.integers(1, 12))
    def run_steps(self, count):
        for _ in range(count):
            self.driver.step()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.run()
            self.driver.check_end()


TestSpeculationMachine = SpeculationMachine.TestCase
TestSpeculationMachine.settings = examples(40, stateful_step_count=20)


@each_case("depth", [1, 2])
@each_case("kind", KINDS)
@each_case("policy", POLICY_NAMES)
def test_streams_are_whole_under_every_policy(policy, kind, depth):
    driver = make_driver(policy, kind, k=5, seed=1, depth=depth, num_blocks=18, acceptance=0.7)
    for index in range(8):
        request = make_request(
            f"r{index}",
            20 + 7 * index,
            8 + 5 * index,
            salt="shared" if index % 2 else None,
            stop_at=11 if index % 3 == 0 else None,
        )
        driver.add(request)
    driver.run()
    driver.check_end()
    if kind != "adaptive":
        assert sum(accepted for _, accepted in driver.counts.values()) > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_run_out_of_blocks_are_preempted_and_still_whole(depth):
    driver = make_driver("sarathi", "fixed", k=8, seed=3, depth=depth, num_blocks=16, acceptance=0.8)
    for index in range(6):
        driver.add(make_request(f"r{index}", 60, 90))
    driver.run()
    driver.check_end()
    assert driver.scheduler.table.num_preemptions > 0


@examples(30)
@given(
    k=st.integers(1, 16),
    acceptance=st.sampled_from([0.0, 0.4, 1.0]),
    max_tokens=st.integers(1, 40),
    depth=st.sampled_from([1, 2]),
)
def test_as_few_steps_as_accepted_drafts_allow(k, acceptance, max_tokens, depth):
    driver = make_driver("sarathi", "fixed", k=k, seed=k, depth=depth, acceptance=acceptance, fewer=0.0)
    driver.add(make_request("r0", 16, max_tokens))
    driver.run()
    driver.check_end()
    drafted, accepted = driver.counts["r0"]
    num_steps = sum(1 for scheduled in driver.log if scheduled.rows[0].samples)
    if depth == 1:
        assert num_steps == max_tokens - accepted
    if acceptance == 1.0:
        assert drafted == accepted
        assert num_steps == 1 + -(-(max_tokens - 1) // (k + 1))
