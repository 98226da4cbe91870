"""A draft model changes no token, agrees with itself on every one, and never runs a token twice."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest
from onbeat.engine.forward import StepLogits
from onbeat.engine.input_batch import InputBatch, IntArray, StepInputs
from onbeat.engine.speculation.draft_model import DraftModelProposer
from onbeat.engine.speculation.proposer import DraftRow
from tests.cpu.engine.engines import TinyEngine, in_turns, is_due
from tests.cpu.engine.tiny_models import random_prompt, tiny_model
from tests.cpu.golden.test_policies_tiny import NUMBERED
from tests.cpu.speculation.drafting import (
    GREEDY,
    VOCAB_SIZE,
    CountingForward,
    Setting,
    by_draft_model,
    make_near,
    prompts,
    serve,
)
from tests.many_cases import each_case

LENGTHS = (1, 40, 100, 17, 16, 64, 5)
SHORT_OF_MEMORY = (30, 31, 28, 61, 60, 29, 44)
"""Prompt lengths that outgrow 16 blocks."""
SETTINGS = [
    Setting(num_drafts=1),
    Setting(num_drafts=3, depth=2),
    Setting(num_drafts=7, depth=2, repeats=2),
    Setting(num_drafts=3, num_blocks=16, max_num_seqs=16, depth=2),
]
NOISE = 0.1
"""Of a draft model that its target agrees with often, but not always."""
SAMPLED = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=24),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2, max_tokens=24),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.02, seed=3, max_tokens=24),
    GREEDY,
]
SAMPLED_REQUESTS = [
    (prompt, replace(SAMPLED[index % len(SAMPLED)], seed=index))
    for index, (prompt, _) in enumerate(prompts(LENGTHS))
]
PENALISED = [
    (prompt, replace(sampling, presence_penalty=0.5, repetition_penalty=1.2, num_logprobs=2, min_tokens=20))
    for prompt, sampling in SAMPLED_REQUESTS
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_greedy_tokens_are_those_without_drafts(engine: TinyEngine, setting: Setting) -> None:
    requests = prompts(SHORT_OF_MEMORY if setting.num_blocks < 100 else LENGTHS)
    target = make_near(engine, "llama3")
    plain = serve(target, None, requests, setting)
    drafted = serve(target, by_draft_model(make_near(engine, "llama3", NOISE)), requests, setting)
    assert drafted.tokens == plain.tokens
    assert 0.2 < drafted.acceptance < 0.99
    assert drafted.num_steps < plain.num_steps
    assert drafted.num_mixed_steps > 0
    assert (drafted.num_preemptions > 0) == (setting.num_blocks < 100)
    assert (drafted.num_prefix_hits > 150) == (setting.repeats > 1)


@in_turns
@each_case(("number", "name"), NUMBERED)
def test_families_can_draft_for_one_another(engine: TinyEngine, number: int, name: str, turn: int) -> None:
    if not is_due(engine, number, turn):
        return
    requests = prompts(LENGTHS[:4])
    target = make_near(engine, name)
    plain = serve(target, None, requests, Setting())
    drafted = serve(target, by_draft_model(make_near(engine, "qwen2")), requests, Setting())
    assert drafted.tokens == plain.tokens
    assert drafted.num_drafted > 0


@pytest.mark.parametrize("requests", [SAMPLED_REQUESTS, PENALISED], ids=["plain", "penalised"])
def test_sampled_tokens_are_those_without_drafts(engine: TinyEngine, requests) -> None:
    target = make_near(engine, "llama3")
    plain = serve(target, None, requests, Setting())
    drafted = serve(target, by_draft_model(make_near(engine, "llama3", NOISE)), requests, Setting(depth=2))
    assert drafted.tokens == plain.tokens
    assert drafted.acceptance > 0.05


@each_case("setting", SETTINGS)
@each_case(("kind", "max_catch_up_tokens"), [("greedy", 256), ("sampled", 16)])
def test_a_model_agrees_with_itself_on_every_token(
    engine: TinyEngine, setting: Setting, max_catch_up_tokens: int, kind: str
) -> None:
    lengths = SHORT_OF_MEMORY if setting.num_blocks < 100 else LENGTHS
    requests = prompts(lengths)
    if kind == "sampled":
        requests = [
            (prompt, sampling)
            for (prompt, _), (_, sampling) in zip(requests, cycle(SAMPLED_REQUESTS), strict=False)
        ]
    target = make_near(engine, "llama3")
    outcome = serve(target, by_draft_model(target, max_catch_up_tokens), requests, setting)
    assert outcome.num_accepted == outcome.num_drafted > 50


def test_penalties_cost_acceptance_but_no_token(engine: TinyEngine) -> None:
    target = make_near(engine, "llama3")
    outcome = serve(target, by_draft_model(target), PENALISED, Setting())
    assert 0.1 < outcome.acceptance < 0.9


class Drafting:
    """A proposer and its batch, driven by hand; blocks are handed out as the test says."""

    def __init__(
        self,
        max_catch_up_tokens: int = 256,
        vocab_size: int = VOCAB_SIZE,
        kind: type[CountingForward] = CountingForward,
    ) -> None:
        self.batch = InputBatch(max_num_seqs=4, max_model_len=160, block_size=16)
        self.forward = kind(tiny_model("llama3", torch.float32).weights, num_blocks=32, block_size=16)
        self.proposer = DraftModelProposer(
            self.forward,
            block_size=16,
            max_num_seqs=4,
            vocab_size=vocab_size,
            max_catch_up_tokens=max_catch_up_tokens,
        )

    def admit(self, name: str, tokens: list[int], block_ids: list[int]) -> int:
        request = Request(request_id=name, prompt_token_ids=tuple(tokens), sampling=GREEDY)
        return self.batch.admit(AdmittedRequest(request, (), tuple(block_ids)))

    def release(self, name: str) -> None:
        slot = self.batch.release(name)
        assert slot is not None
        self.proposer.release(slot)

    def propose(self, *rows: tuple[int, int, int]) -> list[list[int]]:
        return self.proposer.propose(self.batch, [DraftRow(*row) for row in rows])

    def append(self, slot: int, num_tokens: int, tokens: list[int]) -> int:
        self.batch.token_ids_SP[slot, num_tokens : num_tokens + len(tokens)] = tokens
        return num_tokens + len(tokens)


PROMPT = random_prompt(40)


def test_accepted_drafts_are_not_run_again() -> None:
    drafting = Drafting()
    slot = drafting.admit("a", PROMPT, [5, 9, 2, 7])
    (drafts,) = drafting.propose((slot, 40, 3))
    assert drafting.forward.take() == [[40], [1], [1]]
    num_tokens = drafting.append(slot, 40, [*drafts, 1])
    (drafts,) = drafting.propose((slot, num_tokens, 3))
    assert drafting.forward.take() == [[2], [1], [1]]  # the last draft had no KV yet
    num_tokens = drafting.append(slot, num_tokens, [drafts[0], (drafts[1] + 1) % VOCAB_SIZE])
    drafting.propose((slot, num_tokens, 1))
    assert drafting.forward.take() == [[1]]
    num_tokens = drafting.append(slot, num_tokens, [3, 4, 5])  # steps without drafts
    drafting.propose((slot, num_tokens, 2))
    assert drafting.forward.take() == [[3], [1]]


def test_rows_that_want_fewer_drafts_leave_the_passes_first() -> None:
    drafting = Drafting()
    slots = [
        drafting.admit(name, PROMPT[:length], blocks)
        for name, length, blocks in (("a", 40, [0, 1, 2]), ("b", 3, [3]), ("c", 17, [4, 5]))
    ]
    drafts = drafting.propose((slots[0], 40, 1), (slots[1], 3, 4), (slots[2], 17, 2))
    assert [len(ids) for ids in drafts] == [1, 4, 2]
    assert drafting.forward.take() == [[40, 17, 3], [1, 1], [1], [1]]


def test_drafts_do_not_depend_on_the_batch() -> None:
    alone, together = Drafting(), Drafting()
    (expected,) = alone.propose((alone.admit("a", PROMPT, [0, 1, 2]), 40, 5))
    other = together.admit("b", random_prompt(70), [9, 8, 7, 6, 5])
    slot = together.admit("a", PROMPT, [2, 0, 1])
    assert together.propose((other, 70, 2), (slot, 40, 5))[1] == expected


def test_what_others_or_the_request_itself_had_in_the_cache_is_run_again() -> None:
    drafting = Drafting()
    first = drafting.admit("a", PROMPT, [5, 9, 2])
    (expected,) = drafting.propose((first, 40, 2))
    second = drafting.admit("b", PROMPT, [5, 9, 3])
    drafting.forward.take()
    assert drafting.propose((second, 40, 2)) == [expected]
    assert drafting.forward.take() == [[40], [1]]
    drafting.release("a")
    again = drafting.admit("a", PROMPT, [5, 9, 13])
    assert drafting.propose((again, 40, 2)) == [expected]
    assert drafting.forward.take() == [[40], [1]]


def test_long_catching_up_is_spread_over_steps_and_holds_up_nobody() -> None:
    drafting = Drafting(max_catch_up_tokens=32)
    long = drafting.admit("a", random_prompt(90), [0, 1, 2, 3, 4, 5])
    short = drafting.admit("b", PROMPT[:10], [6])
    found, passes = [], []
    for _ in range(4):
        found.append([len(ids) for ids in drafting.propose((long, 90, 2), (short, 10, 2))])
        passes.append(drafting.forward.take())
    assert found == [[0, 2], [0, 2], [2, 2], [2, 2]]
    assert passes == [[[32, 10], [1]], [[32, 1], [1]], [[26, 1], [1, 1]], [[1, 1], [1, 1]]]


def test_tokens_that_only_one_model_knows() -> None:
    drafting = Drafting(vocab_size=1)
    slot = drafting.admit("a", [0, 5, VOCAB_SIZE + 3, 7], [0])
    assert drafting.propose((slot, 4, 3)) == [[]]  # what the draft model says, the target does not know
    drafting = Drafting()
    slot = drafting.admit("a", [0, 5, VOCAB_SIZE + 3, 7], [0])
    (drafts,) = drafting.propose((slot, 4, 3))
    other = drafting.admit("b", [0, 5, 0, 7], [1])
    assert drafting.propose((other, 4, 3)) == [drafts]


def test_nothing_is_proposed_behind_the_draft_models_context(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = Drafting()
    changed = replace(drafting.forward.config, max_position_embeddings=41)
    monkeypatch.setattr(drafting.forward, "config", changed)
    slot = drafting.admit("a", PROMPT, [0, 1, 2])
    assert [len(ids) for ids in drafting.propose((slot, 40, 5))] == [2]
    num_tokens = drafting.append(slot, 40, [1, 2])
    drafting.forward.take()
    assert drafting.propose((slot, num_tokens, 5)) == [[]]
    assert drafting.forward.take() == []


class BreakingForward(CountingForward):
    """Gives no numbers for the first row of its second pass; notes what is scrubbed."""

    scrubbed: tuple[int, ...] = ()

    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        logits = super().run(inputs, wants_logits=wants_logits)
        if len(self.passes) == 2:
            assert logits.best is not None
            logits.best.logits_R[0] = np.nan
        return logits

    def scrub(self, block_ids: IntArray) -> None:
        self.scrubbed += tuple(block_ids.tolist())
        super().scrub(block_ids)


def test_a_request_that_breaks_the_draft_model_goes_on_without() -> None:
    drafting = Drafting(kind=BreakingForward)
    breaking = drafting.forward
    assert isinstance(breaking, BreakingForward)
    slots = [drafting.admit("a", PROMPT[:10], [3]), drafting.admit("b", PROMPT[:12], [4])]
    rows = (slots[0], 10, 3), (slots[1], 12, 3)
    assert [len(ids) for ids in drafting.propose(*rows)] == [1, 3]
    assert breaking.scrubbed == (3,)
    assert [len(ids) for ids in drafting.propose(*rows)] == [0, 3]
    drafting.release("a")
    new = drafting.admit("c", PROMPT[:10], [3])
    assert [len(ids) for ids in drafting.propose((new, 10, 3))] == [3]


def test_any_number_of_drafts_is_available() -> None:
    drafting = Drafting()
    slot = drafting.admit("a", PROMPT, [0, 1, 2])
    assert drafting.proposer.num_available(drafting.batch, [slot], [40]) is None
