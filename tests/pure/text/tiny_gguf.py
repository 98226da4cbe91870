"""Tiny vocabularies, written as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTE_ALPHABET = [chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]] + [
    chr(0x100 + i) for i in range(68)
]


def write_gguf(path: Path, keys: dict[str, Any]) -> Path:
    """Write a file with these `tokenizer.*` keys and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = f"tokenizer.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_keys(**changes: Any) -> dict[str, Any]:
    """Byte-level BPE: `<end>`, `<|im_end|>`, `<think>`, every byte, and a few merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ hello", "1 2"]
    tokens = ["<end>", "<|im_end|>", "<think>", *BYTE_ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    types = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3)
    keys = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": merges,
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 0,
        "ggml.eot_token_id": 1,
        "chat_template": "{{ messages }}",
    }
    return {key: value for key, value in {**keys, **_renamed(changes)}.items() if value is not None}


def sentencepiece_keys(**changes: Any) -> dict[str, Any]:
    """SentencePiece BPE: marks, user-defined white space, every byte, and pieces with scores."""
    pieces = ["▁h", "el", "lo", "▁hel", "▁hello", "ab", "bc", "▁", "h", "e", "l", "o", "a", "b", "c", "é"]
    marks = ["<unk>", "<s>", "</s>", "<turn>", "  ", "\n\n"]
    tokens = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED] + [BYTE] * 256
    scores = [-1000.0] * 6 + [0.0] * 256 + [-float(i) for i in range(len(pieces))]
    scores[tokens.index("bc")] = -0.5  # better than "ab", which stands before it
    keys = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": scores,
        "ggml.token_type": types + [NORMAL] * len(pieces),
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }
    return {key: value for key, value in {**keys, **_renamed(changes)}.items() if value is not None}


def _renamed(changes: dict[str, Any]) -> dict[str, Any]:
    return {f"ggml.{name}": value for name, value in changes.items()}
