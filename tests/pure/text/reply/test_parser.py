"""Properties of the parser that hold for all families, reasoning, marks that are tokens, and time."""

from __future__ import annotations

import gc
import json
import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.text.reply.calls import (
    CallEnd,
    CallStart,
    CallText,
    ContentText,
    MarkToken,
    ReasoningText,
    ReplyEvent,
)
from onbeat.text.reply.families import FAMILIES, HARMONY_MARKS, REASONING
from onbeat.text.reply.harmony import new_reader
from onbeat.text.reply.parser import ReplyOptions, ReplyStyle, opens_in_reasoning
from tests.fakes_engine import ByteTokenizer
from tests.pure.text.reply.cases import FORMS
from tests.pure.text.reply.reading import TOOLS, Pieces, events, merged, parser, read
from tests.pure.text.reply.special_cases import CASES

CALL = '<tool_call>{"name": "refresh", "arguments": {}}</tool_call>'
FRAGMENTS = sorted({
    *(mark for family in FAMILIES.values() for pair in family.marks for mark in pair if mark),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", "(", ")"),
    *('"', "'", "\\", "\n", " ", ",", ";", ":", "=", "<", "`", "é", "🎉", "refresh", "mix", "nobody"),
    *('"name"', '"arguments"', '{"name": "mix", "arguments": {'),
    *("5", "null", "<function=mix>", "<parameter=text>"),
    *(*HARMONY_MARKS, " to=", "functions.", "analysis", "final"),
    *("</parameter>", "</function>", "mix(text='", "refresh()"),
})  # fmt: skip


@given(st.data())
def test_any_text_is_read_alike_however_it_is_split(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=30)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    opens = data.draw(st.booleans())
    whole = events(parser(family, opens_in_reasoning=opens), [text])
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert events(parser(family, opens_in_reasoning=opens), pieces) == whole
    assert events(parser(family, opens_in_reasoning=opens), list(text)) == whole


@given(st.text(alphabet=sorted(set("".join(FRAGMENTS))), max_size=60))
def test_text_without_calls_and_reasoning_is_content_to_the_letter(text: str) -> None:
    for family in FAMILIES:
        found = read(family, text, reasoning=None)
        if not found.calls:
            assert found.content == text


@given(st.data())
def test_content_and_reasoning_hold_all_but_one_pair_of_marks(data: st.DataObject) -> None:
    fragments = st.lists(
        st.sampled_from(["<think>", "</think>", "</thi", "a", " b ", "\n", CALL, "```html\n", "5 < 6"]),
        max_size=8,
    )
    thought = "".join(data.draw(fragments)).replace("</think>", "")
    said, opens = "".join(data.draw(fragments)), data.draw(st.booleans())
    text = "<think>" * (not opens) + thought + "</think>" + said
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    found = read("hermes", pieces, tools={}, opens_in_reasoning=opens, is_guided=data.draw(st.booleans()))
    assert found.content == said.lstrip()
    # a model may say again what the prompt ends with
    repeated = thought.lstrip().removeprefix("<think>")
    assert found.reasoning == (repeated if opens else thought).strip()


NAMES = st.text(st.sampled_from("abz_09-.:"), min_size=1, max_size=8).filter(lambda name: name[0].isalpha())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(NAMES | st.sampled_from(["from", "in", "class"]), JSON, max_size=4), NAMES, st.data())
def test_what_python_writes_is_read_as_it_was_meant(
    arguments: dict[str, object], name: str, data: st.DataObject
) -> None:
    call = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    text = f"[{call}, {call}]"
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)) | {0, len(text)})
    found = read("pythonic", [text[a:b] for a, b in pairwise(cuts)], tools={name: {}})
    assert found.arguments == [(name, arguments)] * 2
    assert found.content == ""


def hidden(
    data: st.DataObject, schema: dict[str, object], definitions: dict[str, object]
) -> dict[str, object]:
    """Return what says the same as a schema, behind references, `allOf` and alternatives."""
    for index in range(data.draw(st.integers(0, 4))):
        name = f"D/{index}%"
        definitions[name] = schema
        reference = {"$ref": f"#/$defs/D~1{index}%25", "description": "d"}
        schema = data.draw(
            st.sampled_from([reference, {"allOf": [reference]}, {"anyOf": [reference, {"type": "null"}]}])
        )
    return schema


@given(JSON.filter(lambda value: value is not None and not isinstance(value, str)), st.data())
def test_a_value_in_tags_has_the_type_that_its_schema_hides(value: object, data: st.DataObject) -> None:
    kinds = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    definitions: dict[str, object] = {}
    plain: dict[str, object] = {"type": kinds[type(value)]}
    if isinstance(value, dict | list):
        plain = data.draw(
            st.sampled_from([plain, {"properties" if isinstance(value, dict) else "items": {}}])
        )
    schema = hidden(data, plain, definitions)
    tool = {"properties": {"p": schema, "q": {"type": "string"}}, "$defs": definitions}
    text = f"<tool_call>\n<function=f>\n<parameter=p>\n{json.dumps(value)}\n</parameter>\n"
    text += "<parameter=q>\n5\n</parameter>\n</function>\n</tool_call>"
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)) | {0, len(text)})
    found = read("qwen3-xml", [text[a:b] for a, b in pairwise(cuts)], tools={"f": tool})
    assert found.arguments == [("f", {"p": value, "q": "5"})]


def varied(rng: random.Random, text: str) -> str:
    """Return a text with a part that is left out, said again, or replaced by what may mean something."""
    for _ in range(rng.randrange(3)):
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        text = text[:start] + rng.choice(["", text[start:end] * 2, rng.choice(FRAGMENTS)]) + text[end:]
    return text


@pytest.mark.parametrize(
    ("num_texts", "num_splits"), [(120, 4), pytest.param(10_000, 10, marks=pytest.mark.slow)]
)
def test_random_splits(num_texts: int, num_splits: int) -> None:
    rng = random.Random(num_texts)
    for _ in range(num_texts):
        case = rng.choice(CASES)
        text = varied(rng, case.text)
        whole = events(parser(case.family, opens_in_reasoning=case.opens), [text])
        for _ in range(num_splits):
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
            pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
            assert events(parser(case.family, opens_in_reasoning=case.opens), pieces) == whole, pieces


@pytest.mark.parametrize(
    ("arguments", "is_call"),
    [
        ("text='" + "é" * 350_000 + "'", True),
        ("text='" + "é" * 400_000 + "'", False),
        ("list=[" + "1," * 4_500 + "]", True),
        ("list=[" + "1," * 5_000 + "]", False),
    ],
)
def test_a_call_that_python_would_read_for_long_is_text(arguments: str, is_call: bool) -> None:
    text = f"[mix({arguments})] so"
    for size in (len(text), 997):
        found = read("pythonic", [text[at : at + size] for at in range(0, len(text), size)])
        assert bool(found.calls) == is_call
        if not is_call:
            assert found.content == text


@pytest.mark.parametrize("family", sorted(FORMS))
def test_long_arguments_take_linear_time(family: str) -> None:
    def seconds(num_pieces: int) -> float:
        value = "ab c" * num_pieces
        text = FORMS[family]([("mix", '{"text": "' + value + '"}')])
        pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
        gc.disable()  # it would walk through what all tests before have left
        start = time.process_time()
        assert read(family, pieces).arguments == [("mix", {"text": value})]
        elapsed = time.process_time() - start
        gc.enable()
        return elapsed

    seconds(1000)
    assert seconds(60_000) < 30 * seconds(6_000) + 0.5


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = parser("hermes")
    assert reader.push(['<tool_call>{"name": "mix", "arguments": {"te'], final=False)[1:] == [
        CallText(0, '{"te')
    ]
    assert reader.push(['xt": "a'], final=False) == [CallText(0, 'xt": "a')]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nA.\n\nB.\n</think>\n\nC.\n", "A.\n\nB.", "C.\n"),
        (" <think></think> C.", "", "C."),
        ("<think>A", "A", ""),
        ("<think>A</think>", "A", ""),
        ("A <think> B </think> C", "", "A <think> B </think> C"),
        ("<think>A</think>B</think>C", "A", "B</think>C"),
        ("<think>A</think>B<think>C</think>D", "A", "B<think>C</think>D"),
        ("<think>A</think></think>B", "A", "</think>B"),
        ("<think>A</think>\n<think>B</think>C", "A", "<think>B</think>C"),
        ("<think>A<think>B</think>C", "A<think>B", "C"),
        ("</think>A", "", "A"),
        ("A</think>B", "", "A</think>B"),
        ("<think>A</think>B<think>C", "A", "B<think>C"),
        (f"<think>A {CALL} B", "A", "B"),
        ("<think>A <tool_call>B</think>C", "A <tool_call>B", "C"),
        ("[THINK]A[/THINK]B", "", "[THINK]A[/THINK]B"),
    ],
)
def test_reasoning_that_the_answer_opens(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        found = read("hermes", pieces)
        assert (found.reasoning, found.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nA.\n</think>\n\nB", "A.", "B"),
        ("A", "A", ""),
        ("</think>B", "", "B"),
        ("<think>\nA</think>B", "A", "B"),
        (f"A\n{CALL}\nB", "A", "B"),
        ("A</think>B</think> C", "A", "B</think> C"),
        ("A</think><think>B</think>C", "A", "<think>B</think>C"),
    ],
)
def test_reasoning_that_the_prompt_opens(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        found = read("hermes", pieces, opens_in_reasoning=True)
        assert (found.reasoning, found.content) == (reasoning, content)


def test_reasoning_may_be_dropped() -> None:
    found = read("hermes", f"<think>A</think>B{CALL}", drops_reasoning=True)
    assert (found.reasoning, found.content, found.calls) == ("", "B", [("refresh", "{}")])


def test_without_tools_calls_are_content() -> None:
    assert read("hermes", f"<think>A</think>{CALL}", tools={}).content == CALL
    assert read(None, f"<think>A</think>{CALL}").content == CALL
    assert read("hermes", f"<think>A</think>{CALL}", reasoning=None).content == "<think>A</think>"


def test_one_call_may_be_all() -> None:
    for pieces in ([f"A{CALL}{CALL}B"], list(f"A{CALL}{CALL}B")):
        reader, found = parser("hermes", is_single=True), list[ReplyEvent]()
        for piece in pieces:
            found += reader.push([piece], final=False)
        assert reader.is_complete
        assert merged(found) == [
            ContentText("A"),
            CallStart(0, "call_0", "refresh"),
            CallText(0, "{}"),
            CallEnd(0),
        ]
        assert reader.push([], final=True) == []


def style(*special: str) -> ReplyStyle:
    """Return the style of Mistral's models where some marks are special tokens."""
    tokenizer = ByteTokenizer()
    tokenizer.special_token_ids = frozenset(range(256, 256 + len(special)))
    tokenizer._special = {256 + i: name.encode() for i, name in enumerate(special)}
    return ReplyStyle(FAMILIES["mistral-args"], REASONING["mistral"], tokenizer)


def test_marks_that_are_special_tokens_count_only_as_such() -> None:
    known = style("[TOOL_CALLS]", "[ARGS]", "[THINK]", "<s>")
    assert known.mark_ids == {"[TOOL_CALLS]": 256, "[ARGS]": 257, "[THINK]": 258}

    def said(*pieces: str | MarkToken) -> Pieces:
        reader = new_reader(known, ReplyOptions(tools=TOOLS, new_call_id=lambda: "0"))
        return [str(event) for event in events(reader, pieces)]

    calls, args, think = MarkToken("[TOOL_CALLS]"), MarkToken("[ARGS]"), MarkToken("[THINK]")
    text = "[TOOL_CALLS]refresh[ARGS]{} [THINK]"
    assert said(text) == [str(ContentText(text))]
    assert len(said("A", calls, "refresh", args, "{}")) == 4
    assert said("A", think, "B[/THINK]C") == list(
        map(str, (ContentText("A"), ReasoningText("B"), ContentText("C")))
    )
    inside = said(calls, "mix", args, '{"text": "', calls, '"}')
    assert inside[1] == str(CallText(0, '{"text": "[TOOL_CALLS]"}'))
    assert said(calls, "nobody", args, "{}") == [str(ContentText("[TOOL_CALLS]nobody[ARGS]{}"))]
    assert len(said(calls, "refresh", args, "{}", calls, "refresh", args, "{")) == 6


@pytest.mark.parametrize(
    ("pieces", "opens", "number"),
    [
        (["<think>", "A", "B", "</think>", "C"], False, 4),
        (["<thi", "nk>", "A", "</", "think>", "C"], False, 5),
        (["<thi", "s", "A"], False, 0),
        (["A", "B", "</think>", "C"], True, 3),
        (["A", "B"], True, 2),
        (["A", "<tool_call>", '{"name": "refresh", ', '"arguments": {}}', "</tool_call>"], True, 1),
        (["A", "<tool_call>", "B", "</think>"], True, 4),
        (["A", "<tool_call>", '{"name"'], True, 3),
        (["A", "B"], False, 0),
    ],
)
def test_tokens_of_reasoning_are_counted(pieces: list[str], opens: bool, number: int) -> None:
    reader = parser("hermes", opens_in_reasoning=opens)
    events(reader, pieces)
    assert reader.num_reasoning_tokens == number


@pytest.mark.parametrize(
    ("prompt", "continued", "opens"),
    [
        ("<|user|>Hi<|assistant|><think>\n", None, True),
        ("<|user|>Hi<|assistant|><think>\n\n</think>\n\n", None, False),
        ("<|user|>What is <think>?<|assistant|>", None, False),
        ("<|user|>Hi<|assistant|>", None, False),
        ("<|assistant|><think>A", "<think>A", True),
        ("<|assistant|><think>A</think>B", "<think>A</think>B", False),
        ("<|user|><think>\n<|assistant|>B", "B", False),
    ],
)
def test_whether_a_prompt_ends_in_reasoning(prompt: str, continued: str | None, opens: bool) -> None:
    assert opens_in_reasoning(prompt, REASONING["think"], continued) is opens
    assert not opens_in_reasoning(prompt, None, continued)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": ' + "[" * 100_000 + "]" * 100_000 + ', "name": "mix"}</tool_call>',
        '<tool_call>{"name": "mix", "arguments": "'
        + '{\\"a\\":' * 100_000
        + "1"
        + "}" * 100_000
        + '"}</tool_call>',
    ],
)
def test_deep_arguments_are_passed_on_and_not_read(text: str) -> None:
    reader = parser("hermes")
    assert [type(event) for event in reader.push([text], final=True)] == [CallStart, CallText, CallEnd]
