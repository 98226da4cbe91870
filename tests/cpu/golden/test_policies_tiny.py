"""Greedy tokens equal transformers' under every policy, on tiny models of each family.

Exactly in float64 on torch; in float32 on the native engine but for ties.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from onbeat.core.slo import SLO
from onbeat.scheduler.replica.policies import POLICIES
from tests.cpu.engine.engines import TinyEngine, in_turns, is_due
from tests.cpu.engine.tiny_models import FAMILIES, KIN, random_prompt
from tests.cpu.golden.engine_run import Outcome, Setting, run_and_check
from tests.many_cases import each_case

pytestmark = pytest.mark.golden

PROMPT_LENGTHS = (1, 40, 2, 200, 17, 16, 130, 64, 5, 90)
MAX_TOKENS = 12
CHUNKED = tuple(name for name, policy in POLICIES.items() if not policy.whole_prompts)
MIXING = ("orca", "sarathi", "slo", "edf")
"""Policies that put prompts beside decodes in one step."""
PREEMPTING = tuple(name for name in POLICIES if name not in ("static", "orca"))
"""Those that reserve a prompt's blocks alone; the others can always finish what they have admitted."""
BLIND = ("static", "orca", "prefill-first", "sarathi", "hybrid-only", "chunk-only")
"""Policies that no objective changes."""
SETTINGS = [
    *(
        Setting(policy=policy, budget=64 if policy in CHUNKED else None, arrivals=2, depth=depth)
        for policy in POLICIES
        for depth in (1, 2)
    ),
    Setting(policy="sarathi", budget=8, arrivals=1),
    Setting(policy="slo", arrivals=1),
    Setting(policy="prefill-first", arrivals=2, depth=2, num_blocks=18),
]
SHORT_OF_MEMORY = (30, 31, 28, 61, 60, 29, 14, 15, 16, 44)
"""Prompt lengths that outgrow 18 blocks."""
OBJECTIVES = (
    SLO(ttft=0.045, tbt=0.05),
    None,
    SLO(ttft=0.001, tbt=0.001),
    SLO(ttft=60.0, tbt=0.05),
    SLO(ttft=0.03, tbt=0.004),
)
"""Loose and tight ones, an impossible one and none, in turn; a step takes 2 ms and 0.1 ms a token."""
NAMES = (
    *("llama3", "llama-tied-linear-rope", "mistral-sliding", "qwen2", "qwen3", "gemma3", "smollm3"),
    "mixtral",
)
"""The others differ from these in what a token computes, not in what it reads of the KV cache.

A plan depends on neither engine nor family. So the first turn has every two of setting, family and engine
together, and all turns have all three.
"""

NUMBERED = [(number if name in NAMES else 1, name) for number, name in enumerate(FAMILIES | KIN)]
"""Cases for `is_due`: what the others compute is of the native engine first, which is the quickest."""


def number_of(policy: str, depth: int = 0) -> int:
    return 2 * list(POLICIES).index(policy) + depth


def run(engine: TinyEngine, name: str, setting: Setting, lengths=PROMPT_LENGTHS) -> Outcome:
    prompts = [random_prompt(length) for length in lengths]
    return run_and_check(engine, name, prompts, MAX_TOKENS, setting)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@in_turns
@each_case("name", NAMES)
def test_tokens_equal_the_reference(engine: TinyEngine, name: str, setting: Setting, turn: int):
    if not is_due(engine, NAMES.index(name) + SETTINGS.index(setting), turn):
        return
    outcome = run(engine, name, setting)
    if setting.policy in MIXING:
        assert outcome.num_mixed_steps > 0


@pytest.mark.parametrize("policy", POLICIES)
@in_turns
@each_case("name", NAMES)
def test_prefix_hits_change_nothing(engine: TinyEngine, name: str, policy: str, turn: int):
    if not is_due(engine, NAMES.index(name) + number_of(policy), turn):
        return
    budget = 64 if policy in CHUNKED else None
    outcome = run(engine, name, Setting(policy=policy, budget=budget, repeats=2))
    assert outcome.num_prefix_hits > 300


@pytest.mark.parametrize("policy", PREEMPTING)
@pytest.mark.parametrize("depth", [1, 2])
@in_turns
@each_case("name", NAMES)
def test_forced_preemption_changes_nothing(engine: TinyEngine, name: str, policy: str, depth: int, turn: int):
    if not is_due(engine, NAMES.index(name) + number_of(policy, depth), turn):
        return
    budget = 64 if policy in CHUNKED else None
    setting = Setting(policy=policy, budget=budget, num_blocks=18, depth=depth, max_num_seqs=16)
    outcome = run(engine, name, setting, lengths=SHORT_OF_MEMORY)
    assert outcome.num_preemptions > 0


@in_turns
@each_case(("number", "name"), [(number, name) for number, name in NUMBERED if name not in NAMES])
def test_prefix_hits_and_preemptions_of_the_other_families(
    engine: TinyEngine, number: int, name: str, turn: int
):
    if not is_due(engine, number, turn):
        return
    setting = Setting(policy="slo", num_blocks=18, max_num_seqs=16, repeats=2)
    outcome = run(engine, name, setting, lengths=SHORT_OF_MEMORY[:6])
    assert outcome.num_preemptions > 0
    assert outcome.num_prefix_hits > 60


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in BLIND])
@pytest.mark.parametrize("depth", [1, 2])
@in_turns
@each_case("name", NAMES)
def test_objectives_change_no_token(engine: TinyEngine, name: str, policy: str, depth: int, turn: int):
    if is_due(engine, NAMES.index(name) + number_of(policy, depth), turn):
        check_with_objectives(engine, name, policy, depth)


@pytest.mark.parametrize("policy", BLIND)
@pytest.mark.parametrize("depth", [1, 2])
@in_turns
def test_objectives_mean_nothing_to_some_policies(engine: TinyEngine, policy: str, depth: int, turn: int):
    """One family says enough of these."""
    if is_due(engine, number_of(policy, depth), turn):
        check_with_objectives(engine, "llama3", policy, depth)


@pytest.mark.slow
@pytest.mark.parametrize("policy", BLIND)
@pytest.mark.parametrize("depth", [1, 2])
@each_case("name", [name for name in NAMES if name != "llama3"])
def test_objectives_mean_nothing_to_some_policies_with_other_families(
    engine: TinyEngine, name: str, policy: str, depth: int
):
    check_with_objectives(engine, name, policy, depth)


def check_with_objectives(engine: TinyEngine, name: str, policy: str, depth: int) -> None:
    plain = Setting(
        policy=policy,
        budget=64 if policy in CHUNKED else None,
        arrivals=1,
        num_blocks=40,
        depth=depth,
        objectives=OBJECTIVES,
    )
    few_slots = run(engine, name, replace(plain, max_num_seqs=4))
    few_blocks = run(engine, name, replace(plain, num_blocks=18, max_num_seqs=16), lengths=SHORT_OF_MEMORY)
    if policy == "slo":
        assert few_slots.num_relegated > 0
        assert few_blocks.num_preemptions > 0
