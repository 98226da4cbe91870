"""A draft model reads a request before it drafts for it: planned, priced, and only where it pays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape, SchedulerOutput
from onbeat.scheduler.scheduler_config import DraftLength, SpeculationConfig
from onbeat.simulator.deliveries import CatchUp
from tests.pure.scheduler.speculating import (
    DraftStepTime,
    TimedSpeculatingDriver,
    make_config,
    make_request,
)

MOST = 64


@dataclass
class ReadingStepTime(DraftStepTime):
    """A device with a draft model that takes time to read."""

    per_read_token: float = 0.02e-3

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        return super().step_time(shape, q) + self.per_read_token * shape.num_catch_up_tokens


class ReadingDriver(TimedSpeculatingDriver):
    """A driver whose draft model reads as the engine's does; holds plans against it."""

    def __init__(
        self, draft_length: DraftLength = "adaptive", *, reading: float = 0.02e-3, **options
    ) -> None:
        config = make_config(
            k=4, num_blocks=4096, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048,
            **{name: options.pop(name) for name in ("policy",) if name in options},
        )  # fmt: skip
        speculation = SpeculationConfig(
            num_speculative_tokens=4, draft_length=draft_length, runs_model=True, max_catch_up_tokens=MOST
        )
        model = ReadingStepTime(per_pass=1e-3, per_read_token=reading)
        super().__init__(replace(config, speculation=speculation), model, acceptance=0.9, **options)
        self.catch_up = CatchUp(MOST, num_near=config.block_size)
        self.num_read = 0
        propose = self.runner._propose
        self.runner._propose = lambda row: propose(row) if self.through.get(row.request_id) else []  # type: ignore[method-assign]
        self.through: dict[str, bool] = {}

    def collect(self) -> None:
        scheduled = self.in_flight[0]
        self.read(scheduled)
        before = {key: len(tokens) for key, tokens in self.outputs.items()}
        super().collect()
        for row in scheduled.rows:
            if row.num_draft_tokens and self.through[row.request_id]:
                num_new = len(self.outputs[row.request_id]) - before[row.request_id]
                self.catch_up.confirm(row.request_id, row.num_draft_tokens, num_new - 1)

    def read(self, scheduled: SchedulerOutput) -> None:
        """Let the draft model read, and compare with what was planned."""
        self.catch_up.forget(scheduled.released_ids)
        asked = [row for row in scheduled.rows if row.num_draft_tokens]
        num_drafted, chunks = self.catch_up.propose(asked)
        self.through = {row.request_id: num > 0 for row, num in zip(asked, num_drafted, strict=True)}
        expected = BatchShape()
        for num_read, num_tokens in chunks:
            expected.add_catch_up(num_read, num_tokens)
        shape = scheduled.shape
        assert shape.num_catch_up_tokens == expected.num_catch_up_tokens <= MOST
        assert shape.catch_up_pairs == expected.catch_up_pairs
        self.num_read += expected.num_catch_up_tokens

    @property
    def num_drafts(self) -> int:
        return sum(scheduled.shape.num_draft_tokens for scheduled in self.log)


@pytest.mark.parametrize("draft_length", ["adaptive", "fixed"])
def test_the_plan_knows_what_the_draft_model_reads(draft_length: DraftLength) -> None:
    driver = ReadingDriver(draft_length)
    for index in range(6):
        driver.add(make_request(f"r{index}", 20 + 60 * index, 150))
    driver.run()
    driver.check_end()
    assert driver.num_read > 6 * 20
    assert driver.num_drafts > 200


def test_a_preempted_request_is_read_again() -> None:
    driver = ReadingDriver()
    driver.scheduler = type(driver.scheduler)(
        replace(driver.scheduler.config, num_blocks=24, max_model_len=256), driver._model
    )
    for index in range(4):
        driver.add(make_request(f"r{index}", 60, 100))
    driver.run()
    driver.check_end()
    assert driver.scheduler.table.num_preemptions > 0


def test_a_prompt_that_takes_longer_to_read_than_drafts_would_save_is_left_unread() -> None:
    driver = ReadingDriver(reading=1e-3)
    driver.add(make_request("long", 1500, 20))
    driver.run()
    assert driver.num_read == driver.num_drafts == 0


def test_the_same_prompt_is_read_where_the_answer_is_long() -> None:
    driver = ReadingDriver(reading=0.1e-3)
    driver.add(make_request("long", 1500, 400))
    driver.run()
    assert driver.num_read >= 1500
    assert driver.num_drafts > 100


def test_short_answers_are_learnt() -> None:
    """At first they are taken to be long, as answers in chats are."""
    driver = ReadingDriver(reading=0.15e-3)
    read = []
    for index in range(40):
        driver.num_read = 0
        driver.add(make_request(f"r{index}", 600, 500, stop_at=11))
        driver.run()
        read.append(driver.num_read)
    assert read[0] > 0
    assert not any(read[-5:])


def test_nothing_is_read_while_prompts_wait() -> None:
    driver = ReadingDriver()
    driver.add(make_request("r", 200, 300))
    while not driver.outputs["r"]:
        driver.step()
    for index in range(30):
        driver.add(make_request(f"p{index}", 1000, 1))
        driver.step()
        assert driver.num_read == 0
    driver.run()
    assert driver.num_read >= 200


def test_what_is_read_fits_the_time_that_streams_have() -> None:
    """A stream that is served faster than its objective has more time with each token."""
    driver = ReadingDriver(policy="slo", reading=1e-3)
    driver.add(make_request("r", 200, 100, slo=SLO(ttft=10.0, tbt=0.02)))
    driver.run()
    reading = [scheduled for scheduled in driver.log if scheduled.shape.num_catch_up_tokens]
    assert reading
    for scheduled in reading:
        assert scheduled.budget is not None
        assert driver._model.step_time(scheduled.shape) <= scheduled.budget + 1e-9
