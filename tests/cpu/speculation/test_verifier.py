"""Which drafts are kept, on logits made up by the test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import SamplingParams
from onbeat.engine.draw import Logits
from onbeat.engine.forward import StepLogits
from onbeat.engine.input_batch import wave_order
from onbeat.engine.sampled import BestTokens
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.speculation.verifier import VerifiedTokens, verify

VOCAB = 11
SAMPLER = Sampler(VOCAB)


def make_row(**sampling: float) -> SamplingRow:
    return SamplingRow(SamplingParams(**({"temperature": 0.0} | sampling)), (1, 2), [3])  # type: ignore[arg-type]


def logits_of(best: Sequence[Sequence[int]], *, nan_at: tuple[int, int] | None = None) -> Logits:
    """Logits whose largest are these, by row and position; handed over in waves."""
    waves, owners = wave_order(np.array([len(ids) - 1 for ids in best]))
    values = np.zeros((len(waves), VOCAB), np.float32)
    for place, (wave, row) in enumerate(zip(waves.tolist(), owners.tolist(), strict=True)):
        values[place, best[row][wave]] = 5.0
        if (row, wave) == nan_at:
            values[place, 0] = np.nan
    return values


def run(
    rows: list[SamplingRow],
    best: Sequence[Sequence[int]],
    drafts: Sequence[Sequence[int]],
    *,
    way: str,
    nan_at: tuple[int, int] | None = None,
) -> VerifiedTokens:
    """Verify `best` against drafts, one way or another."""
    values = logits_of(best, nan_at=nan_at)
    found = BestTokens(values.argmax(axis=-1), values.max(axis=-1))
    logits = {
        "native": StepLogits(None, found),
        "torch": StepLogits(values),
        "waves": StepLogits(values),
        "waves-best": StepLogits(values, found),
    }[way]
    return verify(SAMPLER, logits, rows, drafts, wants_logits=way.startswith("waves"))


WAYS = ["native", "torch", "waves", "waves-best"]


def test_tokens_come_wave_after_wave() -> None:
    waves, rows = wave_order(np.array([2, 0, 1]))
    assert waves.tolist() == [0, 0, 0, 1, 1, 2]
    assert rows.tolist() == [0, 1, 2, 0, 2, 0]


@pytest.mark.parametrize("way", WAYS)
def test_drafts_count_up_to_the_first_that_is_wrong(way: str) -> None:
    best = [[4, 5, 6, 7], [4, 5, 6], [8], [1, 2], [1, 2]]
    drafts = [[4, 5, 9], [4, 5], [], [1], [3]]
    rows = [make_row() for _ in best]
    verified = run(rows, best, drafts, way=way)
    assert verified.token_ids == [[4, 5, 6], [4, 5, 6], [8], [1, 2], [1]]
    assert verified.errors == {}
    assert [row.output_token_ids for row in rows] == [[3, *ids] for ids in verified.token_ids]


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
def test_any_drafts(way: str, data: st.DataObject) -> None:
    token = st.integers(0, 2)  # few, so that drafts are right now and then
    drafts = data.draw(st.lists(st.lists(token, max_size=4), min_size=1, max_size=5))
    best = [data.draw(st.lists(token, min_size=len(ids) + 1, max_size=len(ids) + 1)) for ids in drafts]
    rows = [make_row() for _ in drafts]
    verified = run(rows, best, drafts, way=way)
    for ids, row_best, row_drafts in zip(verified.token_ids, best, drafts, strict=True):
        num_accepted = len(ids) - 1
        assert ids == row_best[: num_accepted + 1]
        assert row_drafts[:num_accepted] == row_best[:num_accepted]
        assert num_accepted == len(row_drafts) or row_drafts[num_accepted] != row_best[num_accepted]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("wave", "fails"), [(0, True), (1, True), (2, False)])
def test_a_row_fails_where_it_gets_to_logits_that_are_none(way: str, wave: int, fails: bool) -> None:
    best, drafts = [[4, 5, 6], [1, 2, 3]], [[4, 9], [1, 2]]
    rows = [make_row(), make_row()]
    verified = run(rows, best, drafts, way=way, nan_at=(0, wave))
    assert list(verified.errors) == ([0] if fails else [])
    assert verified.token_ids[0] == ([4] * wave + [0] if fails else [4, 5])
    assert verified.token_ids[1] == [1, 2, 3]
    assert rows[0].output_token_ids == [3, *verified.token_ids[0]]
    if fails:
        assert "invalid logits" in verified.errors[0]


def test_penalties_see_the_drafts_before() -> None:
    """A token that was just accepted is held against its repetition at the next position."""
    rows = [make_row(frequency_penalty=2.0, presence_penalty=2.0)]
    values = np.zeros((3, VOCAB), np.float32)
    values[:, 4], values[:, 5] = 5.0, 4.0
    verified = verify(SAMPLER, StepLogits(values), rows, [[4, 5]], wants_logits=True)
    assert verified.token_ids == [[4, 5, 4]]


def test_log_probabilities_come_for_each_token_of_the_rows_that_ask() -> None:
    rows = [make_row(num_logprobs=1), make_row()]
    verified = run(rows, [[4, 5, 6], [1, 2]], [[4, 9], [1]], way="waves")
    assert verified.logprobs[1] is None
    assert verified.logprobs[0] is not None
    assert [entry.token_id for entry in verified.logprobs[0]] == verified.token_ids[0] == [4, 5]
