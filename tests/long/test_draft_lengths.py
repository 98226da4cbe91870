"""Adaptive draft lengths against fixed ones over a whole grid of load and acceptance."""

from __future__ import annotations

import pytest

from tests.long.test_speculation_adaptive import MODEL, NGRAM, compare

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("proposer", [NGRAM, MODEL], ids=["ngram", "model"])
@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("num_requests", [1, 4, 16, 60, 100])
def test_never_slower_than_off_and_as_fast_as_the_best_length(proposer, num_requests, acceptance):
    compare(proposer, num_requests, acceptance, num_steps=900 if num_requests < 10 else 500)
