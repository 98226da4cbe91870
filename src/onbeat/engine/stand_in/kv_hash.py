"""A KV cache that holds, for each token, the token and a hash of all before it; and what follows from it.

Legend: T tokens of the step, R rows, B blocks, S tokens of a block, N blocks that the rows read, P tokens
whose vectors are wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.attention.base import AttentionBatch, IntArray

_Words = NDArray[np.uint64]

TOKEN_BITS = 24
"""Of an entry's 64 bits, those of the token id; the others are the hash."""
_HASH_MASK = np.uint64((1 << (64 - TOKEN_BITS)) - 1)
_SHIFT = np.uint64(TOKEN_BITS)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1
_OWN_NUMBERS = 64
"""Of a token's vector: those of two tokens are nearly orthogonal, and more would take a stand-in's time."""


def mix(words: _Words) -> _Words:
    """Return words whose every bit depends on all bits of those given (the finaliser of SplitMix64)."""
    words = words ^ (words >> np.uint64(30))
    words = words * np.uint64(0xBF58476D1CE4E5B9)
    words = words ^ (words >> np.uint64(27))
    words = words * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def mix_number(number: int) -> int:
    """Return what `mix` does to a single word."""
    number &= _WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _WORD
    return number ^ (number >> 31)


class HashCache:
    """The cache in blocks, as an engine that computes has it.

    A token's entry is made of its id, its position and the entry before it, which is read from the cache as
    attention would read it. What follows a request's tokens is made of every entry in its blocks.

    Parameters
    ----------
    num_blocks, block_size : of the cache.

    Attributes
    ----------
    entries_BS : the cache.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.entries_BS: _Words = np.zeros((num_blocks, block_size), np.uint64)
        self._block_size = block_size
        weights = mix(np.arange(1, block_size + 1, dtype=np.uint64) * _GOLDEN)
        self._weights_S: _Words = weights | np.uint64(1)  # odd, so that no difference is lost

    def store(self, token_ids_T: IntArray, positions_T: IntArray, batch: AttentionBatch) -> None:
        """Write the entries of a step's tokens."""
        query_lens_R = batch.query_lens_R
        ends_R = np.cumsum(query_lens_R)
        firsts_R = ends_R - query_lens_R
        tokens_T = token_ids_T.astype(np.uint64)
        places_T = positions_T.astype(np.uint64) << np.uint64(32)
        sums_T = np.cumsum(mix((tokens_T | places_T) + _GOLDEN), dtype=np.uint64)
        sums_before_R = np.concatenate([np.zeros(1, np.uint64), sums_T])[firsts_R]
        bases_R = self._hashes_before(positions_T[firsts_R], batch) - sums_before_R
        hashes_T = (sums_T + np.repeat(bases_R, query_lens_R)) & _HASH_MASK
        self.entries_BS.reshape(-1)[batch.slot_mapping_T] = (hashes_T << _SHIFT) | tokens_T

    def numbers(self, slots_R: IntArray, num_tokens_R: IntArray, block_tables_SB: NDArray[Any]) -> _Words:
        """Return a number for each row, made of all entries of its first tokens and of how many there are.

        Parameters
        ----------
        slots_R : each row's line of the block tables.
        num_tokens_R : its tokens, at least one.
        """
        size = self._block_size
        num_blocks_R = -(-num_tokens_R // size)
        ends_R = np.cumsum(num_blocks_R)
        firsts_R = ends_R - num_blocks_R
        places_N = np.arange(ends_R[-1]) - np.repeat(firsts_R, num_blocks_R)
        entries_NS = self.entries_BS[block_tables_SB[np.repeat(slots_R, num_blocks_R), places_N]]
        num_last_R = num_tokens_R - (num_blocks_R - 1) * size
        entries_NS[ends_R - 1] *= np.arange(size) < num_last_R[:, None]
        digests_N = mix(entries_NS @ self._weights_S + places_N.astype(np.uint64) * _GOLDEN)
        return mix(np.add.reduceat(digests_N, firsts_R) + num_tokens_R.astype(np.uint64))

    def vectors(self, slots_P: IntArray, width: int) -> NDArray[np.float32]:
        """Return a vector for each token, made of its entry: of the token and all before it, [P, width].

        Parameters
        ----------
        slots_P : where the tokens' entries are.
        width : numbers of a vector, of which the first `_OWN_NUMBERS` are repeated.
        """
        entries_P1 = self.entries_BS.reshape(-1)[slots_P, None]
        places = np.arange(_OWN_NUMBERS, dtype=np.uint64) * _GOLDEN
        numbers = mix(entries_P1 + places).astype(np.int64).astype(np.float32) * np.float32(2.0**-63)
        return numbers[:, np.arange(width) % _OWN_NUMBERS]

    def _hashes_before(self, starts_R: IntArray, batch: AttentionBatch) -> _Words:
        """Return the hash of the token before each row's first one; 0 where there is none."""
        before_R = np.maximum(starts_R - 1, 0)
        blocks_R = batch.block_tables_SB[batch.slots_R, before_R // self._block_size]
        entries_R: _Words = self.entries_BS[blocks_R, before_R % self._block_size]
        return np.where(starts_R > 0, entries_R >> _SHIFT, np.uint64(0))
