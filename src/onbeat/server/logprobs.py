"""Log-probabilities in OpenAI's two forms: of chat, and of text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onbeat.core.protocols import Tokenizer
from onbeat.core.request import TokenLogprobs
from onbeat.server.generation import ShownToken

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks (OpenAI's value)."""


def chat_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    return {"content": [_chat_entry(token, tokenizer) for token in tokens], "refusal": None}


def _chat_entry(token: ShownToken, tokenizer: Tokenizer) -> dict[str, Any]:
    values = _values(token)
    top = zip(values.top_token_ids, values.top_logprobs, strict=True)
    return {
        **_chat_token(values.token_id, values.logprob, tokenizer),
        "top_logprobs": [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in top],
    }


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `logprobs` object of a text completion."""
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in tokens],
        "token_logprobs": [max(_values(token).logprob, _LOWEST) for token in tokens],
        "top_logprobs": [_completion_top(_values(token), tokenizer) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _completion_top(values: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    top = dict(zip(map(tokenizer.token_text, values.top_token_ids), values.top_logprobs, strict=True))
    top.setdefault(tokenizer.token_text(values.token_id), values.logprob)
    return {text: max(logprob, _LOWEST) for text, logprob in top.items()}


def _values(token: ShownToken) -> TokenLogprobs:
    assert token.logprobs is not None, "the engine was asked for log-probabilities"
    return token.logprobs
