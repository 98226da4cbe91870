"""The tokenizer files of a Hugging Face model directory.

Notes
-----
The end-of-sequence tokens are tokenizer_config.json's `eos_token` and then those of generation_config.json,
which names the end-of-turn token of chat models; config.json is asked only where there is no
generation_config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from onbeat.core.errors import ConfigError, ModelLoadError, quoted
from onbeat.files import read
from onbeat.text.gguf_tokenizer import set_sequence_marks

_TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfTokenizerFiles:
    """What a directory says about text."""

    backend: Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def read_hf_directory(path: Path) -> HfTokenizerFiles:
    """Read the tokenizer, its special tokens and the chat template.

    Raises
    ------
    ModelLoadError : tokenizer.json is missing, or one of the files is damaged.
    """
    backend = _read_backend(path / "tokenizer.json")
    config = _read_json(path / "tokenizer_config.json")
    named = {**_read_json(path / "special_tokens_map.json"), **config}
    _add_config_tokens(backend, _config_tokens(config))
    bos = _token_id(backend, named.get("bos_token"))
    eos = _token_id(backend, named.get("eos_token"))
    _apply_mark_flags(backend, named)
    ends = ([] if eos is None else [eos]) + _model_eos_ids(path)
    return HfTokenizerFiles(
        backend=backend,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        chat_template=_chat_template(path, config),
    )


def _read_backend(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelLoadError(
            f"{path.parent} has no tokenizer.json; save one there with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return Tokenizer.from_file(str(path))
    except BaseException as error:
        # The tokenizers library raises bare exceptions, and panics of its own kind.
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ModelLoadError(f"cannot read {path}: {error}; fetch the file again") from error


def is_panic(error: BaseException) -> bool:
    """Return whether the tokenizers library has given up; what it raises then is no `Exception`."""
    return type(error).__name__ == "PanicException"


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one where the (optional) file does not exist."""
    if not path.is_file():
        return {}
    try:
        return read(dict[str, Any], path)
    except ConfigError as error:
        raise ModelLoadError(f"{error}; fetch the file again") from error


def _config_tokens(config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return tokenizer_config.json's own tokens, by id."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise _wrong("added_tokens_decoder", listed, "an object of tokens by id")
    tokens = {}
    for key, fields in listed.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise _wrong("a key of added_tokens_decoder", key, "a token id")
        if not (isinstance(fields, dict) and isinstance(fields.get("content"), str)):
            raise _wrong(f"added_tokens_decoder.{key}", fields, "an object with a text as its content")
        options = {flag: fields[flag] for flag in _TOKEN_FLAGS if flag in fields}
        if not all(isinstance(value, bool) for value in options.values()):
            raise _wrong(f"added_tokens_decoder.{key}", options, "flags that are true or false")
        tokens[int(key)] = AddedToken(fields["content"], **options)
    return tokens


def _wrong(
    name: str, value: Any, expected: str, file: str | Path = "tokenizer_config.json"
) -> ModelLoadError:
    return ModelLoadError(f"{file}: {name} is {quoted(value)}, not {expected}; fetch the file again")


def _add_config_tokens(backend: Tokenizer, tokens: dict[int, AddedToken]) -> None:
    """Add the tokens that only tokenizer_config.json has, in the order of their ids."""
    known = backend.get_added_tokens_decoder()
    for token_id in sorted(tokens.keys() - known.keys()):
        token = tokens[token_id]
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise ModelLoadError(
                f"tokenizer_config.json gives token {token.content!r} the id {token_id}, "
                f"tokenizer.json {backend.token_to_id(token.content)}; fetch both files again"
            )


def _token_id(backend: Tokenizer, token: Any) -> int | None:
    """Return the id of a token that is given by its name, or by an object with its name as `content`."""
    name = token.get("content") if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise _wrong("a special token", token, "a text, or an object with a text as its content")
    return None if name is None else backend.token_to_id(name)


def _apply_mark_flags(backend: Tokenizer, config: dict[str, Any]) -> None:
    """Let add_bos_token and add_eos_token, where given, decide what encoding adds."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    marks: dict[str, tuple[str, int] | None] = {"bos": None, "eos": None}
    for mark in marks:
        token_id = _token_id(backend, config.get(f"{mark}_token"))
        if config.get(f"add_{mark}_token") and token_id is not None:
            marks[mark] = (str(backend.id_to_token(token_id)), token_id)
    set_sequence_marks(backend, **marks)


def _model_eos_ids(path: Path) -> list[int]:
    generation = path / "generation_config.json"
    content = _read_json(generation if generation.is_file() else path / "config.json")
    ids = content.get("eos_token_id")
    if ids is None:
        return []
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        file = generation if generation.is_file() else path / "config.json"
        raise _wrong("eos_token_id", content["eos_token_id"], "a token id, or a list of them", file)
    return ids


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """Return chat_template.jinja, else tokenizer_config.json's template; of several the one named default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {file}: {error}; fetch the file again") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in template):
            raise _wrong("chat_template", template, "a text, or a list of objects with name and template")
        template = {entry["name"]: entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise _wrong("chat_template", template, "a text, or a list of objects with name and template")
    return template
