"""Token ids to text, piece by piece: no split characters, no leaked stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from onbeat.core.tokenizer import Tokenizer

_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")


@dataclass(slots=True)
class TextDelta:
    """What new tokens add to the text."""

    text: str
    """Text that is certain: complete characters, and no beginning of a stop string."""
    stop_string: str | None = None
    """The stop string that ended the text, if one did."""
    token_offsets: list[int] = field(default_factory=list)
    """For each new token, the character of the whole text at which its own text begins."""
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Tokens that are marks: before which character of `text` each stands, and its name."""


def holds_text(token_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return whether some token is not special: what follows then continues a text."""
    return any(token_id not in tokenizer.special_token_ids for token_id in token_ids)


class TextStream:
    """Decodes one request's output tokens as they come.

    Tokens stand for bytes, and a character may be spread over several tokens, so the bytes go through an
    incremental UTF-8 decoder. Joined deltas equal `tokenizer.decode` of all tokens; of tokens that continue a
    text, what they add to the text of those before.

    Parameters
    ----------
    tokenizer : the model's.
    continues_text : whether text goes before; a leading space is then part of it, whatever the vocabulary.
    stop : strings that end the text; the one that ends earliest counts, of several that end together the
        longest.
    include_stop : whether the stop string is part of the text.
    skip_special_tokens : whether special tokens are left out of the text.
    min_tokens : a stop string that is complete within this many tokens is text like any other.

    Attributes
    ----------
    mark_ids : tokens that are no text and are told of apart, none unless set; no stop string spans one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        continues_text: bool = False,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._max_stop_chars = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self.mark_ids = frozenset[int]()
        self._decoder = _UTF8_DECODER(errors="replace")
        self._strips_space = tokenizer.strips_leading_space and not continues_text
        """Whether the next character, if it is a space, is dropped."""
        self.num_chars = 0
        """Characters decoded so far, held ones included."""
        self._held = ""
        """Decoded text that may be the beginning of a stop string."""
        self._is_ended = False
        self.num_consumed_tokens = 0
        """Tokens up to the one that completed the stop string, or all."""

    def push(self, token_ids: Sequence[int], *, final: bool) -> TextDelta:
        """Take new tokens; `final` says that there are no more, so nothing is held back any longer."""
        delta = TextDelta("")
        for token_id in token_ids:
            delta.token_offsets.append(self.num_chars)
            if self._is_ended:
                continue
            self.num_consumed_tokens += 1
            if token_id in self.mark_ids:
                self._mark(token_id, delta)
            elif token_id not in self._skipped_ids:
                self._take(self._decode(self._tokenizer.token_bytes(token_id)), delta)
        if final and not self._is_ended:
            self._take(self._decode(b"", final=True), delta)
            delta.text += self._held
            self._held = ""
            self._is_ended = True
        return delta

    def _mark(self, token_id: int, delta: TextDelta) -> None:
        """Pass on all that stands before a mark, then the mark."""
        delta.text += self._held
        self._held = ""
        delta.marks.append((len(delta.text), self._tokenizer.token_text(token_id)))

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        """Return the characters that are complete; what is left of the last one waits."""
        text = self._decoder.decode(data, final)
        if self._strips_space and text:
            self._strips_space = False
            text = text.removeprefix(" ")
        return text

    def _take(self, new_text: str, delta: TextDelta) -> None:
        """Pass on new text, except what a stop string cuts off or may yet claim."""
        if not new_text:
            return
        self.num_chars += len(new_text)
        if not self._stop:
            delta.text += new_text
            return
        buffer = self._held + new_text
        can_end = self.num_consumed_tokens > self._min_tokens
        found = self._find_stop(buffer, len(self._held)) if can_end else None
        if found is not None:
            start, stop_string = found
            end = start + len(stop_string) if self._include_stop else start
            delta.text += buffer[:end]
            delta.stop_string = stop_string
            self._held = ""
            self._is_ended = True
            return
        num_held = self._num_chars_to_hold(buffer)
        delta.text += buffer[: len(buffer) - num_held]
        self._held = buffer[len(buffer) - num_held :]

    def _find_stop(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        """Return where the stop string that ends first begins, and which one it is.

        It ends after the first `num_old` characters: what they hold was found before, or came too early.
        """
        found = [(buffer.find(stop, max(0, num_old + 1 - len(stop))), stop) for stop in self._stop]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _num_chars_to_hold(self, buffer: str) -> int:
        """Return the length of the longest end of the buffer with which a stop string begins."""
        for length in range(min(self._max_stop_chars - 1, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
