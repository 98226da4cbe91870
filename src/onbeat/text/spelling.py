"""How a vocabulary spells bytes: the byte alphabet of GPT-2, or SentencePiece's marks.

Both are read off the tokenizer's decoder, so that joining the bytes of the tokens and decoding them as UTF-8
is what the decoder does.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

from onbeat.core.errors import ModelLoadError

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Protocol):
    """Turns a token's name in the vocabulary into the bytes it stands for."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space at the start of the decoded text is not part of it."""
        ...

    def to_bytes(self, token: str) -> bytes: ...


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


class ByteLevelSpelling:
    """One character per byte; an added token that uses other characters stands for itself."""

    strips_leading_space = False

    def to_bytes(self, token: str) -> bytes:
        try:
            return bytes([_BYTE_ALPHABET[character] for character in token])
        except KeyError:
            return token.encode()


@dataclass(frozen=True, slots=True)
class SentencePieceSpelling:
    """A mark for the space, and `<0xNN>` for single bytes."""

    strips_leading_space: bool
    has_byte_tokens: bool

    def to_bytes(self, token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if self.has_byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(_SPACE, " ").encode()


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    """Find out how a tokenizer spells bytes.

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
        return ByteLevelSpelling()
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and all(map(_is_known_step, steps)):
        return SentencePieceSpelling(
            strips_leading_space=any(map(_strips_leading_space, steps)),
            has_byte_tokens="ByteFallback" in kinds,
        )
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
