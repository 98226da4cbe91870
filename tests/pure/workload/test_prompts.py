from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.workload.prompts import (
    COMMON_WORDS,
    BlockPrompts,
    FreshPrompts,
    PromptWriter,
    WordPool,
    calibrated_pool,
    estimated_pool,
    tokenizer_pool,
)

POOL = WordPool(words=COMMON_WORDS, num_special_tokens=1, source="server")


def writer(salt: str = "s") -> PromptWriter:
    return PromptWriter(POOL, salt)


def count(text: str) -> int:
    return 1 + len(text.split())


@pytest.mark.parametrize("num_tokens", [2, 3, 50, 1000])
def test_a_prompt_has_the_asked_length_special_tokens_included(num_tokens: int) -> None:
    assert count(FreshPrompts(writer=writer(), num_tokens=[num_tokens])(0)) == num_tokens


def test_prompts_repeat_with_their_salt_and_differ_with_another() -> None:
    lengths = [40, 40]
    first = FreshPrompts(writer=writer("a"), num_tokens=lengths)

    assert first(0) == FreshPrompts(writer=writer("a"), num_tokens=lengths)(0)
    assert first(0) != first(1)
    assert first(0).split()[:5] != FreshPrompts(writer=writer("b"), num_tokens=lengths)(0).split()[:5]


def test_requests_of_one_group_share_their_prefix() -> None:
    prompts = FreshPrompts(
        writer=writer(), num_tokens=[31, 31, 31], num_prefix_tokens=10, prefix_groups=[0, 1, 0]
    )
    words = [prompts(i).split() for i in range(3)]

    assert [len(w) for w in words] == [30, 30, 30]
    assert words[0][:10] == words[2][:10] != words[1][:10]
    assert words[0][10:] != words[2][10:]


def test_equal_blocks_give_equal_text_at_equal_places() -> None:
    prompts = BlockPrompts(
        writer=writer(), num_tokens=[20, 17, 20], block_ids=[(1, 2, 3), (1, 2, 9), (7, 2, 3)], block_size=8
    )
    words = [prompts(i).split() for i in range(3)]

    assert [len(w) + 1 for w in words] == [20, 17, 20]
    assert words[0][:15] == words[1][:15]  # blocks of 8, the first one less its special token
    assert words[0][15:] != words[1][15:]
    assert words[0][:7] != words[2][:7]
    assert words[0][7:] == words[2][7:]


def test_a_prompt_longer_than_its_blocks_is_filled_up() -> None:
    prompts = BlockPrompts(writer=writer(), num_tokens=[30], block_ids=[(1,)], block_size=8)

    assert count(prompts(0)) == 30


def test_calibration_keeps_words_of_one_token() -> None:
    def count_tokens(text: str) -> int:
        return 2 + sum(1 if len(word) < 6 else 2 for word in text.split())

    pool = calibrated_pool(COMMON_WORDS, count_tokens, source="server")

    assert pool.num_special_tokens == 2
    assert all(len(word) < 6 for word in pool.words)
    assert len(pool.words) == sum(len(word) < 6 for word in COMMON_WORDS)


def test_a_tokenizer_without_whole_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="only 0 words"):
        calibrated_pool(COMMON_WORDS, len, source="tokenizer")


class WordTokenizer:
    """One token per listed word; a beginning-of-sequence token; anything else is one token a character."""

    vocabulary = ("<s>", "!", *(f" {word}" for word in COMMON_WORDS[:40]), " Upper", "bare")

    vocab_size = len(vocabulary)
    bos_token_id = 0
    eos_token_ids = (0,)
    special_token_ids = frozenset({0})
    strips_leading_space = False
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [0] if add_special_tokens else []
        for word in text.split():
            known = f" {word}" in self.vocabulary
            ids += [self.vocabulary.index(f" {word}")] if known else [1] * len(word)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.vocabulary[i] for i in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary[token_id].encode()

    def token_entry(self, token_id: int) -> str:
        return self.vocabulary[token_id]

    def token_text(self, token_id: int) -> str:
        return self.vocabulary[token_id]


def test_a_tokenizers_own_words_give_exact_lengths() -> None:
    tokenizer = WordTokenizer()
    pool = tokenizer_pool(tokenizer)
    prompts = FreshPrompts(writer=PromptWriter(pool, ""), num_tokens=[57])

    assert pool.source == "tokenizer"
    assert "Upper" not in pool.words
    assert "bare" not in pool.words
    assert len(tokenizer.encode(prompts(0))) == 57


def test_the_estimated_pool_says_so() -> None:
    pool = estimated_pool()

    assert pool.source == "estimate"
    assert len(set(pool.words)) == len(pool.words) > 500
    assert len(pool.text(12, np.random.default_rng(0)).split()) == 12
