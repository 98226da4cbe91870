"""What the step loop tells of steps that verify drafts, with a runner whose proposer is right for a while."""

from __future__ import annotations

import pytest

from onbeat.core.protocols import StepOutputs
from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import PendingStep, ThreadExecutor, done_step
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig, SpeculationConfig
from tests.fake_step_time import LinearStepTime

MOST = 3
"""Drafts of a row."""


class DraftingRunner:
    """Token at position p is p % 97. The proposer finds every draft asked for; the first `num_right` are."""

    def __init__(self, num_right: int) -> None:
        self._num_right = num_right
        self._num_tokens: dict[str, int] = {}

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        for admitted in scheduled.admitted:
            request = admitted.request
            num_tokens = len(request.prompt_token_ids) + len(admitted.output_token_ids)
            self._num_tokens[request.request_id] = num_tokens
        rows = [row for row in scheduled.rows if row.samples]
        sampled = []
        for row in rows:
            # Where a step before was in flight the row does not know its own place.
            start = self._num_tokens[row.request_id]
            end = start + 1 + min(row.num_draft_tokens, self._num_right)
            self._num_tokens[row.request_id] = end
            sampled.append([position % 97 for position in range(start, end)])
        return done_step(ModelRunnerOutput(sampled, num_drafted=[row.num_draft_tokens for row in rows]))


def run(
    num_right: int, *lengths: tuple[int, int], depth: int = 1, speculates: bool = True
) -> tuple[dict[str, list[int]], list[StepOutputs]]:
    """Run requests of (prompt tokens, output tokens); return their tokens and the messages."""
    speculation = SpeculationConfig(num_speculative_tokens=MOST, draft_length="fixed")
    config = SchedulerConfig(
        num_blocks=256,
        max_model_len=1024,
        max_num_batched_tokens=256,
        policy="sarathi",
        speculation=speculation if speculates else None,
    )
    executor = ThreadExecutor(DraftingRunner(num_right))
    core = EngineCore(Scheduler(config, LinearStepTime()), executor, max_in_flight_steps=depth)
    tokens: dict[str, list[int]] = {}
    for index, (num_prompt, num_output) in enumerate(lengths):
        sampling = SamplingParams(max_tokens=num_output)
        core.add(
            Request(request_id=f"r{index}", prompt_token_ids=tuple(range(num_prompt)), sampling=sampling)
        )
        tokens[f"r{index}"] = []
    messages = []
    while core.has_work:
        if (message := core.step()) is not None:
            messages.append(message)
            for output in message.outputs:
                tokens[output.request_id] += output.new_token_ids
    core.scheduler.check_invariants()
    core.shutdown()
    return tokens, messages


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_right", [0, 1, MOST])
def test_steps_add_up_to_what_requests_are_told(num_right: int, depth: int) -> None:
    lengths = ((5, 40), (300, 17), (20, 2), (31, 1))
    tokens, messages = run(num_right, *lengths, depth=depth)
    for index, (num_prompt, num_output) in enumerate(lengths):
        assert tokens[f"r{index}"] == [(num_prompt + k) % 97 for k in range(num_output)]
    drafts = [message.stats.drafts for message in messages if message.stats and message.stats.drafts]
    last = {output.request_id: output for message in messages for output in message.outputs}.values()
    assert sum(sum(step.drafted_at) for step in drafts) == sum(output.num_drafted_tokens for output in last)
    num_accepted = sum(sum(step.accepted_at) for step in drafts)
    assert num_accepted == sum(output.num_accepted_tokens for output in last)
    assert (num_accepted > 0) == (num_right > 0)
    num_firsts = len(lengths)  # made by prompts, not by decode rows
    assert sum(step.num_tokens for step in drafts) == sum(map(len, tokens.values())) - num_firsts


def test_a_step_tells_where_drafts_were_accepted() -> None:
    _, messages = run(2, (5, 50), (6, 50))
    middle = messages[5].stats
    assert middle is not None
    assert middle.drafts is not None
    assert middle.drafts.lengths == [0, 0, 0, 2]
    assert middle.drafts.drafted_at == [2, 2, 2]
    assert middle.drafts.accepted_at[:2] == [2, 2]
    assert sum(middle.drafts.accepted_at[2:]) == 0
    assert middle.drafts.num_tokens == 6
    assert middle.drafts.expected_tokens >= 2


def test_rows_that_verify_are_no_chunks() -> None:
    _, messages = run(2, (5, 50), (400, 10))
    chunks = [message.stats.chunk_request_ids for message in messages if message.stats]
    assert chunks[:2] == [["r0", "r1"], ["r1"]]
    assert not any(chunks[2:])


def test_nothing_is_told_where_nothing_is_speculated() -> None:
    _, messages = run(2, (5, 10), speculates=False)
    assert all(message.stats is not None and message.stats.drafts is None for message in messages)
