"""Drafts change no token of models that keep a state of each request, whatever becomes of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from onbeat.core.request import Request
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.speculation.build import NoDrafts
from onbeat.scheduler.scheduler_config import DraftLength
from tests.cpu.engine.engines import (
    RoundedTorchEngine,
    TinyEngine,
    in_parts,
    is_in_part,
    torch_or_native,
)
from tests.cpu.engine.forwards import MOST_DRAFTS, MakeForward, on_native
from tests.cpu.engine.stateful_models import STATEFUL
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, random_prompt, tiny_model
from tests.cpu.golden.test_structured import LIMITS_HERE, PORT, requests_of
from tests.cpu.speculation.drafting import Setting, by_draft_model, make_near, prompts, serve
from tests.cpu.speculation.runs import (
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

pytestmark = pytest.mark.golden

every_family = each_case("name", STATEFUL)
NUM_TOKENS = 24
CHAT = random_prompt(110)
PROMPTS = [random_prompt(length) for length in (3, 16, 17, 90, 45)] + [CHAT[:40], CHAT[:75], CHAT[:75]]
WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 24, "enable_prefix_caching": False},
    "preempted": {"num_blocks": 16, "enable_prefix_caching": False},
    "cached": {"num_snapshots": 12},
    "short-of-states": {"num_snapshots": 1, "num_blocks": 20},
    "slo": {"policy": "slo", "num_snapshots": 4},
}


engine = torch_or_native(RoundedTorchEngine)


@functools.cache
def undrafted(name: str, prompt: tuple[int, ...]) -> list[int]:
    """Return our own tokens: those of the reference, as a rule, in a fifth of its time."""
    own = run(RoundedTorchEngine().make_forward(name), [make_request("r", prompt, NUM_TOKENS)])
    return own.outcomes["r"].token_ids


def answer(name: str, prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    key = tuple(prompt)
    return tiny_model(name).reference(key, NUM_TOKENS, undrafted(name, key))


@pytest.mark.parametrize("way", WAYS)
@in_parts(3)
@every_family
def test_tokens_are_the_references(engine: TinyEngine, name: str, way: str, part: tuple[int, int]) -> None:
    """Drafts are right in runs of any length, across blocks' ends; second turns go on from kept states."""
    if not is_in_part(engine, list(STATEFUL).index(name) + list(WAYS).index(way), part):
        return
    first = [make_request(f"r{index}", prompt, NUM_TOKENS) for index, prompt in enumerate(PROMPTS)]
    second = [
        make_request(
            f"again-{each.request_id}", [*each.prompt_token_ids, *answer(name, prompt)[0]], NUM_TOKENS
        )
        for each, prompt in zip(first, PROMPTS, strict=True)
    ]
    script = ScriptedProposer(
        lambda row: answer(name, row.prompt_token_ids)[0],
        right=lambda position: position % 5 and position % 7,
        shortfall=lambda position: position % 3,
    )
    length: DraftLength = "adaptive" if way == "slo" else "fixed"
    drafted = run(
        engine.make_forward(name),
        first,
        later=second,
        speculation=fixed(6, length),
        proposer=script,
        **WAYS[way],
    )
    for request in (*first, *second):
        tokens = drafted.outcomes[request.request_id].token_ids
        engine.check(tokens, *answer(name, request.prompt_token_ids))
    assert 50 < drafted.num_accepted < drafted.num_drafted
    assert drafted.num_preemptions or way not in ("preempted", "short-of-states")
    assert drafted.num_cached_tokens > 300 or way != "cached"


def chances(requests: Sequence[Request], expected: Run, random: Random) -> ScriptedProposer:
    """Return a proposer that is right, and has drafts, by chance; by how much changes from time to time."""
    shares = [random.choice((0.0, 0.5, 0.9, 1.0)) for _ in range(8)]
    return ScriptedProposer(
        answers(requests, expected),
        right=lambda position: random.random() < shares[position // 9 % 8],
        shortfall=lambda position: random.choice((0, 0, 1, 5, 20)),
    )


@pytest.mark.parametrize("seed", range(3))
@every_family
def test_any_luck_with_drafts_gives_the_numbers_of_none(
    native_library: NativeLibrary, name: str, seed: int
) -> None:
    """Bit for bit where sums have one order; on torch as near as float64 is."""
    requests = make_requests(num_logprobs=2)
    invariant = on_native(
        native_library, StateCheckpoint(hf_tiny_model(name, torch.float64)), batch_invariant=True
    )
    ways: list[tuple[MakeForward, bool]] = [(invariant, True)]
    if seed == list(STATEFUL).index(name) % 3:  # in turn: the native engine, which is quick, has all
        ways.append((RoundedTorchEngine().make_forward(name), False))
    for make_forward, is_exact in ways:
        random = Random(seed)
        limits: dict[str, Any] = {"num_snapshots": 4, "num_blocks": random.choice((24, 64))}
        expected = run(make_forward, requests, **limits)
        drafted = run(
            make_forward,
            requests,
            speculation=fixed(random.choice((1, 4, MOST_DRAFTS))),
            proposer=chances(requests, expected, random),
            overlapped=bool(seed % 2),
            **limits,
        )
        assert_same(drafted, expected)
        assert 0 < drafted.num_accepted < drafted.num_drafted
        for key, outcome in drafted.outcomes.items():
            assert not is_exact or outcome.logprobs == expected.outcomes[key].logprobs


def test_what_follows_the_same_tokens_is_drafted(engine: TinyEngine) -> None:
    requests = make_requests(temperature=2.0)
    forward = engine.make_forward("qwen3.5")
    expected = run(forward, requests, num_snapshots=8)
    drafted = run(forward, requests, speculation=fixed(4), proposer=ngram(4), num_snapshots=8)
    assert_same(drafted, expected)
    assert 0 < drafted.num_accepted < drafted.num_drafted


@pytest.mark.parametrize(
    "setting",
    [
        Setting(is_cached=False),
        Setting(num_drafts=7, depth=2, num_blocks=16, max_num_seqs=16, is_cached=False),
    ],
)
@in_parts(2)
@every_family
def test_such_models_draft_for_one_another(
    engine: TinyEngine, name: str, setting: Setting, part: tuple[int, int]
) -> None:
    """A draft model takes in no draft before it is known to be right; one that agrees is always right."""
    if not is_in_part(engine, list(STATEFUL).index(name) + (setting.num_drafts == 7), part):
        return
    requests = prompts((30, 31, 28, 61, 60, 29, 44))
    forward = make_near(engine, name)
    plain = serve(forward, None, requests, setting)
    for noise in (0.0, 0.1):
        drafted = serve(forward, by_draft_model(make_near(engine, name, noise)), requests, setting)
        assert drafted.tokens == plain.tokens
        assert drafted.acceptance > 0.05 if noise else drafted.acceptance == 1.0


def test_text_that_grammars_prescribe_is_drafted() -> None:
    forward = RoundedTorchEngine().make_forward("qwen3.5")
    requests, limits = requests_of(range(0, 60, 3)), {**LIMITS_HERE, "num_snapshots": 8}
    expected = run(forward, requests, guides=PORT, **limits)
    drafted = run(forward, requests, speculation=fixed(5), proposer=NoDrafts(), guides=PORT, **limits)
    assert_same(drafted, expected)
    assert drafted.num_accepted > 10
