"""Benchmarks start: every module is imported, and every script makes its parser and its help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.policies.tables import ADDED

ROOT = Path(__file__).parents[2]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
}
SCRIPTS = [name for name, source in SOURCES.items() if "def main(" in source and "ArgumentParser(" in source]


class HelpedError(Exception):
    """The script has come to where it reads its arguments."""


def make_help(parser: argparse.ArgumentParser, *_: object) -> None:
    """Make the help of a parser and of its commands, which a stray % or a flag given twice would break."""
    parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                make_help(command)


@pytest.fixture(autouse=True, scope="module")
def _policies_as_before() -> Iterator[None]:
    """Take back what benchmarks register when they are imported."""
    with ExitStack() as tables:
        for table, _ in ADDED:
            tables.enter_context(patch.dict(table))
        yield


@pytest.mark.parametrize("name", SOURCES)
def test_a_benchmark_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("flashinfer", "triton", "vllm"):
            raise
        pytest.skip(str(error))

    def parse_args(parser: argparse.ArgumentParser, *_: object) -> None:
        make_help(parser)
        raise HelpedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    if name in SCRIPTS:
        with pytest.raises(HelpedError):
            module.main()


def test_the_readme_names_every_script() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    names = {name.removesuffix(".__main__").rpartition(".")[2] for name in SCRIPTS}
    assert sorted(name for name in names if f"`{name}" not in text) == []
