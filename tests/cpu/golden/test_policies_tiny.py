"""In float64, greedy tokens equal transformers' exactly under every policy, on tiny models of each family."""

from __future__ import annotations

import pytest

from tests.cpu.engine.tiny_models import FAMILIES, random_prompt, tiny_model
from tests.cpu.golden.engine_run import Outcome, Setting, run_engine

pytestmark = pytest.mark.golden

PROMPT_LENGTHS = (1, 40, 2, 200, 17, 16, 130, 64, 5, 90)
MAX_TOKENS = 12
SETTINGS = [
    Setting(policy="static", arrivals=1),
    Setting(policy="orca", arrivals=2),
    Setting(policy="prefill-first", arrivals=2),
    Setting(policy="sarathi", budget=64, arrivals=2),
    Setting(policy="sarathi", budget=8, arrivals=1),
    Setting(policy="sarathi", budget=64, arrivals=1, depth=2),
    Setting(policy="static", arrivals=1, depth=2),
    Setting(policy="orca", arrivals=1, depth=2),
    Setting(policy="prefill-first", arrivals=2, depth=2, num_blocks=18),
]


def run(name: str, setting: Setting, lengths=PROMPT_LENGTHS) -> Outcome:
    tiny = tiny_model(name)
    prompts = [random_prompt(length) for length in lengths]
    outcome = run_engine(tiny.model, prompts, MAX_TOKENS, setting, max_model_len=256)
    expected = [tiny.reference(tuple(prompt), MAX_TOKENS)[0] for prompt in prompts]
    assert outcome.tokens == expected * setting.repeats
    return outcome


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_equal_the_reference(name: str, setting: Setting):
    outcome = run(name, setting)
    if setting.policy in ("orca", "sarathi"):
        assert outcome.num_mixed_steps > 0


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("policy", ["static", "orca", "prefill-first", "sarathi"])
def test_prefix_hits_change_nothing(name: str, policy: str):
    budget = 64 if policy == "sarathi" else None
    outcome = run(name, Setting(policy=policy, budget=budget, repeats=2))
    assert outcome.num_prefix_hits > 300


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("policy", ["prefill-first", "sarathi"])
@pytest.mark.parametrize("depth", [1, 2])
def test_forced_preemption_changes_nothing(name: str, policy: str, depth: int):
    budget = 64 if policy == "sarathi" else None
    setting = Setting(policy=policy, budget=budget, num_blocks=18, depth=depth, max_num_seqs=16)
    outcome = run(name, setting, lengths=(30, 31, 28, 61, 60, 29, 14, 15, 16, 44))
    assert outcome.num_preemptions > 0
