"""With drafts the output is token for token that without: every model, policy and sampling setting."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from onbeat.core.request import Request
from onbeat.engine.native.library import NativeLibrary
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.scheduler_config import DraftLength
from tests.cpu.engine.engines import NativeEngine, TinyEngine, in_turns, is_due
from tests.cpu.engine.forwards import MakeForward, on_torch
from tests.cpu.engine.tiny_models import random_prompt, tiny_model
from tests.cpu.golden.test_policies_tiny import NUMBERED
from tests.cpu.speculation.runs import (
    LIMITS,
    Run,
    ScriptedProposer,
    answers,
    assert_same,
    fixed,
    make_request,
    make_requests,
    ngram,
    run,
)
from tests.many_cases import each_case

LENGTHS: tuple[tuple[int, DraftLength], ...] = ((1, "fixed"), (3, "fixed"), (7, "fixed"), (7, "adaptive"))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 0.9, "top_k": 5},
    "top-p": {"temperature": 0.6, "top_p": 0.8},
    "min-p": {"temperature": 0.6, "min_p": 0.1},
    "repetition-penalty": {"repetition_penalty": 1.3},
    "counting-penalties": {"temperature": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "logit-bias": {"temperature": 0.5, "logit_bias": ((7, 6.0), (8, 5.5), (9, -100.0))},
    "few-allowed": {"temperature": 1.0, "allowed_token_ids": (3, 4, 5)},
    "logprobs": {"num_logprobs": 4},
    "logprobs-of-edited": {"temperature": 0.6, "num_logprobs": 2, "frequency_penalty": 0.5},
    "min-tokens": {"temperature": 0.8, "stop_token_ids": tuple(range(0, 211, 4)), "min_tokens": 12},
    "stop-tokens": {"stop_token_ids": tuple(range(0, 211, 9))},
}


def requests_of_all_samplings() -> list[Request]:
    """Return a request of each, and a greedy one."""
    return [
        make_request(name, random_prompt(9 + index), 40, seed=index, **sampling)
        for index, (name, sampling) in enumerate({"greedy": {}, **SAMPLINGS}.items())
    ]


@functools.cache
def llama() -> MakeForward:
    return on_torch(tiny_model("llama3", torch.float32).weights)


@functools.cache
def plain() -> Run:
    """Greedy, in the torch backend, without drafts."""
    return run(llama(), make_requests())


def budget(policy: str) -> dict[str, Any]:
    """Policies without chunks want whole prompts to fit."""
    return {"max_num_batched_tokens": 300} if policy not in ("sarathi", "chunk-only", "slo", "edf") else {}


@in_turns
@each_case(("number", "name"), NUMBERED)
def test_greedy_of_every_family(engine: TinyEngine, number: int, name: str, turn: int) -> None:
    if not is_due(engine, number, turn):
        return
    forward = engine.make_forward(name, torch.float32)
    expected = run(forward, make_requests())
    for num_drafts, draft_length in LENGTHS:
        speculated = run(
            forward,
            make_requests(),
            speculation=fixed(num_drafts, draft_length),
            proposer=ngram(num_drafts),
        )
        assert_same(speculated, expected)
        assert 0 < speculated.num_accepted <= speculated.num_drafted
        assert len(speculated.steps) < len(expected.steps)


@each_case("policy", POLICIES)
def test_every_policy(native_library: NativeLibrary, policy: str) -> None:
    forward = NativeEngine(native_library).make_forward("llama3")
    limits = {"policy": policy, **budget(policy)}
    expected = run(forward, make_requests(), **limits)
    for overlapped, (num_drafts, draft_length) in itertools.product([False, True], LENGTHS[1:]):
        speculated = run(
            forward,
            make_requests(),
            speculation=fixed(num_drafts, draft_length),
            proposer=ngram(num_drafts),
            overlapped=overlapped,
            **limits,
        )
        assert_same(speculated, expected)
        assert speculated.num_accepted > 0


@each_case("overlapped", [False, True])
@in_turns
@each_case(("number", "name"), enumerate(SAMPLINGS))
def test_every_sampling_setting(
    engine: TinyEngine, number: int, name: str, overlapped: bool, turn: int
) -> None:
    """The drafts are sometimes right and sometimes not, where the prompt says nothing of the answer."""
    if not is_due(engine, number + overlapped, turn):
        return
    forward = engine.make_forward("qwen3", torch.float32)
    requests = make_requests(**SAMPLINGS[name])
    expected = run(forward, requests)
    script = ScriptedProposer(answers(requests, expected), right=lambda p: p % 5 != 0 and p % 7 != 0)
    speculated = run(forward, requests, speculation=fixed(4), proposer=script, overlapped=overlapped)
    assert_same(speculated, expected)
    assert 0 < speculated.num_accepted < speculated.num_drafted
    assert_same(
        run(forward, requests, speculation=fixed(4), proposer=ngram(4), overlapped=overlapped), expected
    )


def test_rows_of_one_step_may_ask_for_different_things(engine: TinyEngine) -> None:
    forward = engine.make_forward("llama3", torch.float32)
    requests = requests_of_all_samplings()
    expected = run(forward, requests, max_num_seqs=16)
    script = ScriptedProposer(
        answers(requests, expected), right=lambda p: p % 6 != 0, shortfall=lambda p: p % 3
    )
    speculated = run(forward, requests, speculation=fixed(5), proposer=script, max_num_seqs=16)
    assert_same(speculated, expected)
    assert 0 < speculated.num_accepted < speculated.num_drafted


@pytest.mark.parametrize("overlapped", [False, True], ids=["one-step", "overlapped"])
def test_right_drafts_save_steps(overlapped: bool) -> None:
    request = make_request("a", random_prompt(20), 41)
    expected = run(llama(), [request])
    script = ScriptedProposer(answers([request], expected))
    speculated = run(llama(), [request], speculation=fixed(4), proposer=script, overlapped=overlapped)
    assert_same(speculated, expected)
    # The prompt gives one token, the others come five at a time.
    assert len(speculated.steps) == 1 + 8
    assert speculated.num_accepted == speculated.num_drafted == 32


@pytest.mark.parametrize("overlapped", [False, True], ids=["one-step", "overlapped"])
def test_wrong_drafts_cost_no_token(overlapped: bool) -> None:
    requests = make_requests()
    script = ScriptedProposer(answers(requests, plain()), right=lambda position: False)
    speculated = run(llama(), requests, speculation=fixed(4), proposer=script, overlapped=overlapped)
    assert_same(speculated, plain())
    assert speculated.num_accepted == 0
    assert speculated.num_drafted > 0


def test_a_proposer_may_have_nothing() -> None:
    requests = make_requests()
    script = ScriptedProposer(answers(requests, plain()), shortfall=lambda position: 9)
    speculated = run(llama(), requests, speculation=fixed(4), proposer=script)
    assert_same(speculated, plain())
    assert speculated.num_drafted == 0
    assert len(speculated.steps) == len(plain().steps)


@pytest.mark.parametrize("overlapped", [False, True], ids=["one-step", "overlapped"])
@pytest.mark.parametrize("num_blocks", [16, 20])
def test_preempted_requests_go_on_as_if_nothing_had_been(num_blocks: int, overlapped: bool) -> None:
    """Blocks run out: requests lose them with drafts in flight, and compute their tokens again."""
    requests = make_requests()
    expected = run(llama(), requests)
    script = ScriptedProposer(answers(requests, expected), right=lambda p: p % 4 != 0)
    for proposer in (script, ngram(6)):
        speculated = run(
            llama(),
            requests,
            speculation=fixed(6),
            proposer=proposer,
            overlapped=overlapped,
            num_blocks=num_blocks,
            policy="sarathi",
        )
        assert_same(speculated, expected)
        assert speculated.num_preemptions > 0
        assert speculated.num_accepted > 0


@pytest.mark.parametrize("overlapped", [False, True], ids=["one-step", "overlapped"])
def test_blocks_with_accepted_drafts_are_shared(overlapped: bool) -> None:
    """A second turn reuses blocks whose tokens came as drafts, next to some that were rejected."""
    first = make_requests()
    expected = run(llama(), first)
    second = [
        make_request(f"again-{r.request_id}", [*r.prompt_token_ids, *expected.token_ids[r.request_id]], 20)
        for r in first
    ]
    expected = run(llama(), first, later=second)
    script = ScriptedProposer(answers([*first, *second], expected), right=lambda p: p % 5 != 0)
    speculated = run(
        llama(), first, later=second, speculation=fixed(5), proposer=script, overlapped=overlapped
    )
    assert_same(speculated, expected)
    assert speculated.num_cached_tokens == expected.num_cached_tokens > 100


@pytest.mark.parametrize("overlapped", [False, True], ids=["one-step", "overlapped"])
@pytest.mark.parametrize("num_drafts", [1, 5, 16])
def test_the_longest_request_ends_where_it_does_without_drafts(num_drafts: int, overlapped: bool) -> None:
    limits: dict[str, Any] = {"max_model_len": 64, "num_blocks": 4}
    request = make_request("a", random_prompt(20), 1000)
    expected = run(llama(), [request], **limits)
    assert len(expected.token_ids["a"]) == 64 - 20
    script = ScriptedProposer(lambda row: [*expected.token_ids["a"], *range(40)])
    speculated = run(
        llama(), [request], speculation=fixed(num_drafts), proposer=script, overlapped=overlapped, **limits
    )
    assert_same(speculated, expected)


def test_limits_are_such_that_prompts_come_in_chunks_beside_drafts() -> None:
    requests = make_requests()
    script = ScriptedProposer(answers(requests, plain()))
    speculated = run(llama(), requests, speculation=fixed(3), proposer=script, max_num_seqs=2)
    assert_same(speculated, plain())
    shapes = [scheduled.shape for scheduled, _ in speculated.steps]
    assert any(shape.num_draft_tokens and shape.num_chunks for shape in shapes)
    assert max(len(request.prompt_token_ids) for request in requests) > LIMITS["max_num_batched_tokens"]
