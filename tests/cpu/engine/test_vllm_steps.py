"""What vLLM's workers are told: each step names what they know, and all that left is forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.engine.vllm.runner import Translator
from onbeat.scheduler.replica.scheduler import Scheduler
from tests.fake_step_time import LinearStepTime
from tests.pure.scheduler.driver import make_config, make_request


class Workers:
    """Stands in for vLLM: keeps what its workers keep, and checks each step against it."""

    def __init__(self, *, is_second_runner: bool, num_slots: int) -> None:
        self.is_second_runner = is_second_runner
        self.num_slots = num_slots
        self.known: dict[str, SimpleNamespace] = {}
        self.last: set[str] = set()

    def no_cached_requests(self) -> Any:
        return SimpleNamespace(
            req_ids=[],
            new_block_ids=[],
            num_computed_tokens=[],
            num_output_tokens=[],
            resumed_req_ids=set(),
            all_token_ids={},
        )

    def blocks(self, block_ids: Any, slot: int | None, *, is_new: bool = True) -> tuple[list[int], ...]:
        return (list(block_ids), [] if slot is None or not is_new else [slot])

    def new_request(self, request: Any, outputs: Any, blocks: Any, num_computed: int) -> Any:
        return SimpleNamespace(
            request=request, outputs=list(outputs), blocks=blocks, num_computed=num_computed
        )

    def step(self, new: Any, cached: Any, num_tokens: Any, finished: set[str], preempted: set[str]) -> Any:
        assert not finished & preempted
        for name in finished | (preempted if self.is_second_runner else set()):
            del self.known[name]
        for each in new:
            name = each.request.request_id
            assert name not in self.known
            self.known[name] = SimpleNamespace(blocks=each.blocks, request=each.request)
        for index, name in enumerate(cached.req_ids):
            state, blocks = self.known[name], cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                assert not self.is_second_runner
                assert name not in self.last
                state.blocks = blocks
            elif blocks is not None:
                for held, more in zip(state.blocks, blocks, strict=True):
                    held.extend(more)
            if name not in self.last:
                num_outputs = cached.num_output_tokens[index]
                assert len(cached.all_token_ids[name]) == len(state.request.prompt_token_ids) + num_outputs
        slots = [self.known[name].blocks[1] for name in num_tokens]
        if self.num_slots:
            assert all(len(each) == 1 for each in slots)
            assert len({each[0] for each in slots}) == len(slots)
        self.last = set(num_tokens)
        return num_tokens


def run(step: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput([[7] for row in step.rows if row.samples])


@pytest.mark.parametrize("is_second_runner", [False, True])
@pytest.mark.parametrize("num_slots", [0, 8])
@given(data=st.data())
def test_workers_know_what_a_step_names(is_second_runner: bool, num_slots: int, data: Any) -> None:
    """In a KV cache that is too small for all, with requests that are aborted wherever they stand."""
    scheduler = Scheduler(make_config("slo", num_blocks=18), LinearStepTime())
    workers = Workers(is_second_runner=is_second_runner, num_slots=num_slots)
    translator = Translator(workers)  # type: ignore[arg-type]
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12))
    for index, (prompt, output) in enumerate(lengths):
        scheduler.add(make_request(str(index), prompt, output), 0.0)
    aborts = data.draw(st.dictionaries(st.integers(0, 60), st.integers(0, 11), max_size=6))
    now = 0.0
    for number in range(2000):
        if number in aborts:
            scheduler.abort([str(aborts[number])])
        step = scheduler.schedule(now)
        if step is None:
            break
        translator.change(step)
        told = translator.step(step)
        assert list(told) == [row.request_id for row in step.rows]
        for row in step.rows:
            blocks = workers.known[row.request_id].blocks[0]
            assert len(blocks) * 16 >= row.num_computed_tokens + row.num_new_tokens
        now += 0.01
        output = run(step)
        for row, ids in zip([row for row in step.rows if row.samples], output.sampled_token_ids, strict=True):
            translator.told[row.request_id].row.output_token_ids += ids
        scheduler.update(step, output, now)
    assert not scheduler.num_unfinished
    # What ended with the last step is told with the next one, as onbeat's own engines hear of it.
    scheduler.add(make_request("last", 4, 1), now)
    step = scheduler.schedule(now)
    assert step is not None
    translator.change(step)
    translator.step(step)
    assert set(workers.known) == {"last"} == set(translator.told)
