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
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import asdict
from tokenizers import AddedToken, Tokenizer

from onbeat.core.errors import ConfigError, ModelLoadError
from onbeat.files import read
from onbeat.text.gguf_tokenizer import set_sequence_marks
from onbeat.typed import Whole, take


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
    bos = _token_id(backend, named, "bos_token")
    eos = _token_id(backend, named, "eos_token")
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
        raise ModelLoadError(f"{error}{_HINT}") from error


class _AddedToken(Struct):
    content: str
    lstrip: bool | UnsetType = UNSET
    rstrip: bool | UnsetType = UNSET
    normalized: bool | UnsetType = UNSET
    single_word: bool | UnsetType = UNSET
    special: bool | UnsetType = UNSET


class _Content(Struct):
    content: str | None = None


class _Template(Struct):
    name: str
    template: str | None = None


_TOKEN_ID = Annotated[int, Meta(ge=0, lt=10**9)]
_HINT = "; fetch the file again"


def _take(kind: Any, table: dict[str, Any], key: str, file: str | Path = "tokenizer_config.json") -> Any:
    try:
        return take(kind, table, key, str(file), hint=_HINT)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error


def _config_tokens(config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return tokenizer_config.json's own tokens, by id."""
    listed = _take(dict[_TOKEN_ID, _AddedToken], config, "added_tokens_decoder") or {}
    return {
        token_id: AddedToken(**{key: each for key, each in asdict(token).items() if each is not UNSET})
        for token_id, token in listed.items()
    }


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


def _token_id(backend: Tokenizer, config: dict[str, Any], key: str) -> int | None:
    """Return the id of a token that is given by its name, or by an object with its name as `content`."""
    token = _take(str | _Content, config, key)
    name = token.content if isinstance(token, _Content) else token
    return None if name is None else backend.token_to_id(name)


def _apply_mark_flags(backend: Tokenizer, config: dict[str, Any]) -> None:
    """Let add_bos_token and add_eos_token, where given, decide what encoding adds."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    marks: dict[str, tuple[str, int] | None] = {"bos": None, "eos": None}
    for mark in marks:
        token_id = _token_id(backend, config, f"{mark}_token")
        if config.get(f"add_{mark}_token") and token_id is not None:
            marks[mark] = (str(backend.id_to_token(token_id)), token_id)
    set_sequence_marks(backend, **marks)


def _model_eos_ids(path: Path) -> list[int]:
    generation = path / "generation_config.json"
    file = generation if generation.is_file() else path / "config.json"
    ids = _take(Whole | list[Whole], _read_json(file), "eos_token_id", file)
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """Return chat_template.jinja, else tokenizer_config.json's template; of several the one named default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {file}: {error}; fetch the file again") from error
    template: str | list[_Template] | None = _take(str | list[_Template], config, "chat_template")
    if isinstance(template, list):
        return {each.name: each.template for each in template}.get("default")
    return template
