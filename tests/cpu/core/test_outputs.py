"""What a step gives to requests: told to whoever reads it, late or at once, here or in another process."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.protocols import StepOutputs
from onbeat.core.step import ModelRunnerOutput
from onbeat.engine.messages import decode_from_engine, encode, in_portions
from onbeat.scheduler.replica.scheduler import Scheduler
from tests.pure.scheduler.driver import make_config, make_request

STOP = 9


def steps_of(*, num_steps: int) -> list[Any]:
    """Return what steps gave: requests begin and end in the midst of streams that go on."""
    scheduler = Scheduler(make_config(max_num_batched_tokens=256))
    scheduler.add(make_request("a", 5, 40))
    scheduler.add(make_request("short", 5, 6))
    scheduler.add(make_request("stopped", 5, 40, stop_token_ids=(STOP,)))
    scheduler.add(make_request("b", 5, 40))
    outputs = []
    for step in range(num_steps):
        if step == 8:
            scheduler.add(make_request("late", 5, 40))
        scheduled = scheduler.schedule(float(step))
        assert scheduled is not None
        sampled = [
            [STOP if step == 12 and row.request_id == "stopped" else 100 * step + place]
            for place, row in enumerate(scheduled.rows)
        ]
        outputs.append(scheduler.update(scheduled, ModelRunnerOutput(sampled), float(step)))
        assert len(outputs[-1]) == len(scheduled.rows)
    return outputs


def told(outputs: Any) -> list[Any]:
    return [
        (
            each.request_id,
            each.new_token_ids,
            each.finish_reason,
            each.num_previous_tokens,
            each.scheduled_time,
        )
        for each in outputs
    ]


def test_what_is_read_late_is_what_was_read_at_once():
    at_once = [told(outputs) for outputs in _read_each(20)]
    assert [told(outputs) for outputs in steps_of(num_steps=20)] == at_once


def _read_each(num_steps: int) -> list[Any]:
    """Return the same, each read before the next step is planned."""
    return [list(steps_of(num_steps=num + 1)[num]) for num in range(num_steps)]


@pytest.mark.parametrize("is_read_before", [False, True])
def test_another_process_hears_the_same(is_read_before):
    for outputs, expected in zip(steps_of(num_steps=20), steps_of(num_steps=20), strict=True):
        if is_read_before:
            assert outputs[0].new_token_ids
        [message] = in_portions(StepOutputs(1.0, outputs))
        heard = decode_from_engine(encode(message)).outputs.outputs
        assert told(heard) == told(expected)
        assert [each.fate for each in heard] == [each.fate for each in expected]


def test_rows_are_told_of_in_their_order():
    for outputs in steps_of(num_steps=20):
        places = [output.new_token_ids[0] % 100 for output in outputs if output.new_token_ids != [STOP]]
        assert places == sorted(places)
