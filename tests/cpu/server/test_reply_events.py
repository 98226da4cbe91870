"""The seam where the text of a choice becomes events: a reader of its own instead of a model family's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onbeat.core.protocols import Delivery
from onbeat.core.request import FinishReason, Request, RequestOutput, SamplingParams
from onbeat.server.choices import Choice, ChoiceDelta, ChoiceText, TextOptions
from onbeat.server.pen import WholeChoice
from onbeat.text.reply.calls import (
    CallEnd,
    CallStart,
    CallText,
    ContentText,
    MarkToken,
    ReasoningText,
    ReplyEvent,
)
from tests.fakes_engine import EOS, THINK, ByteTokenizer


class ToyReader:
    """`<think>` is reasoning up to a full stop; `(x)` is a call; `!` ends the answer; `_` says nothing."""

    mark_token_ids = frozenset((THINK,))

    def __init__(self) -> None:
        self.num_reasoning_tokens = 0
        self.is_complete = False
        self._thinks = False

    def push(self, pieces: Sequence[str | MarkToken], *, final: bool) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        for piece in pieces:
            if piece == MarkToken("<think>"):
                self._thinks = True
                self.num_reasoning_tokens += 1
            elif isinstance(piece, str) and piece:
                events += self._events(piece)
        return [*events, CallEnd(0)] if final and self.is_complete else events

    def _events(self, text: str) -> list[ReplyEvent]:
        if self._thinks:
            self._thinks = text != "."
            self.num_reasoning_tokens += 1
            return [ReasoningText(text)]
        self.is_complete = text == "!"
        known = {"_": [], "(": [CallStart(0, "id", "f")], "x": [CallText(0, '"\n"')], "!": []}
        return known.get(text, [ContentText(text)])  # type: ignore[return-value]


def deltas(deliveries: list[list[int]], *, reads: bool = True) -> list[ChoiceDelta]:
    request = Request(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=9), arrival=0)
    choice = Choice(index=0, prompt_index=0, request=request, is_streamed=True)
    new_reader: Any = ToyReader if reads else None
    options = TextOptions(stop=("STOP",), new_reader=new_reader)
    text = ChoiceText(choice, ByteTokenizer(), options)
    result = []
    for index, token_ids in enumerate(deliveries):
        is_last = index == len(deliveries) - 1
        output = RequestOutput(
            request_id="a",
            new_token_ids=token_ids,
            finish_reason=FinishReason.STOP if is_last else None,
            stop_token_id=EOS if is_last else None,
        )
        if (delta := text.take(Delivery(0.0, output))) is not None:
            result.append(delta)
        if choice.finish_reason is not None:
            break
    return result


def tokens(text: str) -> list[int]:
    return list(text.encode())


def test_marks_and_text_become_events_and_reasoning_is_counted() -> None:
    first, second, last = deltas([[THINK], [*tokens("a."), *tokens("b")], tokens("c"), [EOS]])
    assert first.events == [ReasoningText("a"), ReasoningText("."), ContentText("b")]
    assert first.token_ids == [THINK, *tokens("a.b")]
    assert first.num_reasoning_tokens == 3
    assert second.events == [ContentText("c")]
    assert last.events == []
    assert last.finish_reason == "stop"


def test_what_says_nothing_is_held_with_its_tokens() -> None:
    only, last = deltas([tokens("_"), tokens("_"), tokens("a"), [EOS]])
    assert [token.token_id for token in only.tokens] == tokens("__a")
    assert last.token_ids == [EOS]


def test_a_complete_answer_ends_within_a_delivery() -> None:
    (only,) = deltas([[*tokens("(x!behind"), EOS]])
    assert only.events == [CallStart(0, "id", "f"), CallText(0, '"\n"'), CallEnd(0)]
    assert only.token_ids == tokens("(x!")
    assert (only.finish_reason, only.num_output_tokens, only.choice.num_calls) == ("stop", 3, 1)


def test_a_stop_string_ends_what_a_reader_is_given() -> None:
    *_, last = deltas([tokens("aST"), tokens("OP"), [EOS]])
    assert last.events == []
    assert last.choice.stop_reason == "STOP"


def test_parts_of_a_whole_choice_keep_their_order() -> None:
    all_deltas = deltas([[THINK], tokens("a.b(x"), tokens("c"), [EOS]])
    whole = WholeChoice(all_deltas[0].choice, 0)
    for delta in all_deltas:
        whole.add(delta, ())
    assert [(part.kind, bytes(part.text)) for part in whole.parts] == [
        ("reasoning", b"a."),
        ("content", b"b"),
        ("call", rb"\"\n\""),
        ("content", b"c"),
    ]


def test_without_a_reader_all_is_content() -> None:
    all_deltas = deltas([[THINK], tokens("a"), [EOS]], reads=False)
    whole = WholeChoice(all_deltas[0].choice, 0)
    for delta in all_deltas:
        whole.add(delta, ())
    assert [delta.all_events for delta in all_deltas] == [[ContentText("a")], []]
    assert [(part.kind, bytes(part.text)) for part in whole.parts] == [("content", b"a")]
