"""Files that users give, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from onbeat.core.errors import ConfigError
from onbeat.files import read_csv, read_text, read_yaml


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_text_may_be_packed_and_begin_with_a_mark(tmp_path: Path) -> None:
    assert read_text(write(tmp_path / "a", "\ufeffx")) == "x"
    assert read_text(write(tmp_path / "b", gzip.compress(b"x"))) == "x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not UTF-8 text .byte 0."),
        (gzip.compress(b"x" * 99, mtime=0)[:-9], "the gzip file is damaged"),
        (None, "No such file"),
    ],
    ids=["encoding", "gzip", "missing"],  # not made of the bytes
)
def test_what_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        write(path, content)
    for read in (read_text, read_yaml):
        with pytest.raises(ConfigError, match=f"^cannot read the prices in {path}: .*{message}"):
            read(path, "the prices in")


def test_yaml_that_is_none_is_told_in_one_line_with_what_else_could_be_meant(tmp_path: Path) -> None:
    for content in ("a: [", "!!python/object/apply:os.getcwd []"):
        with pytest.raises(ConfigError, match=r"^cannot read \S+: .*; or a class\?$") as caught:
            read_yaml(write(tmp_path / "x.yaml", content), hint="; or a class?")
        assert "\n" not in str(caught.value)


def test_rows_of_a_table_come_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "a, b,c\n1, 2,3\n\n4,5,6\n")
    rows = list(read_csv(path, columns=("b", "a")))
    assert rows == [(2, {"a": "1", "b": "2", "c": "3"}), (4, {"a": "4", "b": "5", "c": "6"})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"lacks the column a; it has no header\. Give a table"),
        ("b,c\n1,2\n", r"lacks the column a; it has b, c\. Give a table"),
        ("a,b\n1,2\n", "lacks the column c"),
        ("a\n", "has a header but no steps"),
        ("a,x\n1,2\n3\n", "line 3: the header names 2 columns, this line has another number"),
        ("a,x\n1,2,3\n", "line 2: the header names 2 columns"),
        ('a,x\n1,"2\n', "after line 1: unexpected end of data"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "x.csv", text)
    with pytest.raises(ConfigError, match=message) as caught:
        list(read_csv(path, columns=("a",), together=("b", "c"), rows="steps", hint="Give a table"))
    assert str(path) in str(caught.value)
