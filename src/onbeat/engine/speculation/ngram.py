"""Prompt lookup: what followed the same tokens earlier in the request is likely to follow again.

References
----------
Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference: Lossless Acceleration of
Large Language Models", 2023.
"""

from __future__ import annotations

from onbeat.engine.input_batch import InputBatch
from onbeat.engine.speculation.config import SpeculativeConfig
from onbeat.engine.speculation.proposer import DraftRow

_TOKEN_BITS = 32


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
        return [self._history(batch, row.slot, row.num_tokens).continuation(row.num_drafts) for row in rows]

    def num_available(self, batch: InputBatch, slot: int, num_tokens: int) -> int:
        """Return how many drafts there would be: all that may be asked for, or none."""
        return 0 if self._history(batch, slot, num_tokens).source is None else self._most

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

    Every token is indexed once for each length: nothing here grows with the context but memory, by some
    hundred bytes per token and length.
    """

    __slots__ = ("_lengths", "_match_length", "_position_after", "source", "token_ids")

    def __init__(self, lengths: range) -> None:
        self.token_ids: list[int] = []
        self.source: int | None = None
        """Position that is to be copied next; None where the last tokens are new."""
        self._lengths = lengths
        """Longest first."""
        self._position_after: dict[int, dict[int, int]] = {length: {} for length in lengths}
        """By length: an n-gram, its tokens packed in one number, to the position after it."""
        self._match_length = 0
        """How many tokens before `source` are the request's last ones, as far as was looked."""

    def extend(self, token_ids: list[int]) -> None:
        """Add new tokens and find where to copy from."""
        self._follow(token_ids)
        self._index(token_ids)
        self._look_up()

    def continuation(self, num: int) -> list[int]:
        """Return what follows the match, as if the tokens since then came again and again."""
        if self.source is None:
            return []
        copied = self.token_ids[self.source : self.source + num]
        period = len(copied)
        while len(copied) < num:
            copied += copied[: min(period, num - len(copied))]
        return copied

    def _follow(self, token_ids: list[int]) -> None:
        """Move on in the source as long as it says what really came."""
        if self.source is not None and self.continuation(len(token_ids)) == token_ids:
            self.source += len(token_ids)
            self._match_length += len(token_ids)
        else:
            self.source, self._match_length = None, 0

    def _index(self, token_ids: list[int]) -> None:
        """Note what every n-gram is followed by that now has a follower."""
        known = self.token_ids
        num_before = len(known)
        known += token_ids
        for length, position_after in self._position_after.items():
            first = max(num_before - length, 0)
            keys = self._pack(known[first:-1], length)
            position_after.update(zip(keys, range(first + length, len(known)), strict=True))

    def _look_up(self) -> None:
        """Look for a longer match than the one that is followed."""
        known = self.token_ids
        for length in self._lengths:
            if length <= self._match_length:
                return
            if length < len(known):
                (key,) = self._pack(known[-length:], length)
                position = self._position_after[length].get(key)
                if position is not None:
                    self.source, self._match_length = position, length
                    return

    @staticmethod
    def _pack(token_ids: list[int], length: int) -> list[int]:
        """Return one number for each n-gram of some tokens."""
        keys = token_ids[: max(len(token_ids) - length + 1, 0)]
        for offset in range(1, length):
            keys = [
                (key << _TOKEN_BITS) | token_id
                for key, token_id in zip(keys, token_ids[offset:], strict=False)
            ]
        return keys
