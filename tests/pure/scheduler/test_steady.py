"""A steady run does what as many steps do that are planned one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policies.triaged import TRIAGED
from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.steady import SteadyRun, begin_run
from tests.examples import examples
from tests.fake_step_time import LinearStepTime
from tests.pure.scheduler.driver import POLICY_NAMES, make_config

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=12
)
"""(step before which it comes, prompt tokens, output tokens)"""


def request(index: int, num_prompt_tokens: int, max_tokens: int) -> Request:
    return Request(
        request_id=f"r{index}",
        prompt_token_ids=range(num_prompt_tokens),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival=float(index),
        block_hashes=tuple(
            range(index % 3 * 1000, index % 3 * 1000 + (num_prompt_tokens + max_tokens) // 16)
        ),
    )


def run(config, arrivals, *, at_once: bool) -> list[tuple[object, ...]]:
    """Return what every step held and delivered, a run of n steps as n entries."""
    scheduler = Scheduler(config, LinearStepTime())
    waiting = sorted((step, index) for index, (step, _, _) in enumerate(arrivals))
    log: list[tuple[object, ...]] = []
    step = 0
    while waiting or scheduler.num_unfinished:
        while waiting and (waiting[0][0] <= step or not scheduler.num_unfinished):
            index = waiting.pop(0)[1]
            scheduler.add(request(index, *arrivals[index][1:]))
        scheduled = scheduler.schedule(float(step))
        if scheduled is None:
            step += 1
            continue
        num_steps, first_context = 1, scheduled.shape.decode_context_tokens
        steady = begin_run(scheduler, scheduled, 0) if at_once else None
        if steady is not None:
            # Whoever takes it cuts it where a request arrives.
            num_steps = min(steady.max_steps, waiting[0][0] - step if waiting else steady.max_steps)
        ends = [float(step + each) for each in range(1, num_steps)]
        # It may be told of in any number of parts.
        for part in filter(None, (ends[: len(ends) // 3], ends[len(ends) // 3 :])):
            assert steady is not None
            steady.advance(part)
        sampling = [row.request_id for row in scheduled.rows if row.samples]
        result = ModelRunnerOutput([[0] for _ in sampling])
        outputs = scheduler.update(scheduled, result, float(step + num_steps))
        finished = [output.request_id for output in outputs if output.finish_reason]
        rows = [(row.request_id, row.num_new_tokens, row.samples) for row in scheduled.rows]
        for repeat in range(num_steps):
            context = first_context + repeat * scheduled.shape.num_lm_head_rows
            log.append((rows, context, finished if repeat == num_steps - 1 else []))
        assert scheduled.shape.decode_context_tokens == context
        step += num_steps
    scheduler.check_invariants()
    log.append(
        (scheduler.table.num_preemptions, scheduler.table.num_prefix_hits, scheduler.kv.pool.num_used_blocks)
    )
    return log


@examples(120)
@given(st.sampled_from(POLICY_NAMES), ARRIVALS, st.integers(16, 40), st.booleans())
def test_runs_equal_single_steps(policy, arrivals, num_blocks, prefix) -> None:
    config = make_config(policy, num_blocks=num_blocks, enable_prefix_caching=prefix)
    assert run(config, arrivals, at_once=True) == run(config, arrivals, at_once=False)


def begun(scheduler: Scheduler, now: float) -> tuple[SchedulerOutput, SteadyRun | None]:
    scheduled = scheduler.schedule(now)
    assert scheduled is not None
    run = begin_run(scheduler, scheduled, 0)
    assert run is None or isinstance(run, SteadyRun)
    return scheduled, run


def test_a_long_decode_is_one_run_from_its_second_token_on() -> None:
    scheduler = Scheduler(make_config(), LinearStepTime())
    scheduler.add(replace(request(0, 20, 100), block_hashes=()))
    first, none = begun(scheduler, 0.0)
    assert none is None, "a step with a prompt is one step"
    scheduler.update(first, ModelRunnerOutput([[0]]), 1.0)
    second, steady = begun(scheduler, 1.0)
    assert steady is not None
    assert steady.max_steps == 99
    steady.advance([2.0 + step for step in range(98)])
    outputs = scheduler.update(second, ModelRunnerOutput([[0]]), 100.0)
    assert outputs[0].finish_reason is not None
    assert scheduler.num_unfinished == 0


def test_a_first_token_is_one_step_though_it_looks_like_a_decode() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=32), LinearStepTime())
    scheduler.add(replace(request(0, 33, 100), block_hashes=()))
    scheduler.update(begun(scheduler, 0.0)[0], ModelRunnerOutput([]), 1.0)
    last, none = begun(scheduler, 1.0)
    assert [row.num_new_tokens for row in last.rows] == [1]
    assert none is None


@pytest.mark.parametrize("policy", ["edf-triage", "simple"])
def test_nothing_runs_on_under_a_policy_that_does_not_say_how_long(policy, monkeypatch) -> None:
    monkeypatch.setitem(POLICIES, policy, TRIAGED[policy])
    scheduler = Scheduler(make_config(policy), LinearStepTime())
    scheduler.add(request(0, 1, 100))
    for step in range(3):
        scheduled, none = begun(scheduler, float(step))
        assert none is None
        scheduler.update(scheduled, ModelRunnerOutput([[0]]), float(step) + 0.5)


def test_whoever_was_preempted_is_looked_at_again_before_anything_runs_on() -> None:
    scheduler = Scheduler(make_config(num_blocks=16, enable_prefix_caching=False), LinearStepTime())
    for index in range(2):
        scheduler.add(request(index, 120, 60))
    scheduled, steady = begun(scheduler, 0.0)
    for step in range(1, 100):
        num_rows = sum(row.samples for row in scheduled.rows)
        scheduler.update(scheduled, ModelRunnerOutput([[0]] * num_rows), float(step))
        scheduled, steady = begun(scheduler, float(step))
        if scheduler.table.num_preemptions:
            break
    assert scheduler.table.num_preemptions == 1
    assert [row.request_id for row in scheduled.rows] == ["r0"]
    assert steady is None
