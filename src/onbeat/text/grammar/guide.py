"""Where an answer stands in its grammar: which tokens may come next.

Legend: G masks, W words of 32 tokens each.
"""

# ruff: noqa: N803, N806 -- tensor names carry shape suffixes

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from onbeat.core.errors import OnbeatError

TokenIds = NDArray[np.int64]
_WORD_BITS = 32
_LEAST_AT_ONCE = 8
"""Masks that threads find, which takes as long to begin as a few masks take."""
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
    num_threads: int = 1
    """That find masks at once."""

    @cached_property
    def num_words(self) -> int:
        """Of a mask, which has one bit for each token."""
        return -(-self.vocab_size // _WORD_BITS)

    @cached_property
    def _kept_bits(self) -> tuple[tuple[int, np.uint32], ...]:
        """Words of which some bits may not be set, and the others."""
        banned = (*self.eos_token_ids, *range(self.vocab_size, self.num_words * _WORD_BITS))
        lost: Counter[int] = Counter()
        for token_id in banned:
            lost[token_id // _WORD_BITS] += 1 << token_id % _WORD_BITS
        return tuple((word, ~np.uint32(bits)) for word, bits in lost.items())

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.num_threads, "onbeat-masks")

    def for_each(self, work: Callable[[int, int], None], items: Sequence[tuple[int, int]]) -> None:
        """Do work for each of some items, which have those of one lexer next to one another, and wait."""

        def part(start: int) -> None:
            for item in items[start : start + size]:
                work(*item)

        size = -(-len(items) // self.num_threads)
        if self.num_threads == 1 or len(items) < _LEAST_AT_ONCE:
            size = len(items)
            part(0)
        else:
            list(self._threads.map(part, range(0, len(items), size)))

    def clear_ends(self, words_GW: NDArray[np.uint32]) -> None:
        """Take out of masks what a grammar itself never allows: tokens that end, and those that are none."""
        for word, kept in self._kept_bits:
            words_GW[:, word] &= kept


def ids_in(words_W: NDArray[np.uint32]) -> TokenIds:
    """Return the tokens of a mask, in ascending order."""
    # Elements of a bool array are found many times as fast as those of others.
    (places,) = (words_W != 0).nonzero()
    if 2 * len(places) > len(words_W):
        return np.unpackbits(words_W.view(np.uint8), bitorder="little").view(np.bool_).nonzero()[0]
    (found,) = np.unpackbits(words_W[places].view(np.uint8), bitorder="little").view(np.bool_).nonzero()
    ids: TokenIds = places[found >> 5] * _WORD_BITS + (found & 31)
    return ids


class Lane:
    """What a guide and its copies share: the library's lexer, which works for one of them at a time."""

    is_broken = False
    """Whether a limit was reached; the lexer may be of no use to any of them from then on."""


class Guide:
    """A grammar and the tokens so far; one a request.

    The model's end-of-sequence tokens are no part of any grammar: where an answer may end, `may_end` says so.

    Parameters
    ----------
    matcher : of the library; its methods do not raise, so it is asked for its error after each.
    tokens : of the model.
    lane : of the guide that it is a copy of.

    Raises
    ------
    GrammarTooComplex : any method, once a limit was reached. The guide is of no use from then on.
    """

    def __init__(self, matcher: LLMatcher, tokens: TokenRules, lane: Lane | None = None) -> None:
        self._matcher = matcher
        self.tokens = tokens
        self.lane = lane or Lane()

    def copy(self) -> Guide:
        """Return one that stands at the same place and goes on by itself."""
        return Guide(self._matcher.deep_copy(), self.tokens, self.lane)

    def accepts(self, token_id: int) -> bool:
        """Return whether a token may come next; if it may, it has come."""
        if token_id in self.tokens.eos_token_ids:
            return False
        if self._matcher.try_consume_tokens([token_id]):
            return True
        self._check()
        return False

    def take(self, token_id: int) -> None:
        """Take a token that a mask allows, in half the time of `accepts`."""
        self._matcher.consume_token(token_id)
        self._check()

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
            if token_id in self.tokens.eos_token_ids:
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
        return self.tokens.encode(text)[:-1][:most] if text else []

    def fill_mask(self, address: int, num_bytes: int) -> None:
        """Write which tokens may come next as a mask; `TokenRules.clear_ends` is to follow.

        Parameters
        ----------
        address, num_bytes : of `TokenRules.num_words` words of 32 bits, all zero.
        """
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        self._check()

    def allowed(self) -> TokenIds:
        """Return all tokens that may come next, in ascending order."""
        words_GW = np.zeros((1, self.tokens.num_words), np.uint32)
        self.fill_mask(words_GW.ctypes.data, words_GW.nbytes)
        self.tokens.clear_ends(words_GW)
        return ids_in(words_GW[0])

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
            self.lane.is_broken = True
            raise GrammarTooComplex(in_words(self._matcher.get_error()))


def in_words(message: str) -> str:
    """Return what the library says, without the grammar that it may show below."""
    first, *others = message.strip().split("\n")
    cause = next((line for line in others if line.startswith("error: ")), "") if first.endswith(":") else ""
    return " ".join((first[:300], cause.removeprefix("error: ")[:300])).strip()
