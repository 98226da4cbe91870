"""Log-probabilities of prompts in answers: vLLM's `prompt_logprobs`, and those of an `echo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import orjson

from onbeat.core.protocols import Tokenizer
from onbeat.core.request import TokenLogprobs
from onbeat.server.answer_format import CACHED_TOKENS, LOWEST_LOGPROB
from onbeat.server.pieces import Piece, json_inside
from onbeat.text.stream import TextStream

_TOKENS_AT_ONCE = 64
"""Of a prompt, of which is told before others of the event loop have their turn."""


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


class PromptLogprobsWriter:
    """Writes `prompt_logprobs`: null for the first token, then tokens with value, rank and text by their id.

    Parameters
    ----------
    tokenizer : the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = lru_cache(CACHED_TOKENS)(lambda token_id: orjson.dumps(tokenizer.token_text(token_id)))

    def field(self, reports: Sequence[TokenLogprobs] | None) -> Iterator[Piece]:
        """Yield the field, null where nobody asked, with a comma before it."""
        yield b',"prompt_logprobs":'
        if reports is None:
            yield b"null"
            return
        yield b"[null"
        for report in reports:
            yield b",{" + b",".join(self._entries(report)) + b"}"
        yield b"]"

    def _entries(self, report: TokenLogprobs) -> Iterator[bytes]:
        others = [
            (token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(
                zip(report.top_token_ids, report.top_logprobs, strict=True), 1
            )
            if token_id != report.token_id
        ]
        own = (report.token_id, report.logprob, report.rank or 0)
        for token_id, logprob, rank in (own, *others):
            value = orjson.dumps(max(logprob, LOWEST_LOGPROB))
            start = b'"%d":{"logprob":%b,"rank":%d,"decoded_token":' % (token_id, value, rank)
            yield start + self._text(token_id) + b"}"


def columns_of(
    reports: Sequence[TokenLogprobs], offsets: Sequence[int], name: Callable[[int], str]
) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the inside of a text completion's arrays of log-probabilities.

    Parameters
    ----------
    reports : of the tokens.
    offsets : where they begin in the text.
    name : of a token.
    """
    return (
        json_inside([name(report.token_id) for report in reports]),
        json_inside([max(report.logprob, LOWEST_LOGPROB) for report in reports]),
        json_inside([_top_logprobs(report, name) for report in reports]),
        json_inside(list(offsets)),
    )


def echo_columns(
    echo: Echo, reports: Sequence[TokenLogprobs], name: Callable[[int], str]
) -> Iterator[Sequence[bytes]]:
    """Yield the same of parts of a prompt, of whose first token nothing is known."""
    yield json_inside([name(echo.token_ids[0])]), b"null", b"null", json_inside([echo.offsets[0]])
    for start in range(0, len(reports), _TOKENS_AT_ONCE):
        end = start + _TOKENS_AT_ONCE
        yield columns_of(reports[start:end], echo.offsets[start + 1 : end + 1], name)


def joined(*columns: Sequence[Piece]) -> list[bytes]:
    """Return columns behind one another; one without tokens is empty."""
    return [b",".join(filter(None, parts)) for parts in zip(*columns, strict=True)]


def _top_logprobs(values: TokenLogprobs, name: Callable[[int], str]) -> dict[str, float]:
    """Return values by name: the token's own first, and of others of one name the likelier's."""
    top = {name(values.token_id): values.logprob}
    for token_id, logprob in zip(values.top_token_ids, values.top_logprobs, strict=True):
        top.setdefault(name(token_id), logprob)  # the most likely comes first
    return {name: max(logprob, LOWEST_LOGPROB) for name, logprob in top.items()}
