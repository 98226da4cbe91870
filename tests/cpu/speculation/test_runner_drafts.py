"""What the model runner tells its proposer, and what it reports of drafts."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.backends.base import warm_up
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampled import SampledTokens
from onbeat.engine.sampler import Sampler
from onbeat.engine.torch.forward import TorchForward
from tests.cpu.engine.tiny_models import random_prompt, tiny_model
from tests.cpu.speculation.runs import ScriptedProposer, make_request, ngram
from tests.pure.scheduler.driver import make_config

PROMPT = random_prompt(17)
SIZES = {"num_blocks": 32, "block_size": 16, "max_num_seqs": 4, "max_model_len": 128}


def reference(length: int) -> list[int]:
    return tiny_model("llama3").reference(tuple(PROMPT), length)[0]


def make_runner(proposer: Any, sampler: Any = None, **options: int) -> ModelRunner:
    model = tiny_model("llama3").weights
    sizes = SIZES | options
    forward = TorchForward(model, num_blocks=sizes["num_blocks"], block_size=sizes["block_size"])
    chooser = sampler or Sampler(model.config.vocab_size)
    return ModelRunner(make_config("sarathi", **sizes), forward, chooser, proposer)


def step(
    rows: list[ScheduledRequest], admitted: tuple[AdmittedRequest, ...] = (), released: tuple[str, ...] = ()
) -> SchedulerOutput:
    return SchedulerOutput(0, tuple(rows), admitted, released, BatchShape())


def prefill(name: str = "a", block_ids: tuple[int, ...] = (4, 2, 9)) -> SchedulerOutput:
    admitted = AdmittedRequest(make_request(name, PROMPT, 60), (), block_ids)
    return step([ScheduledRequest(name, 0, 17, (), samples=True)], (admitted,))


def verify(start: int, num_drafts: int, name: str = "a") -> ScheduledRequest:
    return ScheduledRequest(name, start, 1 + num_drafts, (), samples=True, num_draft_tokens=num_drafts)


def test_a_row_starts_where_its_tokens_say_not_where_the_plan_hoped() -> None:
    """Planned ahead as if all drafts were accepted, of which one is wrong."""
    expected = reference(12)
    script = ScriptedProposer(lambda row: expected, right=lambda position: position != 20)
    runner = make_runner(script)
    outputs = [
        runner.execute(prefill()),
        runner.execute(step([verify(17, 4)])),  # positions 18 to 21 are drafts: 18 and 19 are right
        runner.execute(step([verify(22, 4)])),  # in truth at 20
        runner.execute(step([ScheduledRequest("a", 27, 1, (), samples=True)])),
    ]
    token_ids = [output.sampled_token_ids[0] for output in outputs]
    assert [len(ids) for ids in token_ids] == [1, 3, 5, 1]
    assert [token_id for ids in token_ids for token_id in ids] == expected[:10]
    assert [output.num_drafted for output in outputs] == [None, [4], [4], None]


def test_rows_report_drafts_in_their_order() -> None:
    expected = reference(20)
    runner = make_runner(ScriptedProposer(lambda row: expected, shortfall=lambda position: 2))
    runner.execute(prefill("a", (4, 2, 9)))
    runner.execute(prefill("b", (5, 3, 8)))
    chunk = ScheduledRequest("c", 0, 10, (), samples=False)
    admitted = AdmittedRequest(make_request("c", PROMPT, 9), (), (20, 21))
    output = runner.execute(step([verify(17, 5, "b"), verify(17, 1, "a"), chunk], (admitted,)))
    assert output.num_drafted == [3, 0]
    assert output.sampled_token_ids == [expected[1:5], expected[1:2]]
    assert output.num_available is None


def test_what_can_be_drafted_next_is_reported_for_rows_that_sample() -> None:
    runner = make_runner(ngram(6))
    repeated = [9, 8, 7, 9, 8, 7, 9]
    admitted = (
        AdmittedRequest(make_request("plain", PROMPT, 60), (), (1, 2)),
        AdmittedRequest(make_request("looping", repeated, 60), (), (3,)),
    )
    rows = [
        ScheduledRequest("plain", 0, 12, (), samples=False),
        ScheduledRequest("looping", 0, 7, (), samples=True),
    ]
    output = runner.execute(step(rows, admitted))
    assert output.num_available is not None
    assert len(output.num_available) == 1
    assert output.num_available[0] <= 6


def test_a_proposer_hears_who_goes() -> None:
    script = ScriptedProposer(lambda row: reference(12))
    runner = make_runner(script)
    admitted = AdmittedRequest(make_request("hit", PROMPT, 60), (), (4, 2))
    runner.execute(step([ScheduledRequest("hit", 16, 1, (), samples=True)], (admitted,)))
    (slot,) = runner.batch.slots.values()
    runner.execute(step([], released=("hit", "never ran")))
    assert script.released == [slot]


@pytest.mark.parametrize("max_model_len", [1, 2, 3, 16, 17, 32])
def test_warm_up_leaves_nothing_with_the_proposer(max_model_len: int) -> None:
    script = ScriptedProposer(lambda row: [0, 0, 0])
    runner = make_runner(script, max_model_len=max_model_len, num_blocks=2)
    warm_up(runner)
    assert runner.batch.slots == {}
    assert len(script.released) == 1


class FailingAtWave:
    """Greedy, but from some call on no row has a token."""

    def __init__(self, first_failure: int) -> None:
        self.num_calls = 0
        self.first_failure = first_failure

    def needs_logits(self, rows: Any) -> bool:
        return True

    def sample(self, logits_RV: Any, rows: Any, best: Any = None) -> SampledTokens:
        self.num_calls += 1
        if self.num_calls >= self.first_failure:
            return SampledTokens([-1] * len(rows), [None] * len(rows), {0: "broken logits"})
        return SampledTokens(logits_RV.argmax(axis=-1).tolist(), [None] * len(rows))


@pytest.mark.parametrize("wave", [0, 1, 4])
def test_a_row_that_fails_behind_a_draft_is_named_and_gives_nothing(wave: int) -> None:
    script = ScriptedProposer(lambda row: reference(12))
    runner = make_runner(script, FailingAtWave(2 + wave))
    assert runner.execute(prefill()).failed is None
    output = runner.execute(step([verify(17, 4)]))
    assert output.failed == {"a": "broken logits"}
    assert output.sampled_token_ids == [[]]
    assert output.num_drafted == [4]
    assert runner.batch.num_tokens_S[runner.batch.slots["a"]] == 18 + wave + 1
