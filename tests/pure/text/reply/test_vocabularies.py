"""Answers token by token, as vocabularies of several kinds spell them, through a server's text stream."""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from onbeat.text.reply.calls import MarkToken, ReplyEvent
from onbeat.text.reply.families import FAMILIES
from onbeat.text.stream import TextStream
from onbeat.text.tokenizer import SpecialRoles, VocabularyTokenizer
from tests.many_cases import each_case
from tests.pure.text.reply.cases import Case
from tests.pure.text.reply.reading import Read, events, merged, parser, read_events
from tests.pure.text.reply.special_cases import CASES

ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


@cache
def vocabulary(kind: str, family: str) -> VocabularyTokenizer:
    """Return a vocabulary: of bytes alone, of long tokens that go across marks, or with marks as tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "long")
    backend.decoder = decoders.ByteLevel()
    size = {"bytes": 257, "long": 900, "marks": 600}[kind]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["</s>"],
        show_progress=False,
    )
    backend.train_from_iterator([case.text for case in CASES], trainer)
    if kind == "marks":
        marks = {mark for pair in FAMILIES[family].marks for mark in pair if " " not in mark}
        special = sorted(
            {*marks, *FAMILIES[family].inner_marks} - {"", "functools", "```", "```json", *ADDED}
        )
        backend.add_special_tokens([AddedToken(mark, special=True) for mark in special])
        backend.add_tokens([AddedToken(mark, special=False) for mark in ADDED])
    return VocabularyTokenizer(
        backend, SpecialRoles(bos_token_id=None, eos_token_ids=(0,), chat_template=None)
    )


def token_by_token(case: Case, kind: str) -> list[ReplyEvent]:
    tokenizer = vocabulary(kind, case.family if kind == "marks" else "")
    reader = parser(case.family, tokenizer=tokenizer, opens_in_reasoning=case.opens)
    stream, found = TextStream(tokenizer), list[ReplyEvent]()
    stream.mark_ids = reader.mark_token_ids
    for token_id in tokenizer.encode(case.text, add_special_tokens=False):
        delta = stream.push([token_id], final=False)
        pieces: list[str | MarkToken] = [delta.text, *(MarkToken(name) for _, name in delta.marks)]
        found += reader.push(pieces, final=False)
    found += reader.push([stream.push([], final=True).text], final=True)
    return merged(found)


@pytest.mark.parametrize("kind", ["bytes", "long"])
@each_case("case", CASES)
def test_text_is_read_as_a_whole(case: Case, kind: str) -> None:
    assert token_by_token(case, kind) == events(
        parser(case.family, opens_in_reasoning=case.opens), [case.text]
    )


@each_case("case", [case for case in CASES if case.calls])
def test_calls_are_the_same_where_marks_are_tokens(case: Case) -> None:
    found: Read = read_events(token_by_token(case, "marks"))
    assert [name for name, _ in found.calls] == [name for name, _ in case.calls]
    if case.raw is None:
        assert found.arguments == case.calls
    assert found.reasoning == case.reasoning
