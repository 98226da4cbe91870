"""Files of a corpus: which lines are texts, and what the file of embeddings says is done."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest

from onbeat.core.errors import ConfigError
from onbeat.corpus.lines import Text, read_texts
from onbeat.corpus.output import Embeddings

LINES = b'"one"\n\n{"id": "b", "text": "two", "title": "left alone"}\n{"id": 3, "text": "three"}'


def test_texts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    for content in (LINES, gzip.compress(LINES)):
        path.write_bytes(content)
        texts = list(read_texts(path, "text"))
        assert [each[:3] for each in texts] == [(1, "one", None), (3, "two", "b"), (4, "three", 3)]
    assert len({each.digest for each in texts}) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", r"corpus.jsonl:2: not JSON .*: \{; each line must be a text in quotes, or an object"),
        (b'{"body": "x"}', r"corpus.jsonl:2: no field 'text'; the line has 'body'. Name .* with --field"),
        (b'{"text": ""}', r'corpus.jsonl:2: the text is ""; it must be a text that is not empty'),
        (b"[1]", r"corpus.jsonl:2: the text is \[1\]"),
        (b'{"text": "x", "id": [1]}', r"corpus.jsonl:2: id is \[1\]; it must be a text or a number"),
        (b'"\xff"', "corpus.jsonl:2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'"fine"\n' + line + b"\n")
    with pytest.raises(ConfigError, match=words):
        list(read_texts(path, "text"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl: No such file"):
        list(read_texts(tmp_path / "none.jsonl", "text"))


def test_a_torn_line_is_not_done(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out" / "of.jsonl"
    corpus.write_bytes(LINES)
    one, two, three = read_texts(corpus, "text")
    digests = [0, one.digest, 0, two.digest, three.digest]
    with Embeddings(out) as output:
        assert not any(output.done(digests))
        output.write([three, one], [[0.5], [1.0]])
    whole = out.read_bytes()
    out.write_bytes(whole + b'{"line": 3, "dig')
    with Embeddings(out) as output:
        assert list(output.done(digests)) == [0, 1, 0, 0, 1]
        output.write([two], [[0.25]])
    lines = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    assert [(each["line"], each.get("id"), each["embedding"]) for each in lines] == [
        (4, 3, [0.5]),
        (1, None, [1.0]),
        (3, "b", [0.25]),
    ]


@pytest.mark.parametrize("content", [b"{}\n", b'{"line":1.5,"digest":"1"}\n', b"[1]\n", b"o\n", b"other"])
def test_a_file_of_something_else_is_kept(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    with Embeddings(out) as output, pytest.raises(ConfigError, match=r"out.jsonl:1 was not written by"):
        output.done([0, 1])
    assert out.read_bytes() == content


def test_two_runs_do_not_write_at_once(tmp_path: Path) -> None:
    with (
        Embeddings(tmp_path / "out.jsonl"),
        pytest.raises(ConfigError, match="another run writes to"),
    ):
        Embeddings(tmp_path / "out.jsonl")


@pytest.mark.parametrize("line", [10**12, 2, 0, -1])
def test_a_line_that_the_corpus_lacks_takes_no_memory(tmp_path: Path, line: int) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(b'{"line":%d,"digest":"00","embedding":[]}\n' % line)
    with Embeddings(out) as output, pytest.raises(ConfigError, match="the corpus has changed"):
        output.done([0, 1])


def test_a_device_is_no_output() -> None:
    with pytest.raises(ConfigError, match="is no file"):
        Embeddings(Path("/dev/zero"))


@pytest.mark.parametrize(("embedding", "model"), [([0.5, 0.25], "m"), ("AAAAPw==", "m"), ([0.5], "n")])
def test_embeddings_of_other_options_are_not_mixed(tmp_path: Path, embedding: Any, model: str) -> None:
    out = tmp_path / "out.jsonl"
    text, other = Text(1, "a", None, 1), Text(2, "b", None, 2)
    with Embeddings(out) as output:
        output.write([text], [[0.5]], "m")
    before = out.read_bytes()
    with Embeddings(out) as output:
        assert list(output.done([0, 1, 2])) == [0, 1, 0]
        with pytest.raises(ConfigError, match="choose another --out"):
            output.write([other], [embedding], model)
    assert out.read_bytes() == before
