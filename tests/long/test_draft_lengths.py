"""Adaptive draft lengths against fixed ones over a whole grid of load and acceptance."""

from __future__ import annotations

import pytest

from tests.pure.scheduler.test_speculation_adaptive import MODEL, NGRAM, compare

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("proposer", [NGRAM, MODEL], ids=["ngram", "model"])
@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("num_requests", [1, 4, 16, 60, 100])
def test_never_slower_than_off_and_as_fast_as_the_best_length(proposer, num_requests, acceptance):
    # With a hundred requests drafts hardly pay at the acceptance that is believed at first, and it takes
    # hundreds of steps until probes have shown that it is higher. Nothing may be lost until then.
    num_steps, least = (900, 0.95) if num_requests < 10 else (500, 0.95 if num_requests < 100 else 0.9)
    compare(proposer, num_requests, acceptance, num_steps=num_steps, least=least)
