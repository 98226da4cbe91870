"""Models that keep a state of each request give transformers' tokens, however their prompts are cut."""

from __future__ import annotations

from random import Random

import pytest
import torch

from onbeat.engine.native.library import NativeLibrary
from onbeat.scheduler.replica.policies import POLICIES
from tests.cpu.engine.engines import (
    NativeEngine,
    RoundedTorchEngine,
    TinyEngine,
    in_parts,
    is_in_part,
    torch_or_native,
)
from tests.cpu.engine.forwards import on_native
from tests.cpu.engine.stateful_models import STATEFUL
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.test_golden_tiny import CUTS, MAX_TOKENS, PROMPT_LENGTHS, assert_equals_reference
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, random_prompt
from tests.cpu.golden.engine_run import Setting, run_and_check
from tests.many_cases import each_case

pytestmark = pytest.mark.golden

every_family = each_case("name", STATEFUL)
SHORT_OF_MEMORY = (30, 31, 28, 61, 60, 29, 14, 15, 16, 44)


engine = torch_or_native(RoundedTorchEngine)


@pytest.mark.parametrize(("chunk", "block_size"), CUTS)
@in_parts(2)
@every_family
def test_tokens_and_logits_equal_the_reference(
    engine: TinyEngine, name: str, chunk: int, block_size: int, part: tuple[int, int]
):
    if not is_in_part(engine, list(STATEFUL).index(name) + CUTS.index((chunk, block_size)), part):
        return
    driver = StepDriver(engine.make_forward(name), block_size=block_size)
    for length in PROMPT_LENGTHS[: 6 if chunk == 1 else None]:  # a step for each token of the longest
        driver.add(random_prompt(length), MAX_TOKENS)
    driver.run(chunk)
    assert_equals_reference(driver, engine, name)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_every_instruction_set_equals_the_reference(native_library: NativeLibrary, chunk: int) -> None:
    """Tokens meet the state one by one, or a few together; how many depends on the registers."""
    checkpoint = StateCheckpoint(hf_tiny_model("qwen3.5", torch.float64))
    for instruction_set in native_library.instruction_sets:
        driver = StepDriver(on_native(native_library, checkpoint, instruction_set=instruction_set))
        for length in (3, 38):
            driver.add(random_prompt(length), 2)
        driver.run(chunk)
        assert_equals_reference(driver, NativeEngine(native_library), "qwen3.5")


@pytest.mark.parametrize("seed", range(3))
@in_parts(3)
@every_family
def test_mixed_steps_and_preemptions_equal_the_reference(
    engine: TinyEngine, name: str, seed: int, part: tuple[int, int]
):
    """A slot's next request begins with no state, in whichever step, and so does one that comes back."""
    if not is_in_part(engine, list(STATEFUL).index(name) + seed, part):
        return
    driver, chance = StepDriver(engine.make_forward(name), seed=seed, max_num_seqs=8), Random(seed)
    waiting, num_preemptions = list(PROMPT_LENGTHS) * 2, 0
    while waiting or any(not live.is_finished for live in driver.requests.values()):
        running = [key for key, live in driver.requests.items() if not live.is_finished]
        if waiting and len(running) < 6:
            driver.add(random_prompt(waiting.pop(0)), MAX_TOKENS)
        for key, live in driver.requests.items():
            if live.is_running and (live.is_finished or chance.random() < 0.05):
                driver.release(key)
                num_preemptions += not live.is_finished
        rows = {key: chance.choice((1, 3, 20, 40, 200)) for key in running if chance.random() < 0.8}
        if rows:
            driver.step(rows)
    assert num_preemptions > 0
    assert_equals_reference(driver, engine, name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [400, 18])
@in_parts(3)
@every_family
def test_every_policy_gives_the_references_tokens(
    engine: TinyEngine, name: str, policy: str, num_blocks: int, part: tuple[int, int]
):
    case = list(STATEFUL).index(name) + list(POLICIES).index(policy) + (num_blocks < 400)
    if not is_in_part(engine, case, part):
        return
    prompts = [random_prompt(length) for length in SHORT_OF_MEMORY]
    budget = None if POLICIES[policy].whole_prompts else 24
    setting = Setting(policy=policy, budget=budget, num_blocks=num_blocks, arrivals=2, is_cached=False)
    outcome = run_and_check(engine, name, prompts, 12, setting)
    assert outcome.num_preemptions or num_blocks == 400 or policy in ("orca", "static")


@pytest.mark.parametrize(("num_snapshots", "policy"), [(32, "slo"), (3, "sarathi")])
@in_parts(2)
@every_family
def test_prefix_hits_go_on_from_kept_states(
    engine: TinyEngine, name: str, num_snapshots: int, policy: str, part: tuple[int, int]
):
    """Turns of a chat, and prompts of which the third and later ones find what the first two share."""
    if not is_in_part(engine, list(STATEFUL).index(name) + (policy == "slo"), part):
        return
    chat = random_prompt(200)
    shared = [[*random_prompt(90), *random_prompt(end)] for end in (30, 31, 32, 33)]
    prompts = [chat[:40], chat[:75], chat[:75], chat, *shared]
    setting = Setting(
        policy=policy, budget=64, arrivals=24, num_blocks=200, repeats=2, num_snapshots=num_snapshots
    )
    outcome = run_and_check(engine, name, prompts, 12, setting)
    assert outcome.num_prefix_hits >= 32 + 64 + 64 + 2 * 80 or num_snapshots < 32
    assert outcome.num_prefix_hits > 64
