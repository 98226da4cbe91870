"""What the answers of every family come to, however they are split."""

from __future__ import annotations

from tests.many_cases import each_case
from tests.pure.text.reply.cases import Case
from tests.pure.text.reply.reading import events, parser, read
from tests.pure.text.reply.special_cases import CASES

every_case = each_case("case", CASES)


@every_case
def test_a_whole_answer(case: Case) -> None:
    found = read(case.family, case.text, opens_in_reasoning=case.opens)
    if case.name == "no call":
        assert found.content == case.text
    else:
        assert found.content == case.content
    assert found.reasoning == case.reasoning
    assert [name for name, _ in found.calls] == [name for name, _ in case.calls]
    if case.raw is None:
        assert found.arguments == case.calls
    else:
        assert [text for _, text in found.calls] == case.raw


@every_case
def test_every_split_in_two(case: Case) -> None:
    whole = events(parser(case.family, opens_in_reasoning=case.opens), [case.text])
    for at in range(1, len(case.text)):
        pieces = [case.text[:at], case.text[at:]]
        assert events(parser(case.family, opens_in_reasoning=case.opens), pieces) == whole, at


@every_case
def test_character_by_character(case: Case) -> None:
    whole = events(parser(case.family, opens_in_reasoning=case.opens), [case.text])
    assert events(parser(case.family, opens_in_reasoning=case.opens), list(case.text)) == whole
