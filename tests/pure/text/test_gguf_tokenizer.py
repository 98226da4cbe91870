"""Tokenizers from tiny GGUF files: what their keys mean, and what broken files get."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ModelLoadError
from onbeat.text.gguf_tokenizer import scheme_named
from onbeat.text.stream import TextStream
from onbeat.text.tokenizer import VocabularyTokenizer, load_tokenizer
from tests.examples import examples
from tests.pure.text.tiny_gguf import byte_level_keys, sentencepiece_keys, write_gguf

EXCLUDED = "▁<\n"
"""Spaces in disguise, and beginnings of whole tokens, after which SentencePiece adds a space."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def load(folder: Path, keys: dict[str, Any]) -> VocabularyTokenizer:
    return load_tokenizer(write_gguf(folder / "model.gguf", keys))


def pieces(tokenizer: VocabularyTokenizer, text: str, *, add_special_tokens: bool = False) -> list[bytes]:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return [tokenizer.token_bytes(token_id) for token_id in ids]


def test_byte_level(folder: Path):
    tokenizer = load(folder, byte_level_keys())
    assert tokenizer.vocab_size == 3 + 256 + 7
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (0, 1))
    assert tokenizer.special_token_ids == {0, 1}
    assert tokenizer.chat_template == "{{ messages }}"
    assert pieces(tokenizer, "hello hello") == [b"hello", b" hello"]
    assert pieces(tokenizer, "é") == [b"\xc3", b"\xa9"]
    assert pieces(tokenizer, "hello<|im_end|><think>") == [b"hello", b"<|im_end|>", b"<think>"]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == "<think>"
    assert tokenizer.decode([1, 2], skip_special_tokens=False) == "<|im_end|><think>"
    assert tokenizer.token_text(tokenizer.encode("é")[0]) == "\ufffd"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "12", [b"1", b"2"]),
        ("smollm", "  1", [b"  ", b"1"]),
        ("gpt-2", "12", [b"12"]),
        ("gpt-2", "  1", [b" ", b" ", b"1"]),
        ("default", "12", [b"12"]),
        (None, "12", [b"12"]),
        ("qwen2", "12", [b"1", b"2"]),
        ("qwen2", "e\u0301", [b"\xc3", b"\xa9"]),  # composed before it is cut
        ("llama-bpe", "12", [b"12"]),
        ("tekken", "12", [b"1", b"2"]),
    ],
)
def test_pre_tokenizers(folder: Path, pre: str | None, text: str, expected: list[bytes]):
    assert pieces(load(folder, byte_level_keys(pre=pre)), text) == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-4o", "myHTTPServer's 1234", ["my", "HTTPServer's", " ", "123", "4"]),
        ("tekken", "myServer's 12", ["my", "Server", "'s", " ", "1", "2"]),
        ("qwen2", "न\N{DEVANAGARI SIGN VIRAMA}स 12", ["न", "\N{DEVANAGARI SIGN VIRAMA}स", " ", "1", "2"]),
        ("qwen35", "न\N{DEVANAGARI SIGN VIRAMA}स 12", ["न\N{DEVANAGARI SIGN VIRAMA}स", " ", "1", "2"]),
        ("dbrx", "it's 1234", ["it", "'s", " ", "123", "4"]),
        ("glm4", "it's 1234", ["it", "'s", " ", "123", "4"]),
        ("command-r", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("olmo", "it's 12", ["it", "'s", " 12"]),
    ],
)
def test_where_text_is_cut(pre: str, text: str, expected: list[str]):
    cut = scheme_named(pre).pre_tokenizer(add_space_prefix=False).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [b"hello"]),
        ({"add_bos_token": True}, [b"<end>", b"hello"]),
        ({"add_eos_token": True, "eos_token_id": 1}, [b"hello", b"<|im_end|>"]),
        ({"add_space_prefix": True}, [b" hello"]),
        ({"pre": "llama-bpe"}, [b"<end>", b"hello"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [b"hello"]),
    ],
)
def test_flags_of_byte_level_files(folder: Path, changes: dict[str, Any], expected: list[bytes]):
    assert pieces(load(folder, byte_level_keys(**changes)), "hello", add_special_tokens=True) == expected


def test_sentencepiece(folder: Path):
    tokenizer = load(folder, sentencepiece_keys())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.strips_leading_space
    assert pieces(tokenizer, "hello", add_special_tokens=True) == [b"<s>", b" hello"]
    assert pieces(tokenizer, "abc") == [b" ", b"a", b"bc"]  # the better score first
    assert pieces(tokenizer, "é") == [b" ", "é".encode()]
    assert pieces(tokenizer, "ü") == [b" ", b"\xc3", b"\xbc"]  # byte fallback
    assert pieces(tokenizer, "a\n\n") == [b" ", b"a", b"\n\n"]
    assert pieces(tokenizer, "<turn>a") == [b"<turn>", b" ", b"a"]  # each stretch has its prefix
    assert pieces(tokenizer, "<0x41>")[-1] != b"A"  # bytes are never made from their names
    assert tokenizer.decode(tokenizer.encode("hello ü")) == "hello ü"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"add_space_prefix": False}, [b"<s>", b"h", b"el", b"lo"]),
        ({"add_bos_token": False}, [b" hello"]),
        ({"add_eos_token": True}, [b"<s>", b" hello", b"</s>"]),
        (
            {"model": "gemma4", "merges": ["l o"], "add_space_prefix": False},
            [b"<s>", b"h", b"e", b"l", b"lo"],
        ),
    ],
)
def test_flags_of_sentencepiece_files(folder: Path, changes: dict[str, Any], expected: list[bytes]):
    assert pieces(load(folder, sentencepiece_keys(**changes)), "hello", add_special_tokens=True) == expected


def test_runs_of_spaces_are_found_in_sentencepiece_text(folder: Path):
    tokenizer = load(folder, sentencepiece_keys(add_space_prefix=False))
    assert pieces(tokenizer, "a  b") == [b"a", b"  ", b"b"]


@pytest.fixture(scope="module", params=[byte_level_keys, sentencepiece_keys], ids=["gpt2", "llama"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> VocabularyTokenizer:
    return load(tmp_path_factory.mktemp("any"), request.param())


@examples(100)
@given(text=st.text(alphabet=st.characters(exclude_characters=EXCLUDED, exclude_categories=["Cs"])))
def test_any_text_comes_back(tokenizer: VocabularyTokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@examples(100)
@given(data=st.data(), skip=st.booleans())
def test_streams_of_any_tokens_equal_their_decoding(
    tokenizer: VocabularyTokenizer, data: st.DataObject, skip: bool
):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1)))
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    text = "".join(stream.push([token_id], final=False).text for token_id in ids)
    text += stream.push([], final=True).text
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (byte_level_keys(pre="gpt-9"), r"is 'gpt-9';"),
        (byte_level_keys(model="bert"), r"'bert'; .* gpt2,"),
        (byte_level_keys(model=None), r"tokenizer\.ggml\.model is None"),
        (byte_level_keys(tokens=None), r"no tokenizer\.ggml\.tokens"),
        (byte_level_keys(merges=None), r"no tokenizer\.ggml\.merges"),
        (byte_level_keys(merges=["h zz"]), "'h' and 'zz'"),
        (byte_level_keys(token_type=[1, 1]), "2 token types"),
        (byte_level_keys(add_bos_token=True, bos_token_id=9999), "bos_token_id is 9999, outside"),
        (byte_level_keys(add_bos_token=True, bos_token_id=None), "without bos_token_id"),
        (byte_level_keys(add_bos_token="yes"), r"add_bos_token is 'yes',"),
        (sentencepiece_keys(scores=None), r"tokenizer\.ggml\.scores"),
        (sentencepiece_keys(scores=[0.0]), r"tokenizer\.ggml\.scores"),
    ],
)
def test_files_that_do_not_fit_are_named(folder: Path, keys: dict[str, Any], message: str):
    with pytest.raises(ModelLoadError, match=message):
        load(folder, keys)


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path):
    whole = write_gguf(tmp_path / "whole.gguf", byte_level_keys()).read_bytes()
    file = tmp_path / "cut.gguf"
    for length in range(0, len(whole) - 32, 97):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            load_tokenizer(file)


@examples(150)
@given(data=st.data())
def test_a_damaged_file_loads_or_is_an_error(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(write_gguf(folder / "damaged.gguf", byte_level_keys()).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "damaged.gguf").write_bytes(content)
    with contextlib.suppress(ModelLoadError):
        load_tokenizer(folder / "damaged.gguf").encode("hello 12")


def test_other_files_are_refused(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        load_tokenizer(file)
    file.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelLoadError, match="version 99"):
        load_tokenizer(file)
    with pytest.raises(ModelLoadError, match=r"none\.gguf: No such"):
        load_tokenizer(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match=r"model\.bin.* directory"):
        load_tokenizer(tmp_path / "model.bin")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_named(tmp_path: Path):
    file = write_gguf(tmp_path / "model.gguf", byte_level_keys())
    file.chmod(0)
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        load_tokenizer(file)
