"""Choosing tokens on a GPU, against the host's draw on equal logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cpu.engine.cuda.test_triton_draw import (
    ENOUGH,
    FEW,
    NUMBERS,
    RULES,
    Rule,
    best_tokens,
    drawn,
    expected_token,
    random_logits,
    tokens_beside,
)

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 128_256


@pytest.mark.parametrize("most_candidates", [ENOUGH, FEW])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_are_those_of_the_host(rule: Rule, most_candidates: int) -> None:
    logits_RV = random_logits(rule, VOCAB_SIZE)
    tokens = drawn(logits_RV, rule, NUMBERS, most_candidates, "cuda")
    for token, logits_V, number in zip(tokens, logits_RV, NUMBERS, strict=True):
        allowed = {expected_token(logits_V, rule, number)}
        if rule == Rule(0.3) and number == NUMBERS[-1]:
            # This row's last token starts where the number is, to 2**-60; all others are clear.
            allowed |= tokens_beside(logits_V, rule.temperature, number)
        assert token in allowed


def test_equal_logits_are_told_apart_by_their_ids() -> None:
    rng = np.random.default_rng(1)
    logits_RV = rng.integers(-2, 2, (16, 3000)).astype(np.float32)
    logits_RV[(logits_RV == 0) & (rng.random(logits_RV.shape) < 0.5)] = -0.0
    numbers = rng.random(16).tolist()
    for rule in (Rule(), Rule(top_k=900), Rule(top_p=0.6)):
        assert drawn(logits_RV, rule, numbers, ENOUGH, "cuda") == [
            expected_token(logits_V, rule, number)
            for logits_V, number in zip(logits_RV, numbers, strict=True)
        ]


def test_best_is_the_lowest_of_equals_and_a_nan_where_there_is_one() -> None:
    logits_RV = torch.randn(4, VOCAB_SIZE)
    logits_RV[0, [40, 100_000]] = 9.0
    logits_RV[1, 7], logits_RV[1, 8] = torch.nan, torch.inf
    logits_RV[2] = -1.0
    logits_RV[2, 6000], logits_RV[2, 6001] = -0.0, 0.0
    logits_RV[3] = -torch.inf
    best = best_tokens(logits_RV.cuda())
    assert best.ids_R.tolist() == [40, 7, 6000, 0]
    assert [str(peak) for peak in best.peaks_R.tolist()] == ["9.0", "nan", "0.0", "-inf"]
