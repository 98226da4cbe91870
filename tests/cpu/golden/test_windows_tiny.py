"""Models whose windows give KV back give transformers' tokens, and hold more of them in the same memory."""

from __future__ import annotations

import pytest

from onbeat.scheduler.replica.policies import POLICIES
from tests.cpu.engine.engines import (
    TinyEngine,
    TorchEngine,
    in_parts,
    is_in_part,
    torch_or_native,
)
from tests.cpu.engine.gemma4_models import WINDOWED as GEMMA4_WINDOWED
from tests.cpu.engine.tiny_models import random_prompt, tiny_model
from tests.cpu.golden.engine_run import Setting, run_and_check
from tests.many_cases import each_case

pytestmark = pytest.mark.golden

WINDOWED = ("gemma3", "gpt-oss", "olmo3", "mistral-sliding", "cohere2", *GEMMA4_WINDOWED)
"""The windows of the first two are 20 tokens, in two layers of three, those of the next three 24: in one of
two, in all, of which the first keeps the KV of all tokens, and in three of four."""
every_family = each_case("name", WINDOWED)
PROMPT_LENGTHS = (70, 31, 128, 61, 60, 29, 140, 15, 16, 44)


engine = torch_or_native(TorchEngine)


def windows_of(name: str) -> tuple[int, int]:
    config = tiny_model(name).weights.config
    assert config.sliding_window is not None
    return 1 + config.kv_groups.num_windowed, config.sliding_window


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [400, 17])
@in_parts(3)
@every_family
def test_every_policy_gives_the_references_tokens(
    engine: TinyEngine, name: str, policy: str, num_blocks: int, part: tuple[int, int]
) -> None:
    """Chunks shorter and longer than a window, steps of chunks and decodes, preemptions, shared prefixes."""
    if not is_in_part(engine, WINDOWED.index(name) + (policy == "slo") + (num_blocks < 400), part):
        return
    is_its_turn = list(POLICIES).index(policy) % len(WINDOWED) == WINDOWED.index(name)
    if policy not in ("slo", "sarathi") and (isinstance(engine, TorchEngine) or not is_its_turn):
        pytest.skip("other policies make no other steps")
    shared = random_prompt(90)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    prompts += [[*shared, *random_prompt(length)] for length in (30, 31, 32)]
    budget = None if POLICIES[policy].whole_prompts else 24
    setting = Setting(
        policy=policy, budget=budget, num_blocks=num_blocks, arrivals=2, windows=windows_of(name), repeats=2
    )
    outcome = run_and_check(engine, name, prompts, 24, setting, max_model_len=192)
    assert outcome.num_preemptions or num_blocks == 400 or policy in ("orca", "static")
    assert outcome.num_prefix_hits > 700 or num_blocks < 400


@every_family
def test_a_request_fits_that_is_longer_than_the_blocks_of_all_groups(engine: TinyEngine, name: str) -> None:
    """Of 9 blocks, or 144 tokens, the windows take up to 5 blocks of each of their groups."""
    setting = Setting(budget=16, num_blocks=9, windows=windows_of(name), max_num_seqs=2)
    prompts = [random_prompt(length) for length in (150, 160)]
    run_and_check(engine, name, prompts, 16, setting, max_model_len=176)
