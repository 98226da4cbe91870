"""Vocabularies of bytes and some words, for grammars in tests that need no tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema

from onbeat.text.grammar.compiler import GrammarCompiler, Vocabulary
from onbeat.text.grammar.source import JsonStyle

WORDS = [b'{"', b'":', b'","', b'"}', b"true", b"false", b"null", b"ab", b"12", b"  "]
EOS = 256 + len(WORDS)
VOCAB_SIZE = EOS + 3
"""Two beyond the tokenizer."""
TINY_TEXTS = [
    bytes([byte]) for byte in (9, 10, 13, *range(32, 127), *range(0x80, 0xC0), *range(0xC2, 0xE0))
] + WORDS
"""Of 211 tokens, as many as the tiny models have: text of one or two bytes a character."""
TINY_EOS = 210
COMPACT = JsonStyle(white_space=None)
"""No white space: the fewest tokens."""

_FORMATS = jsonschema.FormatChecker(formats=["date", "ipv4", "uuid", "email"])


def make_compiler(**options: Any) -> GrammarCompiler:
    """Return the compiler of all bytes."""
    texts = [bytes([byte]) for byte in range(256)] + WORDS + [b"<end>"]
    return GrammarCompiler(Vocabulary(texts, [EOS], [EOS], None), VOCAB_SIZE, **options)


def make_tiny_compiler() -> GrammarCompiler:
    """Return the compiler of the tiny models' tokens; text that must come is spelled byte by byte."""
    texts = TINY_TEXTS + [b""] * (TINY_EOS - len(TINY_TEXTS)) + [b"<end>"]
    place = {text: token_id for token_id, text in enumerate(TINY_TEXTS)}

    def encode(text: str) -> list[int]:
        return [place[bytes([byte])] for byte in text.encode() if bytes([byte]) in place]

    return GrammarCompiler(Vocabulary(texts, [TINY_EOS], [TINY_EOS], None), TINY_EOS + 1, encode)


def tiny_text(token_ids: Sequence[int]) -> str:
    """Return what tokens of the tiny models say, without the end."""
    return b"".join(TINY_TEXTS[token_id] for token_id in token_ids if token_id != TINY_EOS).decode()


def check_valid(text: str, schema: Any) -> None:
    """Check an answer against its schema."""
    jsonschema.Draft202012Validator(schema, format_checker=_FORMATS).validate(json.loads(text))
