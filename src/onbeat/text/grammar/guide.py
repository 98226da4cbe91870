"""Where an answer stands in its grammar: which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from onbeat.core.errors import OnbeatError

TokenIds = NDArray[np.int64]
NO_TOKENS: TokenIds = np.empty(0, np.int64)
_SPECIAL = b"\xff"
"""Begins a special token in the library's texts; no UTF-8 has it."""


class GrammarTooComplex(OnbeatError):
    """A grammar that compiled has reached a limit of the library in the middle of an answer."""


@dataclass(frozen=True)
class TokenRules:
    """What guides must know of a model's tokens."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    """Never allowed by a grammar itself."""
    encode: Callable[[str], list[int]]
    """Spells text that must come; it needs no start token."""

    @cached_property
    def eos_array(self) -> TokenIds:
        """The same as an array."""
        return np.array(sorted(self.eos_token_ids), np.int64)


class Guide:
    """A grammar and the tokens so far; one a request.

    The model's end-of-sequence tokens are no part of any grammar: where an answer may end, `may_end` says so.

    Parameters
    ----------
    matcher : of the library; its methods do not raise, so it is asked for its error after each.
    tokens : of the model.

    Raises
    ------
    GrammarTooComplex : any method, once a limit was reached. The guide is of no use from then on.
    """

    def __init__(self, matcher: LLMatcher, tokens: TokenRules) -> None:
        self._matcher = matcher
        self._tokens = tokens

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return self._tokens.vocab_size

    def copy(self) -> Guide:
        """Return one that stands at the same place and goes on by itself."""
        return Guide(self._matcher.deep_copy(), self._tokens)

    def accepts(self, token_id: int) -> bool:
        """Return whether a token may come next; if it may, it has come."""
        if token_id in self._tokens.eos_token_ids:
            return False
        if self._matcher.try_consume_tokens([token_id]):
            return True
        self._check()
        return False

    def consume(self, token_ids: Sequence[int]) -> int:
        """Take tokens that have come; return how many the grammar allows."""
        num_taken = self._matcher.try_consume_tokens(list(token_ids))
        self._check()
        return num_taken

    def num_drafts(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens may come next without ending the grammar; none of them has come."""
        if not token_ids:
            return 0
        wanted = [*token_ids]
        for index, token_id in enumerate(wanted):
            if token_id in self._tokens.eos_token_ids:
                del wanted[index:]
                break
        num_valid = self._matcher.try_consume_tokens(wanted) if wanted else 0
        ends = self.is_complete
        if num_valid:
            self._matcher.rollback(num_valid)
        self._check()
        return num_valid - ends

    def forced(self, most: int) -> list[int]:
        """Return tokens that spell the text that must come next, at most so many; others may spell it too.

        The last token is left out: it may well be the beginning of a longer one.
        """
        data = self._matcher.compute_ff_bytes()
        self._check()
        text = data.partition(_SPECIAL)[0].decode(errors="ignore")
        return self._tokens.encode(text)[:-1][:most] if text else []

    def allowed(self, ends: TokenIds = NO_TOKENS) -> TokenIds:
        """Return all tokens that may come next, and those that may end it, in ascending order."""
        num_tokens = self._tokens.vocab_size
        words = np.zeros(-(-num_tokens // 32), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        bits[self._tokens.eos_array] = 0
        bits[ends] = 1
        return np.flatnonzero(bits[:num_tokens].view(np.bool_))  # which it finds twenty times as fast

    @property
    def may_end(self) -> bool:
        """Whether what has come matches the grammar."""
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarTooComplex(in_words(self._matcher.get_error()))


def in_words(message: str) -> str:
    """Return what the library says, without the grammar that it may show below."""
    first, *others = message.strip().split("\n")
    cause = next((line for line in others if line.startswith("error: ")), "") if first.endswith(":") else ""
    return " ".join((first[:300], cause.removeprefix("error: ")[:300])).strip()
