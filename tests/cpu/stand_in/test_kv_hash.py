"""What follows a request's tokens depends on every entry in its blocks, and on nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.engine.backends.stand_in import HashCache
from onbeat.engine.input_batch import AttentionBatch
from onbeat.engine.random_stream import mix, mix_words
from tests.examples import examples

SIZE = 4
NUM_BLOCKS = 64
TABLE = (7, 3, 60, 11, 0, 25, 26, 9)
"""Blocks of a request, in its order."""


def store(cache: HashCache, token_ids: list[int], start: int, stop: int, table=TABLE) -> None:
    """Write some tokens of one request."""
    positions = np.arange(start, stop)
    tables = np.array([table], np.int32)
    slots = tables[0, positions // SIZE].astype(np.int64) * SIZE + positions % SIZE
    batch = AttentionBatch(
        query_lens_R=np.array([stop - start]),
        context_lens_R=np.array([stop]),
        slots_R=np.array([0]),
        block_tables_SB=tables,
        slot_mapping_T=slots,
    )
    cache.store(np.array(token_ids[start:stop], np.int64), positions, batch)


def number(cache: HashCache, num_tokens: int, table=TABLE) -> int:
    tables = np.array([table], np.int32)
    return int(cache.numbers(np.array([0]), np.array([num_tokens]), tables)[0])


def filled(token_ids: list[int], cuts: tuple[int, ...] = (), table=TABLE) -> HashCache:
    """Return a cache with a request's tokens, written in chunks."""
    cache = HashCache(NUM_BLOCKS, SIZE)
    edges = [0, *cuts, len(token_ids)]
    for start, stop in itertools.pairwise(edges):
        store(cache, token_ids, start, stop, table)
    return cache


tokens = st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=32)


@examples(50)
@given(tokens, st.sets(st.integers(1, 31)))
def test_chunks_and_the_place_of_blocks_change_nothing(token_ids, cuts):
    cuts = tuple(sorted(cut for cut in cuts if cut < len(token_ids)))
    expected = number(filled(token_ids), len(token_ids))
    assert number(filled(token_ids, cuts), len(token_ids)) == expected
    elsewhere = tuple(range(8))
    assert number(filled(token_ids, cuts, elsewhere), len(token_ids), elsewhere) == expected


@examples(50)
@given(tokens, st.integers(0, 31), st.integers(0, 2**24 - 1), st.data())
def test_each_token_counts(token_ids, place, other, data):
    place %= len(token_ids)
    changed = [*token_ids]
    changed[place] = other
    same = changed == token_ids
    assert (number(filled(token_ids), len(token_ids)) == number(filled(changed), len(token_ids))) == same


@examples(50)
@given(tokens, st.integers(0, 31), st.integers(1, 2**64 - 1))
def test_each_entry_counts_however_it_was_changed(token_ids, place, difference):
    place %= len(token_ids)
    cache = filled(token_ids)
    before = number(cache, len(token_ids))
    cache.entries_BS[TABLE[place // SIZE], place % SIZE] ^= np.uint64(difference)
    assert number(cache, len(token_ids)) != before


def test_what_lies_behind_the_tokens_does_not_count():
    cache = filled(list(range(10)))
    before = number(cache, 10)
    cache.entries_BS[TABLE[2], 2:] = 12345
    cache.entries_BS[TABLE[3]] = 12345
    assert number(cache, 10) == before


@pytest.mark.parametrize(
    "table",
    [(3, 7, *TABLE[2:]), (7, 7, *TABLE[2:]), (7, 3, 60, 60, *TABLE[4:]), (7, 60, 11, *TABLE[3:])],
    ids=["swapped", "first doubled", "last doubled", "one lost"],
)
def test_blocks_count_by_their_place(table):
    cache = filled(list(range(16)))
    assert number(cache, 16, table) != number(cache, 16)


def test_a_token_goes_on_from_the_entry_before_it():
    """A wrong entry is in all that come later, even if it is mended."""
    right, wrong = (filled(list(range(8))) for _ in range(2))
    entry = wrong.entries_BS[TABLE[1], 3]
    wrong.entries_BS[TABLE[1], 3] ^= np.uint64(1 << 40)
    for cache in (right, wrong):
        store(cache, list(range(9)), 8, 9)
    wrong.entries_BS[TABLE[1], 3] = entry
    assert number(right, 9) != number(wrong, 9)


def test_rows_do_not_meet():
    alone, both = HashCache(NUM_BLOCKS, SIZE), HashCache(NUM_BLOCKS, SIZE)
    tables = np.array([[1, 2, 3, 4], [9, 8, 7, 6]], np.int32)
    lens = np.array([5, 11])
    positions = np.concatenate([np.arange(n) for n in lens])
    rows = np.repeat([0, 1], lens)
    batch = AttentionBatch(
        query_lens_R=lens,
        context_lens_R=lens,
        slots_R=np.array([0, 1]),
        block_tables_SB=tables,
        slot_mapping_T=tables[rows, positions // SIZE].astype(np.int64) * SIZE + positions % SIZE,
    )
    both.store(positions + 100 * rows, positions, batch)
    numbers = both.numbers(np.array([0, 1]), lens, tables)
    store(alone, list(range(5)), 0, 5, (1, 2, 3, 4))
    store(alone, [100 + p for p in range(11)], 0, 11, (9, 8, 7, 6))
    assert numbers.tolist() == [number(alone, 5, (1, 2, 3, 4)), number(alone, 11, (9, 8, 7, 6))]


def test_one_word_is_mixed_as_many_are():
    words = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    assert mix_words(words).tolist() == [mix(word) for word in words.tolist()]
