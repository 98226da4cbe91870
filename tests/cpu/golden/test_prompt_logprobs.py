"""Log-probabilities of prompts equal transformers' on tiny models, however the prompts are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from onbeat.core.request import TokenLogprobs
from onbeat.core.slo import SLO
from onbeat.engine import prompt_scorer
from tests.cpu.engine.engines import NativeEngine, TinyEngine, in_parts, is_in_part
from tests.cpu.engine.tiny_models import random_prompt, tiny_model
from tests.cpu.golden.engine_run import Outcome, Setting, run_engine

pytestmark = pytest.mark.golden

LENGTHS = tuple(range(1, 201, 4))
"""Of 50 prompts."""
SHORT_OF_MEMORY = (30, 31, 28, 61, 60, 29, 14, 15, 16, 44)
MAX_TOKENS = 12
SETTING = Setting(num_prompt_logprobs=3)


def lengths_for(engine: TinyEngine) -> tuple[int, ...]:
    """Return all for the native engine, which is quick, and a third for others."""
    return LENGTHS if isinstance(engine, NativeEngine) else LENGTHS[::3]


@cache
def reference(name: str, length: int) -> torch.Tensor:
    """Return log-probabilities behind each token of a prompt but the last: [length - 1, vocabulary]."""
    with torch.inference_mode():
        logits = tiny_model(name).hf_model(torch.tensor([random_prompt(length)])).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)


def check(name: str, length: int, reports: Sequence[TokenLogprobs]) -> None:
    prompt, expected = random_prompt(length), reference(name, length)
    assert [report.token_id for report in reports] == prompt[1:]
    for report, row in zip(reports, expected, strict=True):
        own = float(row[report.token_id])
        assert report.logprob == pytest.approx(own, abs=1e-3)
        np.testing.assert_allclose(report.top_logprobs, row.topk(3).values, atol=1e-3)
        assert report.rank is not None
        is_near = ((row - own).abs() < 1e-4).sum()  # float32 may order these otherwise
        assert abs(report.rank - 1 - int((row > own).sum())) < int(is_near)


def run(engine: TinyEngine, name: str, setting: Setting, lengths: tuple[int, ...]) -> Outcome:
    prompts = [random_prompt(length) for length in lengths]
    outcome = run_engine(engine.make_forward(name), prompts, MAX_TOKENS, setting, max_model_len=256)
    assert len(outcome.prompt_logprobs) == setting.repeats * len(lengths)
    for length, reports in zip(lengths * setting.repeats, outcome.prompt_logprobs, strict=True):
        check(name, length, reports)
    plain = run_engine(
        engine.make_forward(name),
        prompts,
        MAX_TOKENS,
        replace(setting, num_prompt_logprobs=None),
        max_model_len=256,
    )
    assert plain.prompt_logprobs == []
    assert outcome.tokens == plain.tokens
    return outcome


@pytest.mark.parametrize("setting", [SETTING, replace(SETTING, budget=16, arrivals=1, depth=2)])
@in_parts(2)
def test_prompts_equal_the_reference_whole_and_in_chunks(
    engine: TinyEngine, setting: Setting, part: tuple[int, int]
) -> None:
    if is_in_part(engine, setting != SETTING, part):
        run(engine, "llama3", setting, lengths_for(engine))


def test_no_pass_has_more_logits_than_it_may(engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scorer, "MOST_LOGIT_BYTES", 4 * 211 * 7)
    run(engine, "gemma3", replace(SETTING, budget=64, arrivals=2), LENGTHS[::5])


@pytest.mark.parametrize(
    "setting",
    [
        replace(SETTING, budget=24, depth=2, num_blocks=17),
        replace(SETTING, policy="prefill-first", arrivals=2, num_blocks=18),
    ],
)
def test_a_preemption_repeats_and_loses_nothing(engine: TinyEngine, setting: Setting) -> None:
    assert run(engine, "qwen3", setting, SHORT_OF_MEMORY).num_preemptions


def test_the_prefix_cache_gives_nothing_to_a_prompt_that_is_scored(engine: TinyEngine) -> None:
    outcome = run(engine, "llama3", replace(SETTING, repeats=2), LENGTHS[::5])
    assert outcome.num_prefix_hits == 0


def test_prompts_with_deadlines_beside_streams_equal_the_reference(engine: TinyEngine) -> None:
    objectives = (SLO(ttft=0.045, tbt=0.05), None, SLO(ttft=60.0, tbt=0.02))
    setting = replace(SETTING, policy="slo", arrivals=1, objectives=objectives)
    assert run(engine, "qwen2", setting, lengths_for(engine)[::2]).num_mixed_steps
