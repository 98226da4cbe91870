"""Prompt lookup: what followed the same tokens earlier in the request is likely to follow again.

References
----------
Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference: Lossless Acceleration of
Large Language Models", 2023; Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
Applications", 2024 (drafts in proportion to the match).
"""

from __future__ import annotations

from onbeat.engine.input_batch import InputBatch
from onbeat.engine.speculation.config import SpeculativeConfig
from onbeat.engine.speculation.proposer import DraftRow

_TOKEN_BITS = 32
_DRAFTS_PER_MATCHED_TOKEN = 1.5
"""A longer match comes true for longer: after two tokens half of the first drafts are right, after ten nearly
all. Drafts in this proportion waste little on chance matches and cost long ones nothing."""


class NgramProposer:
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
            history = self._history(batch, row.slot, row.num_tokens)
            drafts.append(history.continuation(min(row.num_drafts, history.num_likely)))
        return drafts

    def num_available(self, batch: InputBatch, slot: int, num_tokens: int) -> int:
        """Return how many drafts the match is good for."""
        return min(self._most, self._history(batch, slot, num_tokens).num_likely)

    def touch_ahead(self) -> bool:
        """Return False: tokens take memory as they come."""
        return False

    def close(self) -> None:
        """Let go of nothing that does not go with the object."""

    def _history(self, batch: InputBatch, slot: int, num_tokens: int) -> _History:
        history = self._histories[slot]
        num_read = len(history.token_ids)
        if num_tokens > num_read:
            history.extend(batch.token_ids_SP[slot, num_read:num_tokens].tolist())
        return history


class _History:
    """A request's tokens, where each n-gram of them last occurred, and where to copy from.

    A new token takes one entry for each length of n-grams, whatever the context.

    Parameters
    ----------
    lengths : of the n-grams, longest first.
    """

    __slots__ = ("_indices", "_match_length", "_source", "_suffix", "_suffix_mask", "token_ids")

    def __init__(self, lengths: range) -> None:
        self.token_ids: list[int] = []
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

    @property
    def num_likely(self) -> int:
        """Drafts that are worth proposing."""
        return int(self._match_length * _DRAFTS_PER_MATCHED_TOKEN)

    def extend(self, token_ids: list[int]) -> None:
        """Add new tokens and find where to copy from."""
        if self._source is not None and self.continuation(len(token_ids)) == token_ids:
            # It said what really came: what was before tells this place from others with the same n-gram.
            self._source += len(token_ids)
            self._match_length += len(token_ids)
        else:
            self._source, self._match_length = None, 0
        self._index(token_ids)
        self._look_up()

    def continuation(self, num: int) -> list[int]:
        """Return what follows the match, as if the tokens since then came again and again."""
        if self._source is None:
            return []
        copied = self.token_ids[self._source : self._source + num]
        period = len(copied)
        while len(copied) < num:
            copied += copied[: min(period, num - len(copied))]
        return copied

    def _index(self, token_ids: list[int]) -> None:
        """Append tokens, each of which follows the n-grams before it."""
        suffix, suffix_mask, indices = self._suffix, self._suffix_mask, self._indices
        for position, token_id in enumerate(token_ids, len(self.token_ids)):
            for _, mask, position_after in indices:
                position_after[suffix & mask] = position
            suffix = (suffix << _TOKEN_BITS | token_id + 1) & suffix_mask
        self._suffix = suffix
        self.token_ids += token_ids

    def _look_up(self) -> None:
        """Look for a longer match than the one that is followed."""
        for length, mask, position_after in self._indices:
            if length <= self._match_length:
                return
            position = position_after.get(self._suffix & mask)
            if position is not None:
                self._source, self._match_length = position, length
                return
