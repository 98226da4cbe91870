"""Goodput by the published formulas, and the draft lengths that they ask for."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.scheduler.replica.speculation.drafting import expected_tokens

CONTEXT = 1024
MOST = 10
BATCHES = (1, 4, 16, 64, 128, 256)
ALPHAS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)

StepMs = Callable[[int, int], float]
"""Milliseconds of a step of (sequences, drafts of each)."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    shared = os.environ.get("ONBEAT_SHARED")
    if not shared:
        pytest.skip("ONBEAT_SHARED names no folder with the published coefficients")
    path = Path(shared) / "data" / "profiles" / "turbospec" / "latency_coefficients.csv"
    if not path.exists():
        pytest.skip("the published coefficients are not there")
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["config"] == "llama-8b"]


def linear_ms(row: dict[str, str]) -> StepMs:
    """TurboSpec's regression: a term each for context, new tokens, sequences, drafts of each, and a fixed."""
    columns = (
        "c_kv_ms_per_ctx_token",
        "c_compute_ms_per_batched_token",
        "c_batch_ms_per_seq",
        "c_num_spec_ms_per_draft_token",
        "c_fixed_ms",
    )
    context, token, sequence, draft, fixed = (float(row[column]) for column in columns)
    enable = float(row["c_enable_spec_ms"])

    def ms(num_rows: int, k: int) -> float:
        num_new = num_rows * (k + 1)
        total = context * CONTEXT * num_rows + token * num_new + sequence * num_rows + draft * k + fixed
        return total + enable * (k > 0)

    return ms


def step_ms(rows: list[dict[str, str]], method: str) -> StepMs:
    row = {(row["role"], row["method"]): row for row in rows}
    target, share = linear_ms(row["target", "any"]), float(row["overhead", "any"]["fraction_of_target_time"])
    proposer = row["draft", method]
    fraction = proposer["fraction_of_target_time"]
    draft = linear_ms(proposer) if not fraction else lambda n, k: float(fraction) * target(n, k)

    def ms(num_rows: int, k: int) -> float:
        verify = target(num_rows, k)
        return verify + (draft(num_rows, k) + share * verify) * (k > 0)

    return ms


def best_k(ms: StepMs, alpha: float, num_rows: int) -> int:
    """Return the drafts of each row with the largest goodput, the fewest of equals."""
    return max(range(MOST + 1), key=lambda k: (expected_tokens(alpha, k) * num_rows / ms(num_rows, k), -k))


def test_expected_tokens_as_published():
    assert expected_tokens(0.7, 3) == pytest.approx(2.533)


@given(st.floats(0, 1), st.integers(0, 16))
def test_expected_tokens_is_the_sum_of_powers(alpha, k):
    assert expected_tokens(alpha, k) == pytest.approx(sum(alpha**j for j in range(k + 1)))


def test_expected_tokens_at_its_limits():
    assert [expected_tokens(alpha, 0) for alpha in (0.0, 0.4, 1.0)] == [1, 1, 1]
    assert [expected_tokens(1.0, k) for k in (0, 1, 5)] == [1, 2, 6]
    assert [expected_tokens(0.0, k) for k in (0, 1, 5)] == [1, 1, 1]


@pytest.mark.parametrize(("alpha", "expected"), [(0.5, [3, 3, 2, 2, 1, 0]), (0.7, [5, 5, 4, 3, 2, 2])])
def test_best_lengths_with_published_coefficients(rows, alpha, expected):
    ms = step_ms(rows, "eagle")
    assert [best_k(ms, alpha, num_rows) for num_rows in BATCHES] == expected


def test_drafts_get_fewer_with_load_and_more_with_acceptance(rows):
    ms = step_ms(rows, "ngram")
    table = [[best_k(ms, alpha, num_rows) for num_rows in range(1, 257)] for alpha in ALPHAS]
    for lengths in table:
        assert lengths == sorted(lengths, reverse=True)
    for by_alpha in zip(*table, strict=True):
        assert list(by_alpha) == sorted(by_alpha)
    assert table[0][-1] == 0
    assert table[-1][0] == MOST
