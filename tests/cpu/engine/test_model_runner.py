"""What the model runner keeps between steps, and what it returns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from onbeat.core.request import Request, SamplingParams, TokenLogprobs
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.backends.base import warm_up
from onbeat.engine.draw import Logits
from onbeat.engine.input_batch import InputBatch
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampled import BestTokens, SampledTokens
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.torch.forward import TorchForward
from tests.cpu.engine.forwards import on_torch
from tests.cpu.engine.seeing_sampler import SeesLogits
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import random_prompt, tiny_model
from tests.pure.scheduler.driver import make_config


class FailingSampler(SeesLogits):
    """Greedy, but one step's rows all fail."""

    def __init__(self, failing_step: int) -> None:
        self.failing_step = failing_step
        self.step = -1

    def sample(
        self, logits_RV: Logits | None, rows: list[SamplingRow], best: BestTokens | None = None
    ) -> SampledTokens:
        assert logits_RV is not None
        self.step += 1
        if self.step == self.failing_step:
            errors = dict.fromkeys(range(len(rows)), "broken logits")
            return SampledTokens([-1] * len(rows), [None] * len(rows), errors)
        return SampledTokens(logits_RV.argmax(axis=-1).tolist(), [None] * len(rows))


def make_runner(sampler: Sampler | FailingSampler | None = None, **options: int) -> ModelRunner:
    model = tiny_model("llama3").weights
    sizes = {"num_blocks": 32, "block_size": 16, "max_num_seqs": 4, "max_model_len": 128, **options}
    forward = TorchForward(model, num_blocks=sizes["num_blocks"], block_size=sizes["block_size"])
    chooser = sampler or Sampler(model.config.vocab_size)
    return ModelRunner(make_config("sarathi", **sizes), forward, chooser)


def request(request_id: str, prompt: list[int], **sampling: float) -> Request:
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=params)


def step(
    rows: list[ScheduledRequest], admitted: tuple[AdmittedRequest, ...] = (), released: tuple[str, ...] = ()
) -> SchedulerOutput:
    return SchedulerOutput(0, tuple(rows), admitted, released, BatchShape())


def test_a_chunk_that_samples_nothing_returns_nothing() -> None:
    driver = StepDriver(on_torch(tiny_model("llama3").weights))
    driver.add(random_prompt(30), 4)
    output = driver.step({"request-0": 10})
    assert output.sampled_token_ids == []
    assert driver.sampler.logits == []


def test_a_step_without_rows_still_drops_released_requests() -> None:
    runner = make_runner()
    admitted = AdmittedRequest(request("a", [5, 6]), (), (0,))
    runner.execute(step([ScheduledRequest("a", 0, 2, (), samples=True)], (admitted,)))
    assert runner.execute(step([], released=("a", "never ran"))).sampled_token_ids == []
    assert runner.batch.slots == {}
    assert len(runner.batch.free_slots) == 4


def test_slots_and_blocks_are_used_again() -> None:
    runner = make_runner(max_num_seqs=1)
    prompt = random_prompt(40)
    first: list[list[int]] = []
    for index in range(3):
        name = f"r{index}"
        admitted = AdmittedRequest(request(name, prompt), (), (7, 3, 9))
        released = (f"r{index - 1}",) if index else ()
        output = runner.execute(
            step([ScheduledRequest(name, 0, 40, (), samples=True)], (admitted,), released)
        )
        first += output.sampled_token_ids
    assert first[0] == first[1] == first[2]


def test_the_next_step_runs_before_anyone_saw_the_token() -> None:
    """Positions alone are planned; the token in between is the runner's."""
    tiny = tiny_model("llama3")
    prompt = random_prompt(17)
    runner = make_runner()
    plans = [
        step(
            [ScheduledRequest("a", 0, 17, (), samples=True)],
            (AdmittedRequest(request("a", prompt), (), (4, 2)),),
        )
    ]
    plans += [step([ScheduledRequest("a", 17 + index, 1, (), samples=True)]) for index in range(4)]
    token_ids = [runner.execute(plan).sampled_token_ids[0][0] for plan in plans]
    assert token_ids == tiny.reference(tuple(prompt), 5)[0]


def test_logprobs_come_back_for_the_rows_that_asked() -> None:
    runner = make_runner()
    admitted = (
        AdmittedRequest(request("plain", [1, 2, 3]), (), (0,)),
        AdmittedRequest(request("asking", [4, 5], num_logprobs=2), (), (1,)),
    )
    rows = [
        ScheduledRequest("plain", 0, 3, (), samples=True),
        ScheduledRequest("asking", 0, 2, (), samples=True),
    ]
    output = runner.execute(step(rows, admitted))
    assert output.logprobs is not None
    assert output.logprobs[0] is None
    assert output.logprobs[1] is not None
    (entry,) = output.logprobs[1]
    assert isinstance(entry, TokenLogprobs)
    assert [entry.token_id] == output.sampled_token_ids[1]
    assert runner.execute(step([ScheduledRequest("plain", 3, 1, (), samples=True)])).logprobs is None


def test_a_prompt_that_is_released_half_scored_is_scored_anew() -> None:
    runner = make_runner()
    prompt = random_prompt(21)
    admitted = AdmittedRequest(replace(request("a", prompt), num_prompt_logprobs=2), (), (0, 1))
    runner.execute(step([ScheduledRequest("a", 0, 9, (), samples=False)], (admitted,)))
    begun = runner.execute(step([ScheduledRequest("a", 0, 7, (), samples=False)], (admitted,), ("a",)))
    assert begun.prompt_logprobs is None
    output = runner.execute(step([ScheduledRequest("a", 7, 14, (), samples=True)]))
    assert output.prompt_logprobs is not None
    reports = output.prompt_logprobs["a"]
    assert [report.token_id for report in reports] == prompt[1:]
    with torch.inference_mode():
        logits = tiny_model("llama3").hf_model(torch.tensor([prompt])).logits[0, :-1]
    expected = torch.log_softmax(logits, dim=-1)[range(20), prompt[1:]]
    np.testing.assert_allclose([report.logprob for report in reports], expected, atol=1e-9)
    again = replace(admitted, output_token_ids=tuple(output.sampled_token_ids[0]))
    resumed = runner.execute(step([ScheduledRequest("a", 0, 22, (), samples=True)], (again,), ("a",)))
    assert resumed.prompt_logprobs is None, "they were delivered"


def test_a_failed_row_is_named_and_later_steps_still_run() -> None:
    runner = make_runner(FailingSampler(failing_step=1))
    admitted = tuple(
        AdmittedRequest(request(name, [1, 2, 3]), (), (index,)) for index, name in enumerate("ab")
    )
    both = [ScheduledRequest(name, 0, 3, (), samples=True) for name in "ab"]
    assert runner.execute(step(both, admitted)).failed is None
    output = runner.execute(step([ScheduledRequest("a", 3, 1, (), samples=True)]))
    assert output.sampled_token_ids == [[]]
    assert output.failed == {"a": "broken logits"}
    planned_ahead = [
        ScheduledRequest("a", 4, 1, (), samples=True),
        ScheduledRequest("b", 3, 1, (), samples=True),
    ]
    assert len(runner.execute(step(planned_ahead)).sampled_token_ids) == 2


def test_values_that_are_not_finite_leave_with_the_failed_request() -> None:
    runner = make_runner()
    assert isinstance(runner.forward, TorchForward)
    prompt = random_prompt(20)
    runner.execute(
        step(
            [ScheduledRequest("bad", 0, 20, (), samples=True)],
            (AdmittedRequest(request("bad", prompt), (), (5, 6)),),
        )
    )
    with torch.inference_mode():
        for layer in runner.forward.kv:
            layer.k_BKSH[6, :, 2:] = torch.nan
            layer.v_BKSH[6, :, 1] = torch.nan
    output = runner.execute(step([ScheduledRequest("bad", 20, 1, (), samples=True)]))
    assert output.failed is not None
    rows = [ScheduledRequest("good", 0, 20, (), samples=True)]
    output = runner.execute(step(rows, (AdmittedRequest(request("good", prompt), (), (5, 6)),), ("bad",)))
    assert output.failed is None


@pytest.mark.parametrize("max_model_len", [1, 2, 16, 17, 32])
def test_warm_up_leaves_no_request_behind(max_model_len: int) -> None:
    runner = make_runner(max_model_len=max_model_len, num_blocks=2)
    warm_up(runner)
    assert runner.batch.slots == {}
    assert runner.batch.sampling_rows == {}


def test_the_last_position_of_the_longest_request_fits() -> None:
    runner = make_runner(max_model_len=48)
    prompt = random_prompt(47)
    admitted = AdmittedRequest(request("a", prompt), (), (1, 2, 3))
    runner.execute(step([ScheduledRequest("a", 0, 47, (), samples=True)], (admitted,)))
    output = runner.execute(step([ScheduledRequest("a", 47, 1, (), samples=True)]))
    assert len(output.sampled_token_ids[0]) == 1
    assert np.count_nonzero(runner.batch.block_tables_SB[0]) == 3


def test_rows_are_looked_up_again_once_a_request_left() -> None:
    """A request that was preempted comes back with the same id: it may be elsewhere, and is sampled anew."""
    batch = InputBatch(max_num_seqs=2, max_model_len=64, block_size=16)
    admitted = {key: AdmittedRequest(request(key, [1, 2, 3]), (), (index,)) for index, key in enumerate("ab")}
    for each in admitted.values():
        batch.admit(each)
    rows = [ScheduledRequest(key, 2, 1, (), samples=True) for key in "ab"]
    before, same = batch.prepare(rows), batch.prepare(rows)
    assert same.sampling_rows is before.sampling_rows
    for key in "ab":
        batch.release(key)
    for key in "ab":
        batch.admit(admitted[key])
    after = batch.prepare(rows)
    assert after.attention.slots_R.tolist() == [batch.slots[key] for key in "ab"] == [1, 0]
    assert after.sampling_rows == [batch.sampling_rows[slot] for slot in (1, 0)]
    assert after.sampling_rows[0] is not before.sampling_rows[0]
