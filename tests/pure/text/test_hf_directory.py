"""Tokenizers from Hugging Face directories: special tokens, templates, damaged files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from onbeat.core.errors import ConfigError, InvalidRequest, ModelLoadError
from onbeat.text.tokenizer import VocabularyTokenizer, load_tokenizer
from tests.pure.text.tiny_gguf import BYTE_ALPHABET

NAMES = ["<s>", "</s>", "<|eot|>"]


def save(folder: Path, *, special: list[str] = NAMES, decoder: Any = None, **files: Any) -> Path:
    """Write tokenizer.json, and each keyword as a JSON file of that name."""
    vocab = {token: token_id for token_id, token in enumerate([*NAMES, *BYTE_ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.enable_truncation(max_length=2)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path, **files: Any) -> VocabularyTokenizer:
    return load_tokenizer(save(folder, **files))


def test_a_directory_with_nothing_but_the_vocabulary(tmp_path: Path):
    tokenizer = load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (None, (), None)
    assert tokenizer.vocab_size == 3 + 256
    assert tokenizer.decode(tokenizer.encode("long é <s>text")) == "long é text"  # not truncated either


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "</s>"}}, (1,)),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "special": True}}}, (1,)),
        ({"special_tokens_map": {"eos_token": "</s>"}}, (1,)),
        ({"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {"eos_token": "</s>"}}, (1,)),
        ({"config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [1, 2]}}, (1, 2)),
        (
            {"tokenizer_config": {"eos_token": "<|eot|>"}, "generation_config": {"eos_token_id": [1, 2]}},
            (2, 1),
        ),
        ({"tokenizer_config": {"eos_token": None}}, ()),
    ],
)
def test_end_tokens(tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]):
    assert load(tmp_path, **files).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bos_token": "<s>"}, "a"),
        ({"bos_token": "<s>", "add_bos_token": False}, "a"),
        ({"bos_token": "<s>", "add_bos_token": True}, "<s>a"),
        ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}, "<s>a</s>"),
        ({"add_bos_token": True}, "a"),
    ],
)
def test_marks_around_the_text(tmp_path: Path, config: dict[str, Any], expected: str):
    tokenizer = load(tmp_path, tokenizer_config=config)
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == expected
    assert tokenizer.decode(tokenizer.encode("a", add_special_tokens=False), skip_special_tokens=False) == "a"


def test_chat_template_of_the_configuration(tmp_path: Path):
    assert load(tmp_path, tokenizer_config={"chat_template": "A"}).chat_template == "A"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert load(tmp_path, tokenizer_config={"chat_template": named}).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("é {{ messages }}", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "é {{ messages }}"


def test_tokens_that_only_the_configuration_has(tmp_path: Path):
    listed = {"259": {"content": "<think>", "special": False}, "260": {"content": "<pad>", "special": True}}
    tokenizer = load(tmp_path, tokenizer_config={"added_tokens_decoder": listed})
    assert tokenizer.encode("<think>") == [259]
    assert tokenizer.special_token_ids == {0, 1, 2, 260}
    assert tokenizer.vocab_size == 261


def test_tokens_with_gaps_between_ids_are_refused(tmp_path: Path):
    listed = {"300": {"content": "<far>"}}
    with pytest.raises(ModelLoadError, match=r"'<far>'.*300.*tokenizer\.json.*259"):
        load(tmp_path, tokenizer_config={"added_tokens_decoder": listed})


def test_damaged_files_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_vocabularies_that_cannot_be_streamed_are_refused(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="WordPiece"):
        load(tmp_path, decoder=decoders.WordPiece())


VALUES: list[Any] = [None, True, 0, -1, 2, 10**30, 1.5, "", "x", "</s>", [], [1], ["x"], [None], {}, {"a": 1}]
TOKEN = {"content": "<think>", "special": False}


def mutants(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value with another value in one place."""
    yield from VALUES
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {name: entry for name, entry in value.items() if name != key}
            yield {**{name: entry for name, entry in value.items() if name != key}, "other": inner}
            yield from ({**value, key: mutant} for mutant in mutants(inner))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from ([*value[:index], mutant, *value[index + 1 :]] for mutant in mutants(inner))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "tokenizer_config",
            {
                "bos_token": "<s>",
                "eos_token": {"content": "</s>", "special": True},
                "add_bos_token": True,
                "add_eos_token": False,
                "added_tokens_decoder": {"259": TOKEN},
                "chat_template": [{"name": "default", "template": "{{ messages }}"}],
            },
        ),
        ("special_tokens_map", {"bos_token": "<s>", "eos_token": {"content": "</s>"}}),
        ("generation_config", {"eos_token_id": [1, 2]}),
        ("config", {"eos_token_id": 2}),
    ],
)
def test_values_of_wrong_types_are_used_or_refused_in_words(tmp_path: Path, name: str, content: Any):
    save(tmp_path)
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(content))
    load_tokenizer(tmp_path)
    refusals = []
    for mutant in mutants(content):
        file.write_text(json.dumps(mutant))
        try:
            load_tokenizer(tmp_path).encode("long <think> text")
        except ConfigError as error:
            refusals.append(str(error))
    assert len(refusals) >= 10
    assert all("fetch the file" in refusal or "fetch both" in refusal for refusal in refusals)


class PanicException(BaseException):
    pass


def panic(*_: Any, **__: Any) -> Any:
    raise PanicException("regex: the limit was reached")


def test_a_tokenizer_that_panics_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path)
    monkeypatch.setattr(Tokenizer, "from_file", panic)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: regex"):
        load_tokenizer(tmp_path)


def test_a_text_that_the_tokenizer_gives_up_on_is_refused(tmp_path: Path):
    """A look-around makes the regex library backtrack, and it does so only a million times."""
    split = {"type": "Split", "pattern": {"Regex": "(?=(a+)+b)x"}, "behavior": "Isolated", "invert": False}
    save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pre_tokenizer": split}))
    with pytest.raises(InvalidRequest, match="gives up"):
        load_tokenizer(tmp_path).encode("a" * 40)


def test_an_interrupt_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    save(tmp_path)
    monkeypatch.setattr(Tokenizer, "from_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(tmp_path)
