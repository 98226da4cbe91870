"""Log-probabilities in answers: of a chat's tokens, of a text completion's, and of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec import Raw, Struct

from onbeat.core.request import TokenLogprobs
from onbeat.core.tokenizer import Tokenizer
from onbeat.server.choices import ShownToken
from onbeat.server.pieces import Long, Piece, encode, json_inside, written
from onbeat.text.stream import TextStream

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks (OpenAI's value)."""
_CACHED_TOKENS = 2**15
"""Tokens whose spelling is kept ready, of a server: the same ones come up as alternatives again and again."""
_TOKENS_AT_ONCE = 64
"""Of a prompt, of which is told before others of the event loop have their turn."""


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """One token at a place of the prompt: the prompt's own, or one of the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id; null for the first token, before which there is none."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that goes before its answers."""

    text: str
    token_ids: Sequence[int] = ()
    offsets: Sequence[int] = ()
    """For each token, the character of the text at which it begins; empty where nobody asks."""


def token_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return for each token of a prompt the character of its text at which it begins.

    Special tokens that the server has put before a text are not part of it, those that the caller wrote are.
    """
    for skips in (True, False):
        decoded = TextStream(tokenizer, skip_special_tokens=skips).push(token_ids, final=True)
        if decoded.text == text:
            break
    added = len(decoded.text) - len(text) if decoded.text.endswith(text) else 0
    return [min(max(offset - added, 0), len(text)) for offset in decoded.token_offsets]


class LogprobWriter:
    """Writes log-probabilities in the answers of one server.

    Parameters
    ----------
    tokenizer : the model's.
    as_ids : whether tokens of answers are named by their ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._of_chat = lru_cache(_CACHED_TOKENS)(self._spelled)
        self._of_text = lru_cache(_CACHED_TOKENS)(self._named)
        self._of_prompt = lru_cache(_CACHED_TOKENS)(self._shown)

    def _shown(self, token_id: int) -> Any:
        return Raw(encode(self._tokenizer.token_text(token_id)))

    def _spelled(self, token_id: int) -> tuple[Any, Any]:
        """Return the text and the bytes of a token, as JSON."""
        text = f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)
        return Raw(encode(text)), Raw(encode(list(self._tokenizer.token_bytes(token_id))))

    def _named(self, token_id: int) -> str:
        """Return a token's text; of one that is no whole characters its bytes, as OpenAI names it."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode("ascii", errors="backslashreplace")

    def chat_columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:
        """Return the inside of `logprobs.content`."""
        return (b",".join(encode(self._entry(token.known_logprobs)) for token in tokens),)

    def _entry(self, report: TokenLogprobs) -> TokenLogprob:
        others = zip(report.top_token_ids, report.top_logprobs, strict=True)
        top = [self._top(token_id, logprob) for token_id, logprob in others]
        text, data = self._of_chat(report.token_id)
        return TokenLogprob(text, max(report.logprob, _LOWEST), data, top)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        text, data = self._of_chat(token_id)
        return TopLogprob(text, max(logprob, _LOWEST), data)

    def text_columns(self, reports: Sequence[TokenLogprobs], offsets: Sequence[int]) -> Sequence[bytes]:
        """Return the insides of a text completion's arrays.

        Parameters
        ----------
        reports : of the tokens.
        offsets : where they begin in the text.
        """
        return (
            json_inside([self._of_text(report.token_id) for report in reports]),
            json_inside([max(report.logprob, _LOWEST) for report in reports]),
            json_inside(list(map(self._by_name, reports))),
            json_inside(list(offsets)),
        )

    def _by_name(self, report: TokenLogprobs) -> dict[str, float]:
        """Return values by name: the token's own first, and of others of one name the likelier's."""
        top = {self._of_text(report.token_id): report.logprob}
        for token_id, logprob in zip(report.top_token_ids, report.top_logprobs, strict=True):
            top.setdefault(self._of_text(token_id), logprob)  # the most likely comes first
        return {name: max(logprob, _LOWEST) for name, logprob in top.items()}

    def echo_columns(self, echo: Echo, reports: Sequence[TokenLogprobs]) -> Iterator[Sequence[bytes]]:
        """Yield the same of parts of a prompt, of whose first token nothing is known."""
        first = json_inside([self._of_text(echo.token_ids[0])])
        yield first, b"null", b"null", json_inside([echo.offsets[0]])
        for start in range(0, len(reports), _TOKENS_AT_ONCE):
            end = start + _TOKENS_AT_ONCE
            yield self.text_columns(reports[start:end], echo.offsets[start + 1 : end + 1])

    def of_prompt(self, reports: Sequence[TokenLogprobs] | None) -> Any:
        """Return `prompt_logprobs`: null for the first token, then values by id; None where nobody asked."""
        return None if reports is None else Long(self._of_prompt_tokens(reports))

    def _of_prompt_tokens(self, reports: Sequence[TokenLogprobs]) -> Iterator[Piece]:
        yield b"[null"
        for report in reports:
            ranked = zip(report.top_token_ids, report.top_logprobs, strict=True)
            others = [(*each, rank) for rank, each in enumerate(ranked, 1) if each[0] != report.token_id]
            own = (report.token_id, report.logprob, report.rank or 0)
            yield b"," + encode(
                {
                    token_id: PromptLogprob(max(logprob, _LOWEST), rank, self._of_prompt(token_id))
                    for token_id, logprob, rank in (own, *others)
                }
            )
        yield b"]"


def chat_logprobs(columns: Sequence[Piece]) -> ChatLogprobs | None:
    """Return the field `logprobs` of a chat; None where nobody asked."""
    return ChatLogprobs(written(b"[", *columns, b"]")) if columns else None


def text_logprobs(columns: Sequence[Piece]) -> CompletionLogprobs | None:
    """Return the field `logprobs` of a text completion; None where nobody asked."""
    return CompletionLogprobs(*(written(b"[", column, b"]") for column in columns)) if columns else None


def joined(*columns: Sequence[Piece]) -> list[bytes]:
    """Return columns behind one another; one without tokens is empty."""
    return [b",".join(filter(None, parts)) for parts in zip(*columns, strict=True)]
