"""Prompt lookup: what followed the same tokens earlier in the request is likely to follow again.

References
----------
Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference: Lossless Acceleration of
Large Language Models", 2023; Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
Applications", 2024 (drafts in proportion to the match).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.input_batch import InputBatch
from onbeat.engine.speculation.proposer import DraftRow, Proposer
from onbeat.engine.speculation.speculative_config import SpeculativeConfig

_TOKEN_BITS = 32
_DRAFTS_PER_MATCHED_TOKEN = 1.5
"""A longer match comes true for longer: after two tokens half of the first drafts are right, after ten nearly
all. Drafts in this proportion waste little on chance matches and cost long ones nothing."""


class NgramProposer(Proposer):
    """Copies from earlier in the same request: the longest match first, of equals the most recent.

    Parameters
    ----------
    config : lengths of what must have occurred before, and the most drafts.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._most = config.num_speculative_tokens
        self._histories: dict[int, _History] = {}

    def admit(self, batch: InputBatch, slot: int, num_computed_tokens: int) -> None:  # noqa: ARG002
        """Take in a request; it is read once it samples."""
        self._histories[slot] = _History(self._lengths)

    def release(self, slot: int) -> None:
        """Forget a request."""
        del self._histories[slot]

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:
        """Return what followed the last match of each row; nothing where there is none."""
        drafts = []
        for row in rows:
            history = self._histories[row.slot]
            if row.num_tokens > len(history.token_ids):
                history.read(batch.token_ids_SP[row.slot], row.num_tokens)
            drafts.append(history.continuation(min(row.num_drafts, history.num_likely)))
        return drafts

    def num_available(self, batch: InputBatch, slots: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        """Return how many drafts each match is good for."""
        most, histories, found = self._most, self._histories, []
        newest = batch.token_ids_SP[slots, np.subtract(num_tokens, 1)].tolist()
        for slot, num, token_id in zip(slots, num_tokens, newest, strict=True):
            history = histories[slot]
            num_unread = num - len(history.token_ids)
            if num_unread == 1:
                history.add(token_id)
            elif num_unread:
                history.read(batch.token_ids_SP[slot], num)
            num_likely = history.num_likely
            found.append(num_likely if num_likely < most else most)
        return found

    def close(self) -> None:
        """Let go of nothing that does not go with the object."""


class _History:
    """A request's tokens, where each n-gram of them last occurred, and where to copy from.

    A new token takes one entry for each length of n-grams, whatever the context. Tokens are read when drafts
    are asked for, which may be long after they came.

    Parameters
    ----------
    lengths : of the n-grams, longest first.
    """

    __slots__ = ("_indices", "_match_length", "_source", "_suffix", "_suffix_mask", "num_likely", "token_ids")

    def __init__(self, lengths: range) -> None:
        self.token_ids: list[int] = []
        self.num_likely = 0
        """Drafts that are worth proposing."""
        self._source: int | None = None
        """Position that is to be copied next; None where the last tokens are new."""
        self._match_length = 0
        """How many tokens before the source are known to equal the last ones; 0 where there is none."""
        self._indices: list[tuple[int, int, dict[int, int]]] = [
            (length, (1 << length * _TOKEN_BITS) - 1, {}) for length in lengths
        ]
        """By length: what cuts an n-gram from `_suffix`, and n-grams to the positions after them."""
        self._suffix = 0
        """The last tokens, each one more than its id, in one number; 0 stands before the first."""
        self._suffix_mask = self._indices[0][1]

    def read(self, token_ids_P: NDArray[np.int32], num_tokens: int) -> None:  # noqa: N803
        """Add the tokens up to `num_tokens` that are not known yet, and find where to copy from."""
        *others, last = token_ids_P[len(self.token_ids) : num_tokens].tolist()
        if others and self.continuation(len(others)) == others:
            assert self._source is not None
            self._source += len(others)
            self._match_length += len(others)
        elif others:
            self._source, self._match_length = None, 0
        suffix, suffix_mask, indices = self._suffix, self._suffix_mask, self._indices
        for position, token_id in enumerate(others, len(self.token_ids) + 1):
            suffix = (suffix << _TOKEN_BITS | token_id + 1) & suffix_mask
            for _, mask, position_after in indices:
                position_after[suffix & mask] = position
        self._suffix = suffix
        self.token_ids += others
        self.add(last)

    def add(self, token_id: int) -> None:
        """Add a token and find where to copy from."""
        token_ids, source = self.token_ids, self._source
        match_length = 0
        if source is not None and token_ids[source] == token_id:
            # What was before tells this place from others with the same n-gram.
            source += 1
            match_length = self._match_length + 1
        token_ids.append(token_id)
        position = len(token_ids)
        suffix = self._suffix = (self._suffix << _TOKEN_BITS | token_id + 1) & self._suffix_mask
        for length, mask, position_after in self._indices:
            key = suffix & mask
            if length > match_length and (before := position_after.get(key)) is not None:
                source, match_length = before, length
            position_after[key] = position
        self._source = source if match_length else None
        self._match_length = match_length
        self.num_likely = int(match_length * _DRAFTS_PER_MATCHED_TOKEN)

    def continuation(self, num: int) -> list[int]:
        """Return what follows the match, as if the tokens since then came again and again."""
        if self._source is None:
            return []
        copied = self.token_ids[self._source : self._source + num]
        period = len(copied)
        while len(copied) < num:
            copied += copied[: min(period, num - len(copied))]
        return copied
