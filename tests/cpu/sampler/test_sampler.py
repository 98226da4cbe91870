import math
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from onbeat.core.request import SamplingParams
from onbeat.engine.draw import Logits, top_k_bound
from onbeat.engine.random_stream import uniform
from onbeat.engine.sampled import INVALID_TOKEN, SampledTokens
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from tests.cpu.sampler.reference import distribution, edited_logits, invert
from tests.examples import examples
from tests.many_cases import each_case

VOCAB = 24
TOKENS = st.integers(0, VOCAB - 1)
LOGITS = st.lists(st.integers(-40, 40).map(lambda x: x / 4), min_size=VOCAB, max_size=VOCAB)


def sampling_params(**extra) -> st.SearchStrategy[SamplingParams]:
    fields = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 0, 1, 5, VOCAB, 10 * VOCAB]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-9, 0.37, 0.917, 0.9999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.07, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.7, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -1.0, 0.6]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -0.3, 0.4]),
        "logit_bias": st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, 2.5])), max_size=2).map(tuple),
        "allowed_token_ids": st.just(()) | st.sets(TOKENS, min_size=1).map(tuple),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.just(()) | st.sets(TOKENS, max_size=3).map(tuple),
        "seed": st.integers(0, 2**64 - 1),
        "num_logprobs": st.none() | st.integers(0, 4),
    }
    return st.builds(SamplingParams, **(fields | extra))


def sampling_rows(**extra) -> st.SearchStrategy[tuple[list[float], SamplingRow]]:
    tokens = st.lists(TOKENS, max_size=6)
    return st.tuples(LOGITS, st.builds(SamplingRow, sampling_params(**extra), tokens, tokens))


def sample(logits: list[list[float]], rows: list[SamplingRow], dtype: type = np.float64) -> SampledTokens:
    logits_RV: Logits = np.array(logits, dtype)
    return Sampler(logits_RV.shape[1]).sample(logits_RV, rows)


def row(**params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), [], [])


def draws(logits: list[float], num_draws: int, **params) -> Counter[int]:
    """Tokens of one request at consecutive positions with the same logits."""
    request = row(**params)
    sampler = Sampler(len(logits))
    for _ in range(num_draws):
        request.output_token_ids += sampler.sample(np.array([logits], np.float32), [request]).token_ids
    return Counter(request.output_token_ids)


@given(sampling_rows())
def test_token_is_the_one_of_the_obvious_implementation(case: tuple[list[float], SamplingRow]) -> None:
    logits, request = case
    expected = edited_logits(logits, request.params, list(request.prompt_token_ids), request.output_token_ids)
    sampled = sample([logits], [request])
    if max(expected) == -math.inf:
        assert "no token" in sampled.errors[0]
        assert sampled.token_ids == [INVALID_TOKEN]
        return
    assert sampled.errors == {}
    if request.params.temperature == 0.0:
        assert sampled.token_ids == [expected.index(max(expected))]
    else:
        number = uniform(request.params.seed, len(request.output_token_ids))
        assert sampled.token_ids[0] == invert(distribution(expected, request.params), number)


@given(st.lists(sampling_rows(), min_size=1, max_size=6), st.sampled_from([np.float32, np.float64]))
@examples(200)
def test_rows_do_not_influence_one_another(cases, dtype) -> None:
    together = sample([logits for logits, _ in cases], [request for _, request in cases], dtype)
    for index, (logits, request) in enumerate(cases):
        alone = sample([logits], [request], dtype)
        assert together.token_ids[index] == alone.token_ids[0]
        assert together.logprobs[index] == alone.logprobs[0]
        assert together.errors.get(index) == alone.errors.get(0)


@pytest.mark.parametrize("vocab_size", [300, 1024, 49_152])
@pytest.mark.parametrize(
    "kinds",
    [({},), ({"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.1}, {"temperature": 0.0}, {"num_logprobs": 4})],
)
def test_large_batch_equals_single_rows(vocab_size: int, kinds: tuple[dict[str, Any], ...]) -> None:
    num_rows = 70
    logits = 3 * np.random.default_rng(vocab_size).standard_normal((num_rows, vocab_size), np.float32)
    rows = [row(seed=seed, **kinds[seed % len(kinds)]) for seed in range(num_rows)]
    sampler = Sampler(vocab_size)
    together = sampler.sample(logits.copy(), rows)
    alone = [sampler.sample(logits[i : i + 1].copy(), [rows[i]]) for i in range(num_rows)]
    assert together.token_ids == [each.token_ids[0] for each in alone]
    assert together.logprobs == [each.logprobs[0] for each in alone]
    assert max(Counter(together.token_ids).values()) < num_rows // 4


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([1, 1000]))
def test_the_bound_of_top_k_keeps_the_largest_and_few_others(
    num_ids: int, top_k: int, seed: int, steps: int
) -> None:
    top_k = min(top_k, num_ids)
    logits_V = np.round(np.random.default_rng(seed).standard_normal(num_ids, np.float32) * steps)
    kept = np.sort(logits_V[logits_V >= top_k_bound(logits_V, top_k)])
    largest = np.sort(logits_V)[-top_k:]
    assert kept[-top_k:].tolist() == largest.tolist()
    assert len(kept) - np.count_nonzero(kept == kept[0]) <= 2 * top_k


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0, "top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.7, "min_p": 0.05},
    ],
)
def test_frequencies_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = [1.0, 0.5, -0.5, 2.0, 0.0, -1.0, 1.5, -30.0]
    num_draws = 4000
    counts = draws(logits, num_draws, seed=11, **params)
    expected = distribution(logits, SamplingParams(**params))
    assert set(counts) <= set(expected)
    common = {token_id: p for token_id, p in expected.items() if p * num_draws > 5}
    chi_square = sum((counts[i] - p * num_draws) ** 2 / (p * num_draws) for i, p in common.items())
    degrees = len(common) - 1
    # Far in the tail of the chi-square distribution: mean + 5 standard deviations.
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_stream_depends_on_seed_and_position_only() -> None:
    logits = [0.0] * VOCAB
    request, same_seed, other_seed = row(seed=5), row(seed=5), row(seed=6)
    for _ in range(20):
        for each in (request, same_seed, other_seed):
            each.output_token_ids += sample([logits], [each]).token_ids
    assert request.output_token_ids == same_seed.output_token_ids != other_seed.output_token_ids
    # A preempted request comes back as a new row that already has output tokens.
    resumed = SamplingRow(SamplingParams(seed=5), [], request.output_token_ids[:13])
    assert sample([logits], [resumed]).token_ids == request.output_token_ids[13:14]


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    assert set(draws([0.0] * 8, 200, top_k=3)) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert set(draws(logits, 200, top_p=0.49)) == {1}
    assert set(draws(logits, 200, top_p=0.7)) == {1, 3}
    assert set(draws(logits, 200, top_p=0.8)) == {1, 2, 3}
    assert set(draws(logits, 200, top_p=1.0)) == {0, 1, 2, 3}


def test_top_p_is_of_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Renormalised over the first two: 0.57 and 0.43.
    assert set(draws(logits, 100, top_k=2, top_p=0.56)) == {0}
    assert set(draws(logits, 100, top_k=2, top_p=0.6)) == {0, 1}


def test_flat_row_has_its_whole_nucleus() -> None:
    assert len(draws([0.0] * 100, 3000, top_p=0.895)) == 90


def test_min_p_is_relative_to_the_peak() -> None:
    logits = [math.log(p) for p in (0.5, 0.26, 0.24)]
    assert set(draws(logits, 200, min_p=0.5)) == {0, 1}
    assert set(draws(logits, 200, min_p=1.0)) == {0}


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e-4, 2.0])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.3}])
def test_extreme_temperatures(temperature: float, params: dict[str, Any]) -> None:
    counts = draws([-300.0, 3.0e5, -math.inf, 2.0e5], 50, temperature=temperature, **params)
    assert set(counts) == {1}


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    for params in ({}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 1e-12}):
        assert set(draws(logits, 300, **params)) == {1, 3}


def test_penalties_by_hand() -> None:
    request = SamplingRow(
        SamplingParams(
            temperature=0.0,
            repetition_penalty=2.0,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            num_logprobs=0,
        ),
        [0, 1],
        [2, 2, 3],
    )
    logits = np.array([[4.0, -1.0, 4.0, -1.0, 2.1]])
    sampled = Sampler(5).sample(logits, [request])
    # 0 and 1: prompt only; 2: twice in the output; 3: once; 4: not seen.
    assert logits.tolist() == [[2.0, -2.0, 4.0 / 2 - 0.5 - 2 * 0.25, -1.0 * 2 - 0.5 - 0.25, 2.1]]
    assert sampled.token_ids == [4]


def test_penalties_follow_growing_output() -> None:
    # Each choice lowers its token by 1, so greedy walks over ever more distinct tokens.
    vocab_size = 400
    request = row(temperature=0.0, frequency_penalty=1.0)
    sampler = Sampler(vocab_size)
    for _ in range(2 * vocab_size):
        request.output_token_ids += sampler.sample(np.zeros((1, vocab_size), np.float32), [request]).token_ids
    assert request.output_token_ids == 2 * list(range(vocab_size))


def test_min_tokens_holds_back_stop_tokens() -> None:
    request = row(temperature=0.0, min_tokens=2, stop_token_ids=(1, 10**9))
    for _ in range(3):
        request.output_token_ids += sample([[0.0, 9.0, 5.0]], [request]).token_ids
    assert request.output_token_ids == [2, 2, 1]


def test_bad_words_end_nowhere() -> None:
    """The last token of a word is banned behind the others, wherever in the output they are."""
    request = row(temperature=0.0, bad_words=((0,), (1, 1, 2)))
    logits = [[9.0, 1.0, 3.0], [9.0, 5.0, 3.0], [9.0, 5.0, 3.0], [9.0, 1.0, 3.0], [9.0, 1.0, 3.0]]
    for each in logits:
        request.output_token_ids += sample([each], [request]).token_ids
    assert request.output_token_ids == [2, 1, 1, 1, 1]
    assert sample([[9.0, 1.0, 3.0]], [row(temperature=0.0, bad_words=((1, 1, 2),))]).token_ids == [0]


@each_case("dtype", [np.float32, np.float64])
@each_case("penalty", [1e-300, 1e-42, 1e-38])
@each_case(
    "params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 2, "num_logprobs": 1}]
)
def test_a_tiny_repetition_penalty_only_repeats(dtype: type, penalty: float, params: dict[str, Any]) -> None:
    """Logits that leave the range of the type stop at its end, so what was seen is all that is sampled."""
    fields = {"repetition_penalty": penalty, "logit_bias": ((0, 100.0),), **params}
    rows = [SamplingRow(SamplingParams(seed=seed, **fields), [1, 3], []) for seed in range(8)]
    sampled = sample([[9.0, 2.0, 5.0, 1.0]] * 8, rows, dtype)
    assert not sampled.errors
    assert set(sampled.token_ids) <= {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_invalid_logits_fail_their_row_only(bad: float, params: dict[str, Any]) -> None:
    good = [0.0, 7.0, 1.0]
    sampled = sample(
        [good, [0.0, bad, 1.0], good], [row(temperature=0.0), row(num_logprobs=2, **params), row()]
    )
    assert list(sampled.errors) == [1]
    assert str(bad) in sampled.errors[1]
    assert sampled.token_ids == [1, INVALID_TOKEN, sample([good], [row()]).token_ids[0]]
    assert sampled.logprobs == [None, None, None]


def test_row_without_a_finite_logit_is_invalid() -> None:
    assert list(sample([[-math.inf] * 3], [row()]).errors) == [0]


@given(sampling_rows(num_logprobs=st.integers(0, VOCAB + 5)))
@example(([0.0] * VOCAB, row(num_logprobs=3)))
def test_logprobs_are_of_the_unmodified_distribution(case: tuple[list[float], SamplingRow]) -> None:
    logits, request = case
    sampled = sample([logits], [request])
    if sampled.errors:
        return
    log_mass = math.log(sum(math.exp(x) for x in logits))
    report = sampled.logprobs[0]
    assert report is not None
    assert report.token_id == sampled.token_ids[0]
    assert report.logprob == pytest.approx(logits[report.token_id] - log_mass)
    assert len(set(report.top_token_ids)) == min(request.params.num_logprobs or 0, VOCAB)
    expected = sorted((x - log_mass for x in logits), reverse=True)[: len(report.top_token_ids)]
    assert list(report.top_logprobs) == pytest.approx(expected)
    assert list(report.top_logprobs) == pytest.approx([logits[i] - log_mass for i in report.top_token_ids])


def test_certain_tokens_may_be_reported_instead_of_the_likeliest() -> None:
    logits = [3.0, 1.0, -2.0, 0.0]
    requests = [
        row(temperature=0.0, num_logprobs=2, logprob_token_ids=(2, 0)),
        row(temperature=0.0, num_logprobs=1),
        row(temperature=0.0, num_logprobs=0, logprob_token_ids=(3,), allowed_token_ids=(2,)),
    ]
    own, plain, edited = sample([logits] * 3, requests).logprobs
    log_mass = math.log(sum(map(math.exp, logits)))
    assert own is not None
    assert plain is not None
    assert edited is not None
    assert own.top_token_ids == (0, 2)
    assert list(own.top_logprobs) == pytest.approx([3.0 - log_mass, -2.0 - log_mass])
    assert plain.top_token_ids == (0,)
    assert (edited.token_id, edited.top_token_ids) == (2, (2, 3))
    assert list(edited.top_logprobs) == pytest.approx([-2.0 - log_mass, 0.0 - log_mass])


def test_shape_mismatch_is_named() -> None:
    with pytest.raises(ValueError, match=r"\(1, 3\).*2 rows"):
        Sampler(3).sample(np.zeros((1, 3)), [row(), row()])


def test_no_rows() -> None:
    assert Sampler(3).sample(np.zeros((0, 3)), []) == SampledTokens([], [])
