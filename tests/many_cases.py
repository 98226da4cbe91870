"""One test over many cases, where a test each would cost more to collect and report than to run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


class Cases:
    """What came of each case."""

    def __init__(self) -> None:
        self.num_tried = 0
        self._skipped: list[BaseException] = []
        self._failed: list[Exception] = []

    @contextmanager
    def trying(self, case: dict[str, Any]) -> Iterator[None]:
        """Remember how a case fails, and go on."""
        self.num_tried += 1
        try:
            yield
        except pytest.skip.Exception as reason:
            self._skipped.append(reason)
        except Exception as error:
            error.add_note(f"where {', '.join(f'{key}={value}' for key, value in case.items())}")
            self._failed.append(error)

    def end(self) -> None:
        """Fail where a case has failed; skip where all were skipped."""
        if len(self._failed) == 1:
            raise self._failed[0]
        if self._failed:
            raise ExceptionGroup(f"{len(self._failed)} of {self.num_tried} cases fail", self._failed)
        if len(self._skipped) == self.num_tried:
            raise self._skipped[0]


def each_case(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Run a test with each case, as `pytest.mark.parametrize` would, but within one test and its fixtures.

    All cases run. What fails is raised together, and says which cases those are.
    """
    keys = [names] if isinstance(names, str) else list(names)
    rows = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert rows
    table = [dict(zip(keys, row, strict=True)) for row in rows]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        def test_each(**fixtures: Any) -> None:
            found = Cases()
            for case in table:
                with found.trying(case):
                    test(**fixtures, **case)
            found.end()

        async def test_each_in_turn(**fixtures: Any) -> None:
            found = Cases()
            for case in table:
                with found.trying(case):
                    await test(**fixtures, **case)
            found.end()

        whole = functools.wraps(test)(test_each_in_turn if inspect.iscoroutinefunction(test) else test_each)
        signature = inspect.signature(test)
        assert signature.parameters.keys() >= set(keys), "the test takes every name"
        left = [value for name, value in signature.parameters.items() if name not in keys]
        whole.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return whole

    return decorate
