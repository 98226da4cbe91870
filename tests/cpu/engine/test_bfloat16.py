"""In bfloat16 our logits are as near to the float64 model's as transformers' are."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.cpu.engine.engines import TinyEngine
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import FAMILIES, random_prompt, tiny_model
from tests.many_cases import each_case

pytestmark = pytest.mark.golden


@cache
def reference(name: str, length: int) -> tuple[torch.Tensor, float]:
    """Return the float64 model's logits behind a prompt, and the error of transformers' in bfloat16."""
    prompt = torch.tensor([random_prompt(length)])
    with torch.inference_mode():
        expected = tiny_model(name).hf_model(prompt).logits[0, -1]
        theirs = tiny_model(name, torch.bfloat16).hf_model(prompt).logits[0, -1].double()
    return expected, float((theirs - expected).norm() / expected.norm())


@each_case("name", list(FAMILIES))
@each_case("chunk", [1000, 16])
def test_logits_are_near_the_exact_ones(engine: TinyEngine, name: str, chunk: int) -> None:
    driver = StepDriver(engine.make_forward(name, torch.bfloat16))
    for length in (3, 40, 150):
        driver.add(random_prompt(length), 1)
    driver.run(chunk)
    for live in driver.requests.values():
        expected, their_error = reference(name, len(live.request.prompt_token_ids))
        (ours,) = live.logits
        assert ours.dtype == torch.float32
        our_error = (ours.double() - expected).norm() / expected.norm()
        assert our_error < 2 * their_error + 0.01
        assert our_error < 0.1
