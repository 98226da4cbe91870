"""Greedy tokens and logits equal transformers' on tiny random models, however steps are cut.

In float64 on torch, in float32 on the native engine.
"""

from __future__ import annotations

import random

import pytest
import torch

from onbeat.engine.forward import ForwardPass
from onbeat.engine.torch.forward import TorchForward
from tests.cpu.engine.engines import TinyEngine, in_parts, in_turns, is_due, is_in_part
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import KIN, ON_TORCH, random_prompt, tiny_model
from tests.many_cases import each_case

pytestmark = pytest.mark.golden

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 63, 100, 197)
MAX_TOKENS = 10


every_family = each_case("name", ON_TORCH)
CUTS = [(1000, 16), (1, 16), (7, 32), (64, 16)]
"""Tokens of a prompt in a step, and of a block."""


def assert_equals_reference(driver: StepDriver, engine: TinyEngine, name: str) -> None:
    for live in driver.requests.values():
        tokens = live.output_token_ids
        reference = tiny_model(name).reference(live.request.prompt_token_ids, live.max_tokens, tokens)
        num_comparable, expected = engine.check(tokens, *reference), reference[1]
        engine.check_logits(torch.stack(live.logits)[:num_comparable], expected[:num_comparable])


@pytest.mark.parametrize(("chunk", "block_size"), CUTS)
@in_parts(3)
@every_family
def test_tokens_and_logits_equal_the_reference(
    engine: TinyEngine, name: str, chunk: int, block_size: int, part: tuple[int, int]
) -> None:
    if not is_in_part(engine, list(ON_TORCH).index(name) + CUTS.index((chunk, block_size)), part):
        return
    driver = StepDriver(engine.make_forward(name), block_size=block_size)
    for length in PROMPT_LENGTHS[: 6 if chunk == 1 else None]:  # a step for each token of the longest
        driver.add(random_prompt(length), MAX_TOKENS)
    driver.run(chunk)
    assert_equals_reference(driver, engine, name)


@in_parts(3)
@every_family
def test_single_requests_equal_the_reference(engine: TinyEngine, name: str, part: tuple[int, int]) -> None:
    if not is_in_part(engine, list(ON_TORCH).index(name), part):
        return
    driver = StepDriver(engine.make_forward(name))
    for length in PROMPT_LENGTHS:
        driver.add(random_prompt(length), MAX_TOKENS)
        driver.run(chunk=48)
    assert_equals_reference(driver, engine, name)


@each_case("name", KIN)
def test_kin_of_other_families_equal_the_reference(engine: TinyEngine, name: str) -> None:
    driver = StepDriver(engine.make_forward(name))
    for length in PROMPT_LENGTHS:
        driver.add(random_prompt(length), MAX_TOKENS)
    driver.run(64)
    assert_equals_reference(driver, engine, name)


@pytest.mark.parametrize("seed", range(3))
@in_turns
@every_family
def test_mixed_steps_with_late_arrivals_and_preemptions_equal_the_reference(
    engine: TinyEngine, name: str, seed: int, turn: int
) -> None:
    if not is_due(engine, seed + list(ON_TORCH).index(name), turn):
        return
    driver = StepDriver(engine.make_forward(name), seed=seed)
    chance = random.Random(seed)
    waiting = list(PROMPT_LENGTHS)
    chance.shuffle(waiting)
    num_preemptions = 0
    while waiting or any(not live.is_finished for live in driver.requests.values()):
        if waiting and chance.random() < 0.4:
            driver.add(random_prompt(waiting.pop()), MAX_TOKENS)
        unfinished = [key for key, live in driver.requests.items() if not live.is_finished]
        for request_id in unfinished:
            if driver.requests[request_id].is_running and chance.random() < 0.05:
                driver.release(request_id)
                num_preemptions += 1
        chance.shuffle(unfinished)
        rows = {key: chance.choice((1, 3, 20, 40, 200)) for key in unfinished if chance.random() < 0.8}
        if rows:
            driver.step(rows)
    assert num_preemptions > 0
    assert_equals_reference(driver, engine, name)


@in_parts(3)
@every_family
def test_a_finished_request_as_padding_changes_nothing(
    engine: TinyEngine, name: str, part: tuple[int, int]
) -> None:
    if not is_in_part(engine, list(ON_TORCH).index(name), part):
        return
    driver = StepDriver(engine.make_forward(name))
    finished = driver.add(random_prompt(17), 10**9)  # its blocks stay, as in a batch that ends as a whole
    for _ in range(MAX_TOKENS):
        driver.step({finished: 64})
    keys_before = visible_keys(driver.runner.forward, driver.requests[finished].block_ids)
    other = driver.add(random_prompt(40), MAX_TOKENS)
    for _ in range(MAX_TOKENS):
        driver.step({other: 64}, padding=[finished])
    keys = visible_keys(driver.runner.forward, driver.requests[finished].block_ids)
    for layer, before in zip(keys, keys_before, strict=True):
        torch.testing.assert_close(layer, before, rtol=0, atol=1e-12)
    driver.requests[finished].max_tokens = MAX_TOKENS
    assert_equals_reference(driver, engine, name)


def visible_keys(forward: ForwardPass, block_ids: list[int]) -> list[torch.Tensor]:
    """Copy the keys of some blocks, layer by layer; the native engine shows none."""
    if not isinstance(forward, TorchForward):
        return []
    return [layer.k_BKSH[block_ids].clone() for layer in forward.kv]
