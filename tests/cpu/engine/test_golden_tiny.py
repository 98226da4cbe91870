"""Greedy tokens and logits equal transformers' on tiny random models in float64, however steps are cut."""

from __future__ import annotations

import random

import pytest
import torch

from onbeat.engine.attention.torch_sdpa import TorchSdpaBackend
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import FAMILIES, TinyModel, random_prompt, tiny_model

pytestmark = pytest.mark.golden

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 63, 100, 197)
MAX_TOKENS = 10


@pytest.fixture(params=list(FAMILIES))
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param)


def assert_equals_reference(driver: StepDriver, tiny: TinyModel) -> None:
    for live in driver.requests.values():
        token_ids, logits = tiny.reference(live.request.prompt_token_ids, live.max_tokens)
        assert live.output_token_ids == token_ids
        torch.testing.assert_close(torch.stack(live.logits), logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("chunk", "block_size"), [(1000, 16), (1, 16), (7, 32), (64, 16)])
def test_tokens_and_logits_equal_the_reference(tiny: TinyModel, chunk: int, block_size: int) -> None:
    driver = StepDriver(tiny.model, block_size=block_size)
    for length in PROMPT_LENGTHS:
        driver.add(random_prompt(length), MAX_TOKENS)
    driver.run(chunk)
    assert_equals_reference(driver, tiny)


def test_single_requests_equal_the_reference(tiny: TinyModel) -> None:
    driver = StepDriver(tiny.model)
    for length in PROMPT_LENGTHS:
        driver.add(random_prompt(length), MAX_TOKENS)
        driver.run(chunk=48)
    assert_equals_reference(driver, tiny)


@pytest.mark.parametrize("seed", range(3))
def test_mixed_steps_with_late_arrivals_and_preemptions_equal_the_reference(
    tiny: TinyModel, seed: int
) -> None:
    driver = StepDriver(tiny.model, seed=seed)
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
    assert_equals_reference(driver, tiny)


def test_a_finished_request_as_padding_changes_nothing(tiny: TinyModel) -> None:
    driver = StepDriver(tiny.model)
    finished = driver.add(random_prompt(17), 10**9)  # its blocks stay, as in a batch that ends as a whole
    for _ in range(MAX_TOKENS):
        driver.step({finished: 64})
    assert isinstance(driver.runner.attention, TorchSdpaBackend)
    layers = driver.runner.attention.layers
    cache_before = [layer.k_BKSH.clone() for layer in layers]
    blocks = driver.requests[finished].block_ids
    other = driver.add(random_prompt(40), MAX_TOKENS)
    for _ in range(MAX_TOKENS):
        driver.step({other: 64}, padding=[finished])
    for layer, before in zip(layers, cache_before, strict=True):
        torch.testing.assert_close(layer.k_BKSH[blocks], before[blocks], rtol=0, atol=1e-12)
    driver.requests[finished].max_tokens = MAX_TOKENS
    assert_equals_reference(driver, tiny)
