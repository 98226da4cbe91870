"""Text to token ids and back, for Hugging Face directories and GGUF files.

How a vocabulary spells bytes (the byte alphabet of GPT-2, or SentencePiece's marks) is read off the
tokenizer's decoder, so that joining the bytes of the tokens and decoding them as UTF-8 is what it does.

Notes
-----
Of a Hugging Face directory the end-of-sequence tokens are tokenizer_config.json's `eos_token` and then those
of generation_config.json, which names the end-of-turn token of chat models; config.json is asked only where
there is no generation_config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import asdict
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from onbeat.core.errors import InvalidRequest, ModelLoadError
from onbeat.files import read
from onbeat.text.gguf_header import read_gguf_header
from onbeat.text.gguf_tokenizer import build_gguf_tokenizer, set_sequence_marks
from onbeat.typed import Whole, take


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialRoles:
    """What a model's files say of its tokens beyond the vocabulary.

    Parameters
    ----------
    bos_token_id : the beginning-of-sequence token.
    eos_token_ids : the tokens that end an answer, the one that the vocabulary calls end-of-sequence first.
    chat_template : jinja2 source.
    """

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def _of_hf_directory(path: Path) -> tuple[Backend, SpecialRoles]:
    """Read the tokenizer, its special tokens and the chat template."""
    backend = _read_backend(path / "tokenizer.json")
    config = _read_json(path / "tokenizer_config.json")
    named = {**_read_json(path / "special_tokens_map.json"), **config}
    _add_config_tokens(backend, _config_tokens(config))
    bos = _token_id(backend, named, "bos_token")
    eos = _token_id(backend, named, "eos_token")
    _apply_mark_flags(backend, named)
    ends = ([] if eos is None else [eos]) + _model_eos_ids(path)
    return backend, SpecialRoles(
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        chat_template=_chat_template(path, config),
    )


def _read_backend(path: Path) -> Backend:
    if not path.is_file():
        raise ModelLoadError(
            f"{path.parent} has no tokenizer.json; save one there with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return Backend.from_file(str(path))
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
    return read(dict[str, Any], path, hint=_HINT)


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
    return take(kind, table, key, str(file), hint=_HINT)


def _config_tokens(config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return tokenizer_config.json's own tokens, by id."""
    listed = _take(dict[_TOKEN_ID, _AddedToken], config, "added_tokens_decoder") or {}
    return {
        token_id: AddedToken(**{key: each for key, each in asdict(token).items() if each is not UNSET})
        for token_id, token in listed.items()
    }


def _add_config_tokens(backend: Backend, tokens: dict[int, AddedToken]) -> None:
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


def _token_id(backend: Backend, config: dict[str, Any], key: str) -> int | None:
    """Return the id of a token that is given by its name, or by an object with its name as `content`."""
    token = _take(str | _Content, config, key)
    name = token.content if isinstance(token, _Content) else token
    return None if name is None else backend.token_to_id(name)


def _apply_mark_flags(backend: Backend, config: dict[str, Any]) -> None:
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


_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of byte-level BPE stands for.

    Printable Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on.

    References
    ----------
    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token: one a character; one that uses other characters stands for itself."""
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _sentence_piece(token: str, *, has_byte_tokens: bool) -> bytes:
    """Return the bytes of a token: a mark stands for the space, and `<0xNN>` for single bytes."""
    byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _spelling_of(tokenizer: Backend) -> tuple[Callable[[str], bytes], bool]:
    """Find out how a tokenizer spells bytes.

    Returns
    -------
    What gives the bytes that a token's name in the vocabulary stands for, and whether one space at the start
    of the decoded text is not part of it.

    Raises
    ------
    ModelLoadError : its decoder is of another kind, whose text cannot be streamed token by token.
    """
    decoder = tokenizer.decoder
    if decoder is None:
        raise ModelLoadError(
            "the tokenizer has no decoder; supported are byte-level and SentencePiece vocabularies"
        )
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level, False
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and all(map(_is_known_step, steps)):
        to_bytes = partial(_sentence_piece, has_byte_tokens="ByteFallback" in kinds)
        return to_bytes, any(map(_strips_leading_space, steps))
    raise ModelLoadError(
        f"the tokenizer's decoder {' + '.join(step['type'] for step in steps)} is not supported; "
        "supported are byte-level and SentencePiece vocabularies"
    )


def _is_known_step(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "Replace":
            return bool(step["pattern"] == {"String": _SPACE} and step["content"] == " ")
        case "Strip":
            return bool(step["content"] == " " and step["start"] in (0, 1) and step["stop"] == 0)
        case "Metaspace":
            return bool(step["replacement"] == _SPACE)
    return True


def _strips_leading_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["start"] == 1)


class VocabularyTokenizer:
    """A `core.protocols.Tokenizer` over the `tokenizers` library.

    Notes
    -----
    Decoding joins the bytes of the tokens and reads them as UTF-8, each invalid part becoming one U+FFFD.
    Hence decoding can go on token by token and still give the same text. Hugging Face's decoders differ in
    one case: for SentencePiece they replace every byte of a run of byte tokens when any of it is invalid.

    Text that spells a special token is encoded to that token, as Hugging Face does by default: whoever can
    write the prompt can write `<|im_end|>`. Spaces before punctuation are never removed on decoding.

    A text that begins with the start token is not given another: models have not seen two. llama.cpp leaves
    out a chat template's likewise; Hugging Face and vLLM send both.
    """

    def __init__(self, backend: Backend, roles: SpecialRoles) -> None:
        backend.no_truncation()  # a tokenizer.json may carry both; a prompt is never cut silently
        backend.no_padding()
        self._backend = backend
        self.bos_token_id, self.eos_token_ids = roles.bos_token_id, roles.eos_token_ids
        self.chat_template = roles.chat_template
        self._to_bytes, self.strips_leading_space = _spelling_of(backend)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added), 0)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Safe to call from several threads, which all run meanwhile.

        Raises
        ------
        InvalidRequest : the text holds half a surrogate pair, which is not Unicode text; or the tokenizer
            gives up on it.
        """
        token_ids = self._encode(text, add_special_tokens=add_special_tokens)
        start = [self.bos_token_id]
        if add_special_tokens and token_ids[:2] == start * 2:
            # Some vocabularies have a start token that is only written: no text is given one.
            is_given = self._encode("", add_special_tokens=True)[:1] == start
            token_ids = token_ids[is_given:]
        return token_ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # a batch: `encode` holds the interpreter lock; the fast one: offsets are not needed
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(
                "the text is not valid Unicode: it holds half a surrogate pair; send whole characters"
            ) from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InvalidRequest(f"this model's tokenizer gives up on the text: {error}") from error
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids that the vocabulary lacks stand for nothing."""
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_token_ids]
        text = b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for (special tokens: their name in UTF-8)."""
        if (known := self._bytes.get(token_id)) is not None:
            return known
        token = self.token_entry(token_id)
        return self._bytes.setdefault(token_id, self._to_bytes(token)) if token else b""

    def token_entry(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, such as `Ġis`; empty where it has no such token."""
        return (self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None) or ""

    def token_text(self, token_id: int) -> str:
        """Return a token as shown in logprobs: its bytes as UTF-8, undecodable bytes replaced."""
        return self.token_bytes(token_id).decode(errors="replace")


def load_tokenizer(path: Path) -> VocabularyTokenizer:
    """Load a model's tokenizer.

    Parameters
    ----------
    path : a Hugging Face directory (with tokenizer.json), or a `.gguf` file.

    Raises
    ------
    ConfigError : the files are missing, damaged, or of a kind that is not supported.
    """
    if not path.is_dir() and path.suffix != ".gguf":
        raise ModelLoadError(
            f"no tokenizer at {path}: give a directory with a tokenizer.json, or a .gguf file"
        )
    backend, roles = _of_hf_directory(path) if path.is_dir() else _of_gguf(path)
    try:
        return VocabularyTokenizer(backend, roles)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _of_gguf(path: Path) -> tuple[Backend, SpecialRoles]:
    metadata = read_gguf_header(path).metadata
    backend = build_gguf_tokenizer(metadata, path)
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    template = metadata.get("tokenizer.chat_template")
    roles = SpecialRoles(
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if isinstance(end, int))),
        chat_template=template if isinstance(template, str) else None,
    )
    return backend, roles
