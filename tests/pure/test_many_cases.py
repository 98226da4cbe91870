"""One test over many cases: all run, the failing ones are named, and fixtures are what is left."""

from __future__ import annotations

import inspect

import pytest

from tests.many_cases import each_case


def test_all_cases_run_and_those_that_fail_are_named() -> None:
    seen = []

    @each_case("a", [1, 2])
    @each_case(("b", "c"), [("x", 3), ("y", 4)])
    def check(fixture: str, a: int, b: str, c: int) -> None:
        seen.append((fixture, a, b, c))
        assert (a, c) != (2, 3)
        assert a != 1

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(ExceptionGroup, match="2 of 2") as caught:
        check(fixture="f")
    assert seen == [("f", 1, "x", 3), ("f", 1, "y", 4), ("f", 2, "x", 3), ("f", 2, "y", 4)]
    first, second = caught.value.exceptions
    assert isinstance(first, ExceptionGroup)
    assert [error.__notes__ for error in first.exceptions] == [["where b=x, c=3"], ["where b=y, c=4"]]
    assert first.__notes__ == ["where a=1"]
    assert second.__notes__ == ["where b=x, c=3", "where a=2"]


async def test_coroutines_run_in_turn() -> None:
    seen = []

    @each_case("a", range(3))
    async def check(a: int) -> None:
        seen.append(a)
        if a == 1:
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") as caught:
        await check()
    assert seen == [0, 1, 2]
    assert caught.value.__notes__ == ["where a=1"]


def test_it_is_skipped_where_all_cases_are() -> None:
    @each_case("a", [1, 2])
    def check(least: int, a: int) -> None:
        if a >= least:
            pytest.skip(f"{a} is not here")

    check(least=2)
    with pytest.raises(pytest.skip.Exception, match="1 is not here"):
        check(least=1)


def test_names_that_the_test_does_not_take_are_refused() -> None:
    with pytest.raises(AssertionError, match="takes every name"):
        each_case("b", [1])(lambda a: None)
