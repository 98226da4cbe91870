"""Files that users give, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.files import csv_rows, read, read_bytes, read_text


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
    for reader in (read_text, partial(read, Any)):
        with pytest.raises(ConfigError, match=f"the prices in {path}: .*{message}"):
            reader(path, "the prices in")


def test_yaml_that_is_none_is_told_in_one_line_with_what_else_could_be_meant(tmp_path: Path) -> None:
    for content in ("a: [", "!!python/object/apply:os.getcwd []"):
        with pytest.raises(ConfigError, match=r" \S+x\.yaml: .*; or a class\?$") as caught:
            read(Any, write(tmp_path / "x.yaml", content), hint="; or a class?")
        assert "unicode string" not in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["port: 1\nhost: a\nport: 2", "fleet: {replicas: 1, replicas: 2}"])
def test_a_key_that_is_given_twice_is_told(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"'(port|replicas)' is given twice in line [13]"):
        read(Any, path)


def test_a_text_that_begins_like_a_number_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text("seal: 39512737e9b4b293\nrate: 1e-5\n")
    assert read(dict[str, Any], path) == {"seal": "39512737e9b4b293", "rate": 1e-5}


def test_aliases_are_taken(tmp_path: Path) -> None:
    usual = "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n"
    found = {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
    assert read(dict[str, Any], write(tmp_path / "usual.yaml", usual)) == found


@pytest.mark.parametrize(("name", "count"), [("deep.yaml", 20_000), ("deep.json", 200_000)])
def test_brackets_without_end_are_a_sentence(tmp_path: Path, name: str, count: int) -> None:
    with pytest.raises(ConfigError, match="nested") as caught:
        read(Any, write(tmp_path / name, "[" * count))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["[1]", "{", "", '{"a": 1} x', "\x00"])
def test_json_that_is_no_object_is_a_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"valid JSON|a mapping"):
        read(dict[str, Any], write(tmp_path / "x.json", text), "the profile")


@pytest.mark.parametrize("read", [read_bytes, read_text, partial(read, Any)])
def test_a_device_without_an_end_is_not_read(read) -> None:
    with pytest.raises(ConfigError, match="/dev/zero"):
        read(Path("/dev/zero"))


@pytest.mark.parametrize(
    "text", ["!!timestamp 2001-99-99", "!!int x", "!!binary 4", "? [a]\n: b", "1: &a\n2: *b"]
)
def test_values_that_yaml_cannot_make_are_a_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot read "):
        read(Any, write(tmp_path / "x.yaml", text))


def test_rows_of_a_table_come_with_their_lines(tmp_path: Path) -> None:
    rows = list(csv_rows(tmp_path, "a, b,c\n1, 2,3\n\n4,5,6\n", columns=("b", "a")))
    assert rows == [(2, {"a": "1", "b": "2", "c": "3"}), (4, {"a": "4", "b": "5", "c": "6"})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"lacks the column a; it has no header\. Give a table"),
        ("b,c\n1,2\n", r"lacks the column a; it has b, c\. Give a table"),
        ("a,b\n1,2\n", "lacks the column c"),
        ("a\n", "has a header but no steps"),
        ("a,x\n1,2\n3\n", r"line 3: .* 2"),
        ("a,x\n1,2,3\n", r"line 2: .* 2"),
        ('a,x\n1,"2\n', "after line 1: unexpected end of data"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(ConfigError, match=message) as caught:
        list(csv_rows(path, text, columns=("a",), together=("b", "c"), rows="steps", hint="Give a table"))
    assert str(path) in str(caught.value)


def test_the_empty_device_is_empty() -> None:
    assert read_bytes(Path("/dev/null")) == b""


@pytest.mark.parametrize("name", ["f", "f.json", "f.yaml"])
def test_a_number_that_is_beyond_any_float_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(f'{{"a": 1{"0" * 400}}}')
    with pytest.raises(ConfigError, match="300 digits"):
        read(Any, path)
