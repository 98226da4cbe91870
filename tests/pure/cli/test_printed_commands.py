"""Every command of onbeat that a document prints is one: its flags are known, and take the values given."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from onbeat.cli.args import parse
from onbeat.cli.main import build_parser
from onbeat.cli.options import read_options
from onbeat.cluster.fleet_options import FleetOptions
from onbeat.scheduler.replica.token_budget import settle
from onbeat.scheduler.scheduler_config import SchedulerLimits
from tests.many_cases import each_case
from tests.printed import DOCUMENTS, commands, prepare

SHELL = {"|", ">", "&", "&&"}


def arguments(command: str) -> list[str] | None:
    """Return the arguments of a command of onbeat, without what the shell takes and a `...` for more."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        del words[0]
    if words[:1] != ["onbeat"]:
        return None
    end = next((index for index, word in enumerate(words) if word in SHELL), len(words))
    return [word for word in words[1:end] if word != "..."]


PRINTED = [
    (path.name, found)
    for path in DOCUMENTS
    for command in commands(path.read_text())
    if (found := arguments(command))
]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    shutil.copy(tmp_path / "fleet.yaml", tmp_path / "plan.yaml")  # `onbeat plan` writes it
    monkeypatch.chdir(tmp_path)


@each_case(("name", "words"), PRINTED)
def test_a_printed_command_is_understood(fresh: None, name: str, words: list[str]) -> None:
    assert parse(build_parser(words), words)


@each_case(("name", "words"), [(name, words) for name, words in PRINTED if words[0] == "serve"])
def test_flags_of_a_printed_server_go_together(fresh: None, name: str, words: list[str]) -> None:
    args = parse(build_parser(words), words)
    read_options(args, FleetOptions)
    assert settle(read_options(args, SchedulerLimits), num_blocks=10_000, model_len=4096)


def test_the_documents_print_some() -> None:
    assert len({name for name, _ in PRINTED}) > 15
