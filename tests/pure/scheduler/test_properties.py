"""Properties that every policy keeps, whatever arrives, aborts or runs out of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onbeat.core.request import FinishReason
from onbeat.scheduler.replica.policies import POLICIES
from tests.examples import examples
from tests.pure.scheduler.driver import (
    POLICY_NAMES,
    Driver,
    make_config,
    make_request,
    sent_tokens,
    token_of,
)

WINDOWS = st.sampled_from([(1, 0), (2, 24), (3, 40), (4, 1)])
"""Block tables of a request, and tokens that a window reads."""


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts and steps in any order; `Driver.check_step` looks at every plan."""

    @initialize(
        policy=st.sampled_from(POLICY_NAMES),
        order=st.sampled_from(["fcfs", "priority"]),
        depth=st.sampled_from([1, 2, 3]),
        is_pipeline=st.booleans(),
        num_blocks=st.integers(16, 40),
        prefix=st.booleans(),
        windows=WINDOWS,
    )
    def start(self, policy, order, depth, is_pipeline, num_blocks, prefix, windows):
        if POLICIES[policy].order is not None:
            order = "fcfs"  # its own takes the place of priorities
        config = make_config(
            policy,
            num_blocks=num_blocks,
            scheduling_policy=order,
            enable_prefix_caching=prefix,
            num_micro_batches=depth if is_pipeline else 1,
            num_tables=windows[0],
            window_length=windows[1],
        )
        self.driver = Driver(config, depth=depth)
        self.requests: dict[str, tuple[int, int]] = {}
        self.aborted: set[str] = set()
        self.is_shared: dict[str, bool] = {}

    @rule(
        num_prompt=st.integers(1, 200),
        max_tokens=st.integers(1, 80),
        priority=st.integers(-2, 2),
        shared=st.booleans(),
        num_sent=st.none() | st.integers(1, 79),
    )
    def arrive(self, num_prompt, max_tokens, priority, shared, num_sent):
        """Of those with `num_sent`, another replica has delivered as many tokens, or all but the last."""
        request_id = f"r{len(self.requests)}"
        salt = "shared" if shared else request_id
        num_left = min(max_tokens, self.driver.scheduler.config.max_model_len - num_prompt)
        sent = {} if num_sent is None else sent_tokens(request_id, num_prompt, min(num_sent, num_left - 1))
        self.driver.add(
            make_request(
                request_id,
                num_prompt,
                max_tokens,
                arrival=self.driver.now,
                priority=priority,
                salt=salt,
                **sent,
            )
        )
        self.requests[request_id] = (num_prompt, max_tokens)
        self.is_shared[request_id] = shared

    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick):
        if self.requests:
            request_id = pick.choice(sorted(self.requests))
            if request_id not in self.driver.finished:
                self.driver.abort(request_id)
                self.aborted.add(request_id)

    @rule(pick=st.randoms(use_true_random=False))
    def break_one(self, pick):
        """Its next token is no number, and those who share its KV may fail with it."""
        if self.requests:
            self.driver.breaking.add(pick.choice(sorted(self.requests)))

    @rule(count=st.integers(1, 12))
    def run_steps(self, count):
        for _ in range(count):
            self.driver.step()

    @invariant()
    def blocks_and_requests_are_conserved(self):
        if hasattr(self, "driver"):
            self.driver.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        scheduler = self.driver.scheduler
        scheduler.check_invariants()
        assert scheduler.kv.pool.num_used_blocks == 0, "blocks leaked"
        assert self.driver.finished.keys() == self.requests.keys(), "a request never ended"
        for request_id, (num_prompt, max_tokens) in self.requests.items():
            expected = min(max_tokens, scheduler.config.max_model_len - num_prompt)
            tokens = self.driver.outputs[request_id]
            assert tokens == [token_of(request_id, num_prompt + i) for i in range(len(tokens))]
            if request_id in self.aborted:
                assert self.driver.finished[request_id] is FinishReason.ABORT
            elif self.driver.finished[request_id] is FinishReason.ERROR:
                assert self.driver.breaking
                assert request_id in self.driver.breaking or self.is_shared[request_id]
            else:
                assert request_id not in self.driver.breaking or len(tokens) == expected
                assert self.driver.finished[request_id] is FinishReason.LENGTH
                assert len(tokens) == expected


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = examples(200, stateful_step_count=30)

loads = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 60), st.integers(0, 20)), min_size=1, max_size=20
)


def run_load(load, policy: str, *, depth: int = 1, **changes) -> Driver:
    """Requests arrive at given steps and run to the end."""
    driver = Driver(make_config(policy, **changes), depth=depth)
    pending = sorted(
        (
            (arrival, f"r{i}", num_prompt, num_output)
            for i, (num_prompt, num_output, arrival) in enumerate(load)
        )
    )
    for _ in range(20_000):
        while pending and pending[0][0] <= driver.now:
            arrival, request_id, num_prompt, num_output = pending.pop(0)
            driver.add(make_request(request_id, num_prompt, num_output, arrival=float(arrival)))
        if not driver.step() and not pending:
            return driver
    raise AssertionError("a request starves")


@pytest.mark.parametrize("policy", POLICY_NAMES)
@examples(25)
@given(load=loads)
def test_first_come_is_first_scheduled(policy, load):
    driver = run_load(load, policy, num_blocks=24)
    order = [f"r{i}" for i in sorted(range(len(load)), key=lambda i: (load[i][2], f"r{i}"))]
    assert driver.first_scheduled == order


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("depth", [1, 2])
@examples(15)
@given(load=loads)
def test_decision_log_repeats_exactly(policy, depth, load):
    first = run_load(load, policy, depth=depth, num_blocks=24)
    second = run_load(load, policy, depth=depth, num_blocks=24)
    assert first.log == second.log


@examples(40)
@given(load=loads, policies=st.permutations(POLICY_NAMES))
def test_tokens_do_not_depend_on_policy_depth_or_memory(load, policies):
    reference = run_load(load, policies[0], num_blocks=200).outputs
    assert run_load(load, policies[1], num_blocks=16).outputs == reference
    assert run_load(load, policies[2], depth=2, num_blocks=17).outputs == reference
