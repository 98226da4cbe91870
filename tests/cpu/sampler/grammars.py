"""Grammars over a vocabulary of bytes and some words, for tests that need no model."""

from __future__ import annotations

from onbeat.core.request import Grammar, SamplingParams
from onbeat.engine.sampling_row import SamplingRow
from onbeat.text.grammar.compiler import GrammarCompiler, Vocabulary

WORDS = [b'{"', b'":', b'","', b'"}', b"true", b"false", b"null", b"ab", b"12", b"  "]
EOS = 256 + len(WORDS)
VOCAB_SIZE = EOS + 3
"""A token without text, and two beyond the tokenizer."""


def make_compiler() -> GrammarCompiler:
    texts = [bytes([byte]) for byte in range(256)] + WORDS + [b"<end>"]
    return GrammarCompiler(Vocabulary(texts, [EOS], [EOS], None), VOCAB_SIZE)


def guided_row(compiler: GrammarCompiler, grammar: Grammar, before: bytes = b"", **params) -> SamplingRow:
    """Return a row whose answer so far is some bytes."""
    sampling = SamplingParams(grammar=grammar, stop_token_ids=(EOS,), **params)
    row = SamplingRow(sampling, (), list(before))
    row.guide = compiler.compile(grammar)
    assert row.guide.consume(list(before)) == len(before)
    return row
