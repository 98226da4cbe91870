"""What the policies with deadlines keep, whatever arrives and however much of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from onbeat.core.request import FinishReason, Request
from onbeat.core.slo import SLO, SLO_CLASSES, SLO_MODES, ShedMode
from onbeat.scheduler.replica.policies import POLICIES
from tests.examples import examples
from tests.pure.scheduler.driver import token_of
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request

IMPOSSIBLE = SLO(ttft=1e-3, tbt=1e-3)
TIGHT = SLO(ttft=0.1, tbt=0.006)
POLICY_NAMES = [name for name, each in POLICIES.items() if each.needs_step_time or each.order]

slos = st.sampled_from(
    [None, *SLO_CLASSES.values(), TIGHT, IMPOSSIBLE, SLO(ttft=0.3), SLO(tbt=0.02), SLO(e2e=1.0), SLO()]
)
models = st.builds(
    FakeStepTime,
    fixed=st.sampled_from([1e-4, 2e-3, 2e-2]),
    per_token=st.sampled_from([1e-6, 1e-4]),
    per_context=st.sampled_from([0.0, 1e-6]),
    spread=st.sampled_from([0.0, 0.3]),
)


def make_load(seeds: list[tuple[int, int, int, SLO | None]]) -> list[Request]:
    """Requests of (prompt tokens, output tokens, ms since the one before, objectives)."""
    arrival, requests = 0.0, []
    for index, (num_prompt, num_output, gap_ms, slo) in enumerate(seeds):
        arrival += gap_ms * 1e-3
        requests.append(make_request(f"r{index}", num_prompt, num_output, arrival=arrival, slo=slo))
    return requests


loads = st.lists(
    st.tuples(st.integers(1, 600), st.integers(1, 60), st.integers(0, 100), slos), min_size=1, max_size=15
).map(make_load)


class DeadlineMachine(RuleBasedStateMachine):
    """Arrivals, aborts, pauses and steps in any order; `TimedDriver.check_step` looks at every plan."""

    @initialize(
        policy=st.sampled_from(POLICY_NAMES),
        model=models,
        mode=st.sampled_from(SLO_MODES),
        depth=st.sampled_from([1, 2]),
        num_blocks=st.sampled_from([64, 80, 512]),
        max_num_seqs=st.sampled_from([1, 4, 16]),
    )
    def start(self, policy, model, mode, depth, num_blocks, max_num_seqs):
        config = make_config(policy, num_blocks=num_blocks, max_num_seqs=max_num_seqs, slo_mode=mode)
        self.driver = TimedDriver(config, model, depth=depth)
        self.aborted: set[str] = set()

    @rule(
        num_prompt=st.integers(1, 900),
        max_tokens=st.integers(1, 80),
        slo=slos,
        shed=st.sampled_from(list(ShedMode)),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        tenant=st.sampled_from([None, "a", "b"]),
        shared=st.booleans(),
    )
    def arrive(self, num_prompt, max_tokens, slo, shed, weight, tenant, shared):
        request_id = f"r{len(self.driver.requests)}"
        request = make_request(
            request_id,
            num_prompt,
            max_tokens,
            arrival=self.driver.now,
            slo=slo,
            shed=shed,
            weight=weight,
            tenant=tenant,
            salt="shared" if shared else None,
        )
        self.driver.add(request)

    @precondition(lambda self: self.driver.outputs.keys() - self.driver.finished.keys())
    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick):
        request_id = pick.choice(sorted(self.driver.outputs.keys() - self.driver.finished.keys()))
        self.driver.abort(request_id)
        self.aborted.add(request_id)

    @rule(count=st.integers(1, 12))
    def run_steps(self, count):
        for _ in range(count):
            self.driver.step()

    @rule(seconds=st.floats(0, 3))
    def stall(self, seconds):
        self.driver.now += seconds

    @invariant()
    def blocks_and_requests_are_conserved(self):
        if hasattr(self, "driver"):
            self.driver.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.serve([])
        scheduler = driver.scheduler
        scheduler.check_invariants()
        assert scheduler.kv.pool.num_used_blocks == 0, "blocks leaked"
        assert driver.finished.keys() | driver.rejected.keys() == driver.requests.keys(), "one never ended"
        for request_id, reason in driver.finished.items():
            request, tokens = driver.requests[request_id], driver.outputs[request_id]
            num_prompt = len(request.prompt_token_ids)
            assert tokens == [token_of(request_id, num_prompt + i) for i in range(len(tokens))]
            if request_id in self.aborted:
                assert reason is FinishReason.ABORT
            elif reason is FinishReason.EXPIRED:
                assert request.shed is ShedMode.REJECT
                assert not tokens
            else:
                assert reason is FinishReason.LENGTH
                assert len(tokens) == min(request.sampling.max_tokens, 1024 - num_prompt)
        assert all(driver.requests[each].shed is ShedMode.REJECT for each in driver.rejected)


TestDeadlineMachine = DeadlineMachine.TestCase
TestDeadlineMachine.settings = examples(80, stateful_step_count=25)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("depth", [1, 2])
@examples(15)
@given(load=loads, model=models)
def test_fed_alike_two_schedulers_plan_alike(
    policy: str, depth: int, load: list[Request], model: FakeStepTime
) -> None:
    first, second = (TimedDriver(make_config(policy, num_blocks=80), model, depth=depth) for _ in range(2))
    first.serve(load)
    second.serve(load)
    assert first.log == second.log


POSSIBLE = [SLO(ttft=1.0, tbt=0.02), SLO_CLASSES["interactive"], SLO_CLASSES["standard"], None]
"""Objectives that `FakeStepTime` as it is can keep beside others."""


@examples(40)
@given(
    load=st.lists(
        st.tuples(st.integers(1, 600), st.integers(1, 60), st.integers(50, 200), st.sampled_from(POSSIBLE)),
        min_size=1,
        max_size=12,
    ).map(make_load),
    num_prompt=st.integers(1, 600),
    num_output=st.integers(1, 60),
    arrival=st.floats(0.0, 1.0),
)
def test_an_impossible_request_makes_no_token_late_by_more_than_a_smallest_step(
    load: list[Request], num_prompt: int, num_output: int, arrival: float
) -> None:
    model = FakeStepTime()
    alone, together = TimedDriver(make_config(), model), TimedDriver(make_config(), model)
    alone.serve(load)
    together.serve(
        [*load, make_request("impossible", num_prompt, num_output, slo=IMPOSSIBLE, arrival=arrival)]
    )
    assert together.finished["impossible"] is FinishReason.LENGTH
    for request in load:
        if request.slo is not None:
            before, after = alone.lateness(request.request_id), together.lateness(request.request_id)
            for late_before, late_after in zip(before, after, strict=True):
                assert late_after <= max(late_before, 0.0) + model.smallest_step + 1e-9


@examples(25)
@given(load=loads, slo=slos, policy=st.sampled_from(POLICY_NAMES))
def test_all_end_within_the_time_that_they_would_take_one_after_the_other(
    load: list[Request], slo: SLO | None, policy: str
) -> None:
    """After the last arrival nothing is waited for: some request gets its next tokens in every step."""
    model = FakeStepTime()
    load = [replace(request, slo=slo) for request in load]
    driver = TimedDriver(make_config(policy), model)
    driver.serve(load)
    alone = sum(model.idle_seconds(len(each.prompt_token_ids), each.sampling.max_tokens) for each in load)
    num_chunks = sum(1 + len(each.prompt_token_ids) // 16 for each in load)
    assert driver.now <= load[-1].arrival + alone + num_chunks * model.smallest_step
    assert len(driver.finished) == len(load)


@examples(200)
@given(model=models, num_prompt=st.integers(1, 900), slo=slos, shed=st.sampled_from(list(ShedMode)))
def test_an_idle_machine_begins_at_once(model, num_prompt, slo, shed):
    driver = TimedDriver(make_config(), model)
    driver.add(make_request("r0", num_prompt, 1, slo=slo, shed=shed))
    scheduler = driver.scheduler
    assert driver.rejected or scheduler.schedule(0.0) is not None or scheduler.planner.take_expired()
