"""From a `Grammar` to a `Guide`: the one place where llguidance is imported for work.

References
----------
Moskal et al., "LLGuidance: making structured outputs go brrr", 2025 (derivatives of regular expressions, an
Earley parser, a trie of the vocabulary).
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from onbeat.core.errors import InvalidRequest
from onbeat.core.request import Grammar
from onbeat.core.tokenizer import Tokenizer
from onbeat.text.grammar.guide import Guide, TokenRules, in_words

MOST_PROTOTYPES = 128
MOST_BYTES = 512 << 20
"""Of all prototypes together, estimated."""
_BYTES_PER_CHARACTER = 4
_PROTOTYPE_BYTES = 256 << 10

_TOKENS_AT_ONCE = 1024
"""Of a vocabulary, read in a millisecond."""
_REST_SECONDS = 1e-4


def limits(room: int) -> LLParserLimits:
    """Return what the library may take, times `room`: schemas of programs pass, and no step takes long."""
    return LLParserLimits(
        max_items_in_row=2_000 * room,
        initial_lexer_fuel=500_000 * room,
        step_lexer_fuel=50_000 * room,
        step_max_items=10_000 * room,
        max_lexer_states=50_000 * room,
        max_grammar_size=250_000 * room,
        verbose_errors=False,  # else messages hold parts of the grammar
    )


ROOM = 2
"""In an engine, so that what a trial has seen half of holds."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the library must know of a tokenizer."""

    token_bytes: list[bytes]
    """By id."""
    special_token_ids: list[int]
    eos_token_ids: list[int]
    """The first is what the vocabulary calls end-of-sequence."""
    bos_token_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """Return a tokenizer's vocabulary, of the tokens that have logits."""
        eos = [token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size]
        token_bytes: list[bytes] = []
        num_tokens = min(tokenizer.vocab_size, vocab_size)
        for start in range(0, num_tokens, _TOKENS_AT_ONCE):
            token_bytes += map(tokenizer.token_bytes, range(start, min(start + _TOKENS_AT_ONCE, num_tokens)))
            time.sleep(_REST_SECONDS)  # lets whoever waits for the interpreter have it
        return cls(
            token_bytes,
            sorted(token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size),
            eos,
            tokenizer.bos_token_id,
        )


class _LibraryTokenizer:
    """A tokenizer as the library asks for it."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        # An id that it does not know would break a guide for good; one without text is merely refused.
        self.tokens = vocabulary.token_bytes + [b""] * (vocab_size - len(vocabulary.token_bytes))
        self.special_token_ids = vocabulary.special_token_ids
        # It must have one; a model without gets a token that no text needs.
        self.eos_token_id = (vocabulary.eos_token_ids or vocabulary.special_token_ids or [0])[0]
        self.bos_token_id = vocabulary.bos_token_id

    def __call__(self, text: str) -> list[int]:
        """Raise: grammars of ours prescribe no tokens, so nothing has to be encoded for them."""
        raise AssertionError(f"nobody encodes {text!r} here")


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps what it has compiled. Threads may share it.

    Parameters
    ----------
    vocabulary : of the model's tokenizer.
    vocab_size : of the model; may be larger.
    encode : spells text that a grammar forces; by default nothing is spelled.
    room : see `limits`.
    num_threads : that find masks, each for guides of a lexer of its own.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        encode: Callable[[str], list[int]] = lambda _: [],
        room: int = ROOM,
        num_threads: int = 1,
    ) -> None:
        self._limits = limits(room)
        wrapper: Any = TokenizerWrapper(_LibraryTokenizer(vocabulary, vocab_size))
        eos: Any = vocabulary.eos_token_ids or None
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=eos)
        self._tokens = TokenRules(vocab_size, frozenset(vocabulary.eos_token_ids), encode, num_threads)
        self._prototypes: OrderedDict[str, tuple[list[Guide], int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        """Of the prototypes."""

    def cached(self, grammar: Grammar) -> Guide | None:
        """Return a guide at the start of a grammar that is compiled; None where it is not.

        Lexers take turns; those that are broken are forgotten.
        """
        with self._lock:
            guides, _ = self._prototypes.get(grammar.key, ([], 0))
            guides[:] = [guide for guide in guides[1:] + guides[:1] if not guide.lane.is_broken]
            if not guides:
                return None
            self._prototypes.move_to_end(grammar.key)
            return guides[-1].copy()

    def is_narrow(self, grammar: Grammar) -> bool:
        """Whether a grammar has fewer lexers than there are threads; `compile` makes it another one."""
        guides, _ = self._prototypes.get(grammar.key, ([], 0))
        return len(guides) < self._tokens.num_threads

    def compile(self, grammar: Grammar) -> Guide:
        """Return a guide at the start of a grammar.

        Raises
        ------
        InvalidRequest : the library refuses it.
        """
        guide = self.cached(grammar)
        if guide is not None and not self.is_narrow(grammar):
            return guide
        matcher = self.matcher(grammar)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        guide = self.guide_of(matcher)
        with self._lock:
            self._keep(grammar, guide)
            return guide.copy()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return the library's own object, in its error state where it refuses the grammar."""
        return LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=self._limits)

    def guide_of(self, matcher: LLMatcher) -> Guide:
        """Return a guide that is where the library's object is."""
        return Guide(matcher, self._tokens)

    def _keep(self, grammar: Grammar, guide: Guide) -> None:
        size = _PROTOTYPE_BYTES + _BYTES_PER_CHARACTER * len(grammar.text)
        guides, others = self._prototypes.pop(grammar.key, ([], 0))
        self._prototypes[grammar.key] = [*guides, guide], others + size
        self._num_bytes += size
        while len(self._prototypes) > MOST_PROTOTYPES or self._num_bytes > MOST_BYTES:
            _, (_, gone) = self._prototypes.popitem(last=False)
            self._num_bytes -= gone


_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[[^\]]*\])")
_SCHEMA_PREFIX = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_LIMITS = ("too large", "too big", "fuel", "limit", "too many", "too complex", "too deep")


def ignored_keywords(warnings: Sequence[str]) -> tuple[str, ...]:
    """Return the keywords of schemas that the library says it does not enforce."""
    named = [name for line in warnings for name in re.findall(r'"([^"]*)"', line)]
    return tuple(dict.fromkeys([*named, *(["oneOf"] if any("oneOf" in line for line in warnings) else [])]))


def refusal(message: str) -> InvalidRequest:
    """Return the error for a grammar that the library refuses with a message."""
    line = _SCHEMA_PREFIX.sub("", in_words(message))
    if (found := _UNIMPLEMENTED.search(line)) is not None:
        keys = ", ".join(f"'{key}'" for key in re.findall(r'"([^"]*)"', found.group(1)))
        return InvalidRequest(
            f"the schema uses {keys}, which this server cannot enforce; leave it out, or have it ignored by "
            "response_format without strict",
            code="unsupported_schema",
        )
    code = "grammar_too_complex" if any(word in line for word in _LIMITS) else "unsupported_schema"
    return InvalidRequest(f"the grammar cannot be enforced: {line}", code=code)
