"""Most likely tokens that come with the logits: used where they suffice, the same as a search finds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import SamplingParams
from onbeat.engine.draw import Logits
from onbeat.engine.sampled import INVALID_TOKEN, BestTokens
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from tests.cpu.sampler.test_sampler import sampling_rows
from tests.examples import examples


def row(**params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**{"temperature": 0.0, **params}), [1, 2], [])


def best_of(logits_RV: Logits) -> BestTokens:
    return BestTokens(logits_RV.argmax(axis=-1), logits_RV.max(axis=-1))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"num_logprobs": 0},
        {"logit_bias": ((3, 1.0),)},
        {"allowed_token_ids": (3,)},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1, "stop_token_ids": (3,)},
    ],
)
def test_one_row_that_needs_more_is_enough(params: dict[str, Any]) -> None:
    sampler = Sampler(8)
    assert not sampler.needs_logits([row(), row()])
    assert sampler.needs_logits([row(), row(**params)])


def test_without_logits_the_best_are_taken_and_invalid_ones_reported() -> None:
    best = BestTokens(np.array([5, 0, 2]), np.array([1.5, math.nan, math.inf], np.float32))
    sampled = Sampler(8).sample(None, [row(), row(), row()], best)
    assert sampled.token_ids == [5, INVALID_TOKEN, INVALID_TOKEN]
    assert sampled.errors == {
        1: "the model produced invalid logits: the largest is nan",
        2: "the model produced invalid logits: the largest is inf",
    }
    assert sampled.logprobs == [None] * 3


@given(st.lists(sampling_rows(), min_size=1, max_size=4))
@examples(60)
def test_known_best_tokens_change_nothing(pairs: list[tuple[list[float], SamplingRow]]) -> None:
    logits_RV = np.array([logits for logits, _ in pairs], np.float32)
    rows = [request for _, request in pairs]
    sampler = Sampler(logits_RV.shape[1])
    assert sampler.sample(logits_RV.copy(), rows, best_of(logits_RV)) == sampler.sample(
        logits_RV.copy(), rows
    )
