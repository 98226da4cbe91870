"""A stream that was cut anywhere and goes on in another engine equals the undisturbed one, token for token.

Exactly in float64, and where no number depends on what else is in a step. Else a prompt in chunks and decodes
one by one may round differently in bfloat16, so that is watched on a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onbeat.core.request import Request, TokenLogprobs
from onbeat.engine.messages import AddRequest, decode_to_engine, encode
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.replica.policies import POLICIES
from tests.cpu.engine.forwards import MakeForward, on_native
from tests.cpu.engine.tiny_models import FAMILIES, KIN
from tests.cpu.golden.moving import exact, invariant, requests_of_text
from tests.cpu.speculation.runs import Run, fixed, make_requests, ngram, run
from tests.cpu.speculation.test_lossless import SAMPLINGS, budget, requests_of_all_samplings
from tests.many_cases import each_case

pytestmark = pytest.mark.golden

CUTS = (1, 2, 11, 29)
"""Tokens that were sent: one, within a block of KV, and some blocks of them."""


def cut(requests: Sequence[Request], undisturbed: Run, num_sent: int) -> list[Request]:
    """Return the requests as another engine gets them, those left out that had ended by then."""
    return [
        sent_to_engine(replace(request, resumed_token_ids=sent[:num_sent], first_token_time=0.0))
        for request in requests
        if len(sent := tuple(undisturbed.outcomes[request.request_id].token_ids)) > num_sent
    ]


def sent_to_engine(request: Request) -> Request:
    """Return a request as it comes out of the message to the engine process."""
    message = decode_to_engine(encode(AddRequest(request)))
    assert isinstance(message, AddRequest)
    return message.request


def check_rest(resumed: Run, undisturbed: Run, num_sent: int) -> None:
    """What was delivered after the cut is what was left, with its log-probabilities, and ends as it did."""
    for name, outcome in resumed.outcomes.items():
        expected = undisturbed.outcomes[name]
        assert outcome.token_ids == expected.token_ids[num_sent:]
        assert outcome.finish_reason == expected.finish_reason
        assert [each.token_id for each in outcome.logprobs] == [
            each.token_id for each in expected.logprobs[num_sent:]
        ]
        values = [each.logprob for each in expected.logprobs[num_sent:]]
        assert [each.logprob for each in outcome.logprobs] == pytest.approx(values, abs=1e-6)


def resume_everywhere(
    make_forward: MakeForward,
    requests: list[Request],
    *,
    cuts: Sequence[int] = CUTS,
    resumed_with: Any = None,
    **limits: Any,
) -> None:
    """Run to the end; then cut at some places, and go on in an engine of its own, `resumed_with` changes."""
    undisturbed = run(make_forward, requests, **limits)
    num_resumed = 0
    for num_sent in cuts:
        rest = cut(requests, undisturbed, num_sent)
        resumed = run(make_forward, rest, **limits | (resumed_with or {}))
        check_rest(resumed, undisturbed, num_sent)
        num_resumed += len(rest)
    assert num_resumed >= len(requests)


@each_case(("number", "name"), enumerate(FAMILIES | KIN))
def test_every_family(native_library: Any, number: int, name: str) -> None:
    requests, cuts = make_requests(temperature=0.8, repetition_penalty=1.1), CUTS[number % 2 :: 2]
    resume_everywhere(invariant(native_library, name), requests, cuts=cuts)
    if number % 3 == 0:  # in turn: the native engine, which is quick, has all
        resume_everywhere(exact(name), requests, cuts=cuts)


@each_case("sampling", SAMPLINGS)
def test_every_way_to_sample(native_library: Any, sampling: str) -> None:
    resume_everywhere(invariant(native_library), make_requests(**SAMPLINGS[sampling]))


def test_all_ways_to_sample_beside_one_another() -> None:
    resume_everywhere(exact(), requests_of_all_samplings(), cuts=(1, 11), max_num_seqs=16)


@pytest.mark.parametrize(
    ("policy", "overlapped"),
    [
        # Of the other half streams are moved (`test_moved_streams`), if the policy gives any away.
        pytest.param(name, is_overlapped, marks=[pytest.mark.slow] * ((number + is_overlapped + 1) % 2))
        for number, name in enumerate(POLICIES)
        for is_overlapped in (False, True)
    ],
)
def test_every_policy(native_library: Any, policy: str, overlapped: bool) -> None:
    limits = {"policy": policy, "overlapped": overlapped, **budget(policy)}
    requests = make_requests(temperature=0.8, frequency_penalty=0.4)
    resume_everywhere(invariant(native_library), requests, **limits)


@pytest.mark.parametrize("is_cached", [True, False])
def test_short_of_memory(is_cached: bool) -> None:
    short = {"num_blocks": 18, "enable_prefix_caching": is_cached}
    resume_everywhere(exact(), make_requests(temperature=0.8), resumed_with=short)


def test_with_and_without_drafts() -> None:
    """Each of the two engines may speculate, or not; the drafts look at what was sent."""
    requests = make_requests(presence_penalty=0.2)
    plain = run(exact(), requests)
    for num_sent in CUTS:
        rest = cut(requests, plain, num_sent)
        speculated = run(exact(), rest, speculation=fixed(3), proposer=ngram(3))
        check_rest(speculated, plain, num_sent)
        assert speculated.num_accepted > 0


def test_the_prefix_cache_finds_what_was_sent() -> None:
    requests = make_requests(temperature=0.8)
    undisturbed = run(exact(), requests)
    rest = [replace(each, request_id=f"{each.request_id}-again") for each in cut(requests, undisturbed, 29)]
    both = run(exact(), requests, later=rest)
    for request in rest:
        name = request.request_id.removesuffix("-again")
        assert both.outcomes[request.request_id].token_ids == undisturbed.token_ids[name][29:]
    admitted = {each.request.request_id: step for step, _ in both.steps for each in step.admitted}
    num_cached = sum(
        row.num_computed_tokens
        for each in rest
        for row in admitted[each.request_id].rows
        if row.request_id == each.request_id
    )
    assert num_cached > sum(len(each.prompt_token_ids) for each in rest)


def test_smollm2_in_bfloat16(native_library: Any, smollm2_gguf: Path) -> None:
    """The next token has the same probabilities for as long as both have sent the same.

    The odd ones are sampled. Which token it is may differ, where a processor multiplies many rows by other
    instructions than a few (AMX): a probability differs in its second digit there.
    """
    checkpoint = open_checkpoint(ModelFiles(kind="gguf", path=smollm2_gguf, name="smollm2"))
    requests = requests_of_text(smollm2_gguf, 4, num_logprobs=5)
    forward = on_native(native_library, checkpoint, dtype=torch.bfloat16)
    undisturbed = run(forward, requests)
    resumed = run(forward, cut(requests, undisturbed, 9))
    assert len(resumed.outcomes) == len(requests)
    for name, outcome in resumed.outcomes.items():
        assert len(outcome.token_ids) == 24 - 9
        for ours, expected in zip(outcome.logprobs, undisturbed.outcomes[name].logprobs[9:], strict=True):
            check_most_likely(ours, expected)
            if ours.token_id != expected.token_id:
                break


def check_most_likely(ours: TokenLogprobs, expected: TokenLogprobs) -> None:
    """The most likely tokens are as likely, but for what rounding to 8 bits does to them."""
    logprobs = dict(zip(expected.top_token_ids, expected.top_logprobs, strict=True))
    common = {
        token_id: logprob
        for token_id, logprob in zip(ours.top_token_ids, ours.top_logprobs, strict=True)
        if token_id in logprobs
    }
    assert len(common) >= 3
    assert common == pytest.approx({token_id: logprobs[token_id] for token_id in common}, abs=0.5)
