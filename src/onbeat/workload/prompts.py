"""Prompt text of a given length in tokens.

Prompts are made of words that are one token each, so a length is met by counting words. The words are drawn
from a random stream of (salt, request), so that every run says something new and no prefix cache can help
unless a prefix is shared on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.tokenizer import Tokenizer

LengthSource = Literal["tokenizer", "server", "estimate"]

COMMON_WORDS = tuple((files("onbeat.workload") / "words.txt").read_text().split())
"""English words; nearly every tokenizer has each of them as one token."""
MAX_POOL_WORDS = 4096
MIN_POOL_WORDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WordPool:
    """Words to make prompts of.

    Parameters
    ----------
    words : each is one token, at the start of a text and after a blank.
    num_special_tokens : tokens that encoding adds to any text (a beginning-of-sequence token).
    source : how it is known that a word is one token; `estimate` means it is hoped.
    """

    words: tuple[str, ...]
    num_special_tokens: int = 0
    source: LengthSource = "estimate"

    def text(self, num_tokens: int, rng: np.random.Generator) -> str:
        """Return text of `num_tokens` tokens, without the special ones; at least one word."""
        chosen = rng.integers(len(self.words), size=max(1, num_tokens))
        return " ".join([self.words[i] for i in chosen.tolist()])


def estimated_pool() -> WordPool:
    """Return common English words, which are one token each for almost every tokenizer."""
    return WordPool(words=COMMON_WORDS, source="estimate")


def tokenizer_pool(tokenizer: Tokenizer) -> WordPool:
    """Return words from the tokenizer's own vocabulary.

    Raises
    ------
    ConfigError : the vocabulary has hardly any words.
    """
    candidates = (tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size))
    return calibrated_pool(
        _plain_words(candidates), lambda text: len(tokenizer.encode(text)), source="tokenizer"
    )


def calibrated_pool(
    candidates: Iterable[str], count_tokens: Callable[[str], int], *, source: LengthSource
) -> WordPool:
    """Return the candidates that `count_tokens` says are one token, up to a few thousand.

    Parameters
    ----------
    count_tokens : tokens of a text, special tokens included.
    """
    # Special tokens are counted once however long the text; an empty text is refused by some servers.
    num_special_tokens = 2 * count_tokens("the") - count_tokens("the the")
    words: list[str] = []
    for word in candidates:
        alone = count_tokens(word) - num_special_tokens
        if alone == 1 and count_tokens(f"{word} {word}") - num_special_tokens == 2:
            words.append(word)
        if len(words) == MAX_POOL_WORDS:
            break
    if len(words) < MIN_POOL_WORDS:
        raise ConfigError(
            f"only {len(words)} words are a single token for this tokenizer; prompts of known length need "
            f"{MIN_POOL_WORDS}. Leave --tokenizer out to use common English words and estimated lengths."
        )
    return WordPool(words=tuple(words), num_special_tokens=num_special_tokens, source=source)


def _plain_words(token_texts: Iterable[str]) -> Iterable[str]:
    """Keep the tokens that are a blank and a lower-case word, without the blank."""
    for text in token_texts:
        word = text[1:]
        if (
            text[:1] in {" ", "\u2581"}
            and len(word) > 1
            and word.isascii()
            and word.isalpha()
            and word.islower()
        ):
            yield word


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes texts of a given length; a text depends on the salt and on its name, and on nothing else.

    Parameters
    ----------
    pool : the words.
    salt : another salt gives other words everywhere.
    """

    pool: WordPool
    salt: str

    def text(self, num_tokens: int, *name: object) -> str:
        """Return the text of that name; a longer text of one name starts with the shorter one."""
        return self.pool.text(num_tokens, self._stream(*name))

    def _stream(self, *name: object) -> np.random.Generator:
        digest = hashlib.blake2b("\x1f".join(map(str, (self.salt, *name))).encode(), digest_size=16).digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))


PromptSource = Callable[[int], str]
"""The prompt of each request, by its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshPrompts:
    """A new text for every request, after an optional prefix that groups of requests share."""

    writer: PromptWriter
    num_tokens: Sequence[int]
    """Per request, prefix and special tokens included."""
    num_prefix_tokens: int = 0
    prefix_groups: Sequence[int] | None = None
    """Which prefix each request starts with; None gives all the same."""

    def __call__(self, index: int) -> str:
        num_words = int(self.num_tokens[index]) - self.writer.pool.num_special_tokens
        if not self.num_prefix_tokens:
            return self.writer.text(num_words, "request", index)
        group = 0 if self.prefix_groups is None else int(self.prefix_groups[index])
        prefix = self.writer.text(self.num_prefix_tokens, "prefix", group)
        num_own = num_words - self.num_prefix_tokens
        if num_own < 1:
            return prefix
        return f"{prefix} {self.writer.text(num_own, 'request', index)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrompts:
    """Prompts of blocks named by a trace: equal block ids give equal text, so prefixes repeat as recorded."""

    writer: PromptWriter
    num_tokens: Sequence[int]
    block_ids: Sequence[Sequence[int]]
    block_size: int
    """Tokens of a block; a prompt's last block may be shorter."""

    def __call__(self, index: int) -> str:
        left = max(1, int(self.num_tokens[index]) - self.writer.pool.num_special_tokens)
        parts: list[str] = []
        for position, block_id in enumerate(self.block_ids[index]):
            if left <= 0:
                break
            # Special tokens belong to the first block, so that every later block starts on its boundary.
            room = self.block_size - (self.writer.pool.num_special_tokens if position == 0 else 0)
            parts.append(self.writer.text(min(left, room), "block", block_id))
            left -= room
        if left > 0:
            parts.append(self.writer.text(left, "request", index))
        return " ".join(parts)
