"""Rows under a grammar are a term of a step's time, learnt apart from all else."""

from __future__ import annotations

import pytest

from onbeat.core.step import BatchShape
from onbeat.perfmodel.predictor import GUIDED_ROW_SECONDS, Predictor


def shape(num_guided: int, num_rows: int = 32) -> BatchShape:
    made = BatchShape.of_decodes(num_rows, 1000)
    made.num_guided_rows = num_guided
    return made


def test_the_term_is_added_to_what_the_model_says() -> None:
    model = Predictor(lambda _: 0.01)
    assert model.step_time(shape(0)) == 0.01
    assert model.step_time(shape(32)) == pytest.approx(0.01 + 32 * GUIDED_ROW_SECONDS)
    assert list(model.step_times(shape(2), [10, 20])) == [pytest.approx(0.01 + 2 * GUIDED_ROW_SECONDS)] * 2


def test_it_is_learnt_and_leaves_the_rest_alone() -> None:
    model = Predictor(lambda _: 0.01).with_learning()
    for _ in range(2000):
        model.observe_guides(16, 16 * 2e-4)
        model.observe(shape(16), 0.01 + 16 * 2e-4)
    assert model.step_time(shape(16)) == pytest.approx(0.01 + 16 * 2e-4, rel=0.01)
    assert model.step_time(shape(0)) == pytest.approx(0.01, rel=0.01)


def test_a_chunk_leaves_room_for_it() -> None:
    model = Predictor(lambda each: 1e-3 + 1e-5 * each.num_new_tokens)
    free = model.max_chunk_tokens(shape(0), 0, 0.01)
    less = free - model.max_chunk_tokens(shape(32), 0, 0.01)
    assert less == pytest.approx(32 * GUIDED_ROW_SECONDS / 1e-5, abs=1)
