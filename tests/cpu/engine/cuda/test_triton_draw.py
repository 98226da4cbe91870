"""Choosing tokens in Triton, interpreted on the CPU, against `onbeat.engine.draw`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.core.request import SamplingParams
from onbeat.engine.draw import draw, locate
from onbeat.engine.torch.kernels import BestBuffers, DrawParams

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from onbeat.engine.cuda import triton_draw

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # infinities, in the interpreter

ENOUGH, FEW = 8192, 4


class Rule(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


RULES = (
    Rule(),
    Rule(0.3),
    Rule(0.0),
    Rule(top_k=1),
    Rule(0.7, top_k=40),
    Rule(top_k=100_000),
    Rule(top_p=0.9),
    Rule(2.0, top_p=0.5),
    Rule(top_p=1e-9),
    Rule(top_p=0.9999999),
    Rule(min_p=0.05),
    Rule(min_p=1.0),
    Rule(min_p=1e-9),
    Rule(1.5, top_k=7, top_p=0.8),
    Rule(top_k=30, min_p=0.2),
    Rule(0.8, top_k=50, top_p=0.95, min_p=0.01),
)
NUMBERS = (0.0, 0.37, 0.999, 1 - 2.0**-53)


@pytest.mark.parametrize("most_candidates", [ENOUGH, FEW])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_are_those_of_the_host(rule: Rule, most_candidates: int) -> None:
    """With few candidates, rows that need more are looked at as a whole."""
    _check(rule, most_candidates, vocab_size=900)


@pytest.mark.parametrize("most_candidates", [ENOUGH, FEW])
@pytest.mark.parametrize("rule", [Rule(), Rule(0.8, top_k=50, top_p=0.95)], ids=str)
def test_rows_of_several_pieces(rule: Rule, most_candidates: int) -> None:
    _check(rule, most_candidates, vocab_size=9000)


def _check(rule: Rule, most_candidates: int, *, vocab_size: int) -> None:
    logits_RV = random_logits(rule, vocab_size)
    assert drawn(logits_RV, rule, NUMBERS, most_candidates) == [
        expected_token(logits_V, rule, number) for logits_V, number in zip(logits_RV, NUMBERS, strict=True)
    ]


def test_a_number_at_a_boundary_draws_a_token_beside_it() -> None:
    """The last token's share is 1.006 of what 1 - 2**-53 leaves, and the next-to-last one's is 10**-21."""
    rule, number = Rule(0.3), NUMBERS[-1]
    logits_V = random_logits(rule, 128_256)[-1]
    beside = tokens_beside(logits_V, rule.temperature, number)
    assert beside == {128_253, 128_254, 128_255}
    assert expected_token(logits_V, rule, number) in beside
    assert drawn(logits_V[None], rule, [number])[0] in beside
    for clear in NUMBERS[:-1]:
        expected = expected_token(logits_V, rule, clear)
        assert tokens_beside(logits_V, rule.temperature, clear) == {expected}
        assert drawn(logits_V[None], rule, [clear]) == [expected]


@pytest.mark.parametrize("most_candidates", [ENOUGH, FEW])
@pytest.mark.parametrize(
    "rule", [Rule(), Rule(top_k=9), Rule(top_p=0.6), Rule(min_p=0.3, top_p=0.7)], ids=str
)
def test_equal_logits_are_told_apart_by_their_ids(rule: Rule, most_candidates: int) -> None:
    rng = np.random.default_rng(1)
    logits_RV = rng.integers(-2, 2, (6, 300)).astype(np.float32)
    logits_RV[:, ::3] = -np.inf
    logits_RV[(logits_RV == 0) & (rng.random(logits_RV.shape) < 0.5)] = -0.0
    numbers = rng.random(6).tolist()
    chosen = drawn(logits_RV, rule, numbers, most_candidates)
    assert chosen == [
        expected_token(logits_V, rule, number) for logits_V, number in zip(logits_RV, numbers, strict=True)
    ]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Failed rows get some token, and the others theirs."""
    logits_RV = np.random.default_rng(2).normal(size=(5, 700)).astype(np.float32)
    alone = [drawn(logits_RV[row : row + 1], Rule(top_p=0.9), [0.4])[0] for row in range(5)]
    logits_RV[1, 300], logits_RV[2, 5], logits_RV[3] = np.nan, np.inf, -np.inf
    together = drawn(logits_RV, Rule(top_p=0.9), [0.4] * 5)
    assert (together[0], together[4]) == (alone[0], alone[4])
    assert all(0 <= token < 700 for token in together)


def test_best_is_the_lowest_of_equals_and_a_nan_where_there_is_one() -> None:
    logits_RV = torch.randn(6, 9000, generator=torch.Generator().manual_seed(0))
    logits_RV[0, [40, 8000]] = 9.0
    logits_RV[1, 7] = torch.nan
    logits_RV[1, 8] = torch.inf
    logits_RV[2, 5000] = torch.inf
    logits_RV[3] = -torch.inf
    logits_RV[4] = -1.0
    logits_RV[4, 6000], logits_RV[4, 6001] = -0.0, 0.0
    best = best_tokens(logits_RV)
    assert best.ids_R[:5].tolist() == [40, 7, 5000, 0, 6000]
    assert best.ids_R[5] == logits_RV[5].argmax()
    expected_R = torch.tensor([9.0, torch.nan, torch.inf, -torch.inf, 0.0, logits_RV[5].max()])
    torch.testing.assert_close(best.peaks_R, expected_R, rtol=0, atol=0, equal_nan=True)


def random_logits(rule: Rule, vocab_size: int) -> NDArray[np.float32]:
    """Return a row for each number."""
    rng = np.random.default_rng(vocab_size + RULES.index(rule) if rule in RULES else 0)
    return (rng.normal(size=(len(NUMBERS), vocab_size)) * 3).astype(np.float32)


def best_tokens(logits_RV: Tensor) -> BestBuffers:
    num_rows, device = len(logits_RV), logits_RV.device
    ids_R = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    best = BestBuffers(ids_R, torch.empty(num_rows, device=device))
    triton_draw.best(logits_RV, best)
    return best


def drawn(
    logits_RV: NDArray[np.float32],
    rule: Rule,
    numbers: Sequence[float],
    most_candidates: int = ENOUGH,
    device: str = "cpu",
) -> list[int]:
    logits, num_rows = torch.from_numpy(logits_RV).to(device), len(logits_RV)
    doubles = partial(torch.full, (num_rows,), dtype=torch.float64, device=device)
    params = DrawParams(
        temperatures_R=doubles(rule.temperature),
        top_ks_R=torch.full((num_rows,), rule.top_k, dtype=torch.int32, device=device),
        top_ps_R=doubles(rule.top_p),
        min_ps_R=doubles(rule.min_p),
        numbers_R=torch.tensor(numbers, dtype=torch.float64, device=device),
    )
    ids_R = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    triton_draw.draw(logits, params, best_tokens(logits), ids_R, most_candidates=most_candidates)
    return ids_R.tolist()


def tokens_beside(logits_V: NDArray[np.float32], temperature: float, number: float) -> set[int]:
    """Return the tokens that a number may draw from a row that nothing cuts: mostly one.

    Each token has a share of [0, 1). Sums in float64, in whatever order, move its ends by some 2**-53 for
    each of about 20 additions, so a number within 2**-48 of an end may draw the token on either side.
    """
    wide_V = logits_V.astype(np.float64)
    weights_V = np.exp((wide_V - wide_V.max()) / temperature).astype(np.longdouble)
    ends_V = np.cumsum(weights_V)
    ends_V /= ends_V[-1]
    starts_V = np.append(np.longdouble(0.0), ends_V[:-1])
    return set(np.flatnonzero((starts_V < number + 2.0**-48) & (ends_V > number - 2.0**-48)).tolist())


def expected_token(logits_V: NDArray[np.float32], rule: Rule, number: float) -> int:
    if rule.temperature == 0:
        return int(logits_V.argmax())
    wide_V = logits_V.astype(np.float64)
    weights_V = np.exp((wide_V - wide_V.max()) / rule.temperature)
    if rule == Rule(rule.temperature):
        cumulative_V = np.cumsum(weights_V)
        return locate(cumulative_V, number * cumulative_V[-1])
    params = SamplingParams(**rule._asdict())
    return draw(np.arange(len(wide_V)), wide_V, params, mass=float(weights_V.sum()), number=number)
