"""A step that is run several times does what as many steps do."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import ModelRunnerOutput
from onbeat.scheduler.replica.scheduler import Scheduler
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


def run(config, arrivals, *, repeats: bool) -> list[tuple[object, ...]]:
    """Return what every step held and delivered, a step that was run n times as n entries."""
    scheduler = Scheduler(config, LinearStepTime())
    waiting = sorted((step, index) for index, (step, _, _) in enumerate(arrivals))
    log: list[tuple[object, ...]] = []
    step, context = 0, 0
    while waiting or scheduler.num_unfinished:
        while waiting and (waiting[0][0] <= step or not scheduler.num_unfinished):
            index = waiting.pop(0)[1]
            scheduler.add(request(index, *arrivals[index][1:]))
        scheduled = scheduler.schedule(float(step), repeats=repeats)
        if scheduled is None:
            step += 1
            continue
        # Whoever runs it cuts the run where a request arrives.
        count = min(scheduled.max_repeats, waiting[0][0] - step if waiting else scheduled.max_repeats)
        sampling = [row.request_id for row in scheduled.rows if row.samples]
        outputs = scheduler.update(scheduled, ModelRunnerOutput([[0] * count for _ in sampling]), float(step))
        assert all(len(output.new_token_ids) == count for output in outputs)
        finished = [output.request_id for output in outputs if output.finish_reason]
        for repeat in range(count):
            context = scheduled.shape.decode_context_tokens + repeat * scheduled.shape.num_lm_head_rows
            rows = [(row.request_id, row.num_new_tokens, row.samples) for row in scheduled.rows]
            log.append((rows, context, finished if repeat == count - 1 else []))
        step += count
    scheduler.check_invariants()
    log.append((scheduler.num_preemptions, scheduler.num_prefix_hits, scheduler.kv.pool.num_used_blocks))
    return log


@examples(120)
@given(st.sampled_from(POLICY_NAMES), ARRIVALS, st.integers(16, 40), st.booleans())
def test_repeated_steps_equal_single_steps(policy, arrivals, num_blocks, prefix) -> None:
    config = make_config(policy, num_blocks=num_blocks, enable_prefix_caching=prefix)
    assert run(config, arrivals, repeats=True) == run(config, arrivals, repeats=False)


def test_a_long_decode_is_one_step() -> None:
    scheduler = Scheduler(make_config(), LinearStepTime())
    scheduler.add(replace(request(0, 20, 100), block_hashes=()))
    first = scheduler.schedule(0.0, repeats=True)
    assert first is not None
    assert first.max_repeats == 1, "a step with a prompt is run once"
    scheduler.update(first, ModelRunnerOutput([[0]]), 1.0)
    second = scheduler.schedule(1.0, repeats=True)
    assert second is not None
    assert second.max_repeats == 99
    outputs = scheduler.update(second, ModelRunnerOutput([[0] * 99]), 2.0)
    assert outputs[0].finish_reason is not None
    assert scheduler.num_unfinished == 0


def test_nothing_is_repeated_unasked() -> None:
    scheduler = Scheduler(make_config(), LinearStepTime())
    scheduler.add(request(0, 1, 100))
    for step in range(2):
        scheduled = scheduler.schedule(float(step))
        assert scheduled is not None
        assert scheduled.max_repeats == 1
        scheduler.update(scheduled, ModelRunnerOutput([[0]]), float(step))
