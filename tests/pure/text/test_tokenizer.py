"""Encoding: the same ids as the library's plain call, and other threads go on meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from onbeat.core.errors import InvalidRequest
from onbeat.text.tokenizer import SpecialRoles, VocabularyTokenizer
from tests.pure.text.tiny_gguf import BYTE_ALPHABET

NO_ROLES = SpecialRoles(bos_token_id=0, eos_token_ids=(1,), chat_template=None)
TEXT = (Path(__file__).read_text() * 100)[:150_000]


def byte_backend() -> Tokenizer:
    """Return a vocabulary of bytes and a few merges; a start and an end token frame a text."""
    merges = [("a", "b"), ("t", "h"), ("th", "e"), ("Ġ", "the")]
    tokens = ["<s>", "</s>", *BYTE_ALPHABET, *map("".join, merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=9)
    return backend


BACKEND = byte_backend()
TOKENIZER = VocabularyTokenizer(BACKEND, NO_ROLES)


TEXTS = st.lists(st.text() | st.sampled_from(["<s>", "</s>", " the", "ab", "é", "🙂"])).map("".join)


@given(TEXTS, st.booleans())
def test_the_ids_are_those_of_the_plain_call(text: str, add_special_tokens: bool) -> None:
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        with pytest.raises(InvalidRequest, match="surrogate"):
            TOKENIZER.encode(text, add_special_tokens=add_special_tokens)
        return
    token_ids = TOKENIZER.encode(text, add_special_tokens=add_special_tokens)
    plain = BACKEND.encode(text, add_special_tokens=add_special_tokens).ids
    has_start = add_special_tokens and text.startswith("<s>")
    assert token_ids == plain[has_start:]


def test_a_start_token_that_is_written_is_not_doubled() -> None:
    chat = "<s>[user] hi <s>"
    once = TOKENIZER.encode(chat, add_special_tokens=False)
    assert once.count(0) == 2
    assert TOKENIZER.encode(chat) == [*once, 1]
    assert TOKENIZER.encode("<s>" + chat) == [0, *once, 1], "what is written twice stays"
    assert TOKENIZER.encode(" " + chat)[:2] == [0, TOKENIZER.encode(" ")[1]]
    assert TOKENIZER.encode("") == [0, 1]


def test_a_vocabulary_that_adds_no_start_token_leaves_all_that_are_written() -> None:
    backend = byte_backend()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    assert VocabularyTokenizer(backend, NO_ROLES).encode("<s><s>") == [0, 0, 1]


def test_an_entry_is_the_vocabularys_own_spelling() -> None:
    entries = list(map(TOKENIZER.token_entry, TOKENIZER.encode("the the é")))
    assert entries == ["<s>", "the", "Ġthe", "Ġ", "Ã", "©", "</s>"]
    assert TOKENIZER.token_entry(-1) == TOKENIZER.token_entry(TOKENIZER.vocab_size) == ""


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        TOKENIZER.encode("a\udc00")


def longest_gap(text: str) -> float:
    """Return the longest time that this thread stood still while another encoded, as a share of it all."""
    span: list[float] = []

    def encode() -> None:
        span.append(time.perf_counter())
        TOKENIZER.encode(text)
        span.append(time.perf_counter())

    encoding = threading.Thread(target=encode)
    longest, last = 0.0, time.perf_counter()
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest / (span[1] - span[0])


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    # one gap of nearly the whole time where the lock is held; other processes may add some to each try
    assert min(longest_gap(TEXT) for _ in range(3)) < 0.5
