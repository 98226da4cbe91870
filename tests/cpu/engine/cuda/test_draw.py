"""The draw of the GPU engine's reference operators is that of the sampler."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from onbeat.core.request import SamplingParams
from onbeat.engine.random_stream import uniform
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.torch.kernels import BestBuffers, DrawParams
from tests.cpu.engine.reference_kernels import draw
from tests.cpu.sampler.reference import distribution, invert


def choose(logits_RV: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    peaks_R, ids_R = logits_RV.max(-1)
    best = BestBuffers(ids_R.int(), peaks_R.float())
    columns = [
        torch.tensor([getattr(each, name) for each in params], dtype=torch.float64)
        for name in ("temperature", "top_p", "min_p")
    ]
    top_ks = torch.tensor([each.top_k for each in params], dtype=torch.int32)
    draws = DrawParams(columns[0], top_ks, columns[1], columns[2], torch.tensor(numbers, dtype=torch.float64))
    return draw(logits_RV, draws, best).tolist()


def random_params(chance: random.Random, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=chance.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=chance.choice([0, 0, 1, 2, 5, 400]),
        top_p=chance.choice([1.0, 1.0, 0.999999, 0.9, 0.5, 0.01]),
        min_p=chance.choice([0.0, 0.0, 0.02, 0.5, 1.0]),
        seed=seed,
    )


def random_logits(chance: random.Random, num_rows: int, num_ids: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    logits_RV = 3 * torch.randn(num_rows, num_ids, generator=generator)
    for row in range(num_rows):
        kind = chance.randrange(4)
        if kind == 0:  # ties
            logits_RV[row] = logits_RV[row].round()
        elif kind == 1:  # both zeros
            logits_RV[row] = torch.where(logits_RV[row] > 0, 0.0, -0.0)
        elif kind == 2:  # bans
            logits_RV[row, torch.randperm(num_ids, generator=generator)[: num_ids // 2]] = -torch.inf
    return logits_RV


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_those_of_the_slow_and_obvious_way(seed: int) -> None:
    chance = random.Random(seed)
    params = [random_params(chance, seed) for _ in range(32)]
    numbers = [chance.choice([0.0, 1.0 - 2.0**-53, chance.random(), chance.random()]) for _ in params]
    logits_RV = random_logits(chance, len(params), 61)
    chosen = choose(logits_RV, params, numbers)
    num_different = 0
    for logits, each, number, token_id in zip(logits_RV.tolist(), params, numbers, chosen, strict=True):
        if each.temperature == 0.0:
            assert token_id == int(np.argmax(logits))
            continue
        probabilities = distribution(logits, each)
        assert token_id in probabilities
        num_different += token_id != invert(probabilities, number)
    # Sums in another order differ in the last bit, which a number near 0 or 1 or a whole top_p may show.
    assert num_different <= 1


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_those_of_the_sampler(seed: int) -> None:
    chance = random.Random(seed)
    params = [random_params(chance, chance.randrange(2**40)) for _ in range(64)]
    rows = [SamplingRow(each, [1], [0] * chance.randrange(50)) for each in params]
    logits_RV = random_logits(chance, len(params), 1000)
    numbers = [uniform(row.params.seed, row.position) for row in rows]
    expected = Sampler(1000).sample(logits_RV.numpy().copy(), rows).token_ids
    assert choose(logits_RV, params, numbers) == expected


def test_rows_that_are_not_finite_get_some_token() -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1, seed=1)] * 4
    logits_RV = torch.zeros(4, 7)
    logits_RV[0, 3] = torch.nan
    logits_RV[1, 3] = torch.inf
    logits_RV[2] = -torch.inf
    chosen = choose(logits_RV, params, [0.5] * 4)
    assert all(0 <= token_id < 7 for token_id in chosen)
    assert chosen[3] == 3
