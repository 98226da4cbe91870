"""Gemma 4's calls, whose texts stand between tokens: `call:f{k:<|"|>v<|"|>,n:1,list:[{a:true}]}`.

They are passed on as JSON while they come. Source: the chat template of google/gemma-4, 2026.
"""

from __future__ import annotations

import re

from onbeat.text.reply import body
from onbeat.text.reply.calls import Calls

QUOTE = '<|"|>'
"""Stands on both sides of a text."""
_KEY, _VALUE = re.compile(r"[^:,{}\[\]<]*"), re.compile(r"[^,}\]<>]*>?")
"""What may stand without quotes. A mark may begin with `<`, and a quote ends with `>`."""
_CLOSINGS = {"{": "}", "[": "]"}
_BEFORE_VALUE = ": "
_WORDS = {"true": "true", "false": "false", "none": "null", "": "null"}
"""Values as other languages write them, and one that is missing."""


class BraceCalls(body.Body):
    """One call or more, each a name and an object; what has no quotes is a key, a number or a word of JSON.

    Parameters
    ----------
    calls : where they go.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls, self._in_head)
        self._word = ""
        """What is being read: a name, key, value or quote."""
        self._closings = ""
        """Of the objects and arrays that are open, the innermost first."""
        self._separator = ""
        """What JSON has before that which comes next."""

    @property
    def is_in_text(self) -> bool:
        return self._step == self._in_text

    def take(self, character: str) -> bool:
        """Take `<`, which begins no mark: it begins a quote, or is a part of a word."""
        if character != "<" or not self._closings:
            return False
        self._word += character
        self._step = self._in_word
        return True

    def close(self, *, final: bool) -> None:
        """Write what ends the arguments, if the model forgot it and did not stop there."""
        if self._closings and not final:
            while self._word or self._separator == _BEFORE_VALUE:
                self._end_word()
            self._calls.add(self._closings)
        self._calls.end()

    @property
    def _needs_key(self) -> bool:
        return self._closings.startswith("}") and self._separator != _BEFORE_VALUE

    def _in_head(self, text: str, at: int) -> int:
        """Before the arguments: `call:` and a name."""
        start = at if self._word else body.end_of_space(text, at)
        end = body.end_of_name(text, start)
        self._word += text[start:end]
        self._raw.append(text[at:end])
        name = self._word.removeprefix("call:").removeprefix(":")
        if text[end : end + 1] == "{" and name in self._calls.tools:
            self._calls.start(name)
            self._raw.clear()
            self._word = self._separator = ""
            self._step = self._before
        return end

    def _before(self, text: str, at: int) -> int:
        """Before a key or a value, or at the end of an object or array."""
        character, has_key = text[at], self._separator == _BEFORE_VALUE
        if character in "{[" and not self._needs_key:
            self._put(character, "")
            self._closings = _CLOSINGS[character] + self._closings
        elif character in "]}" and not has_key:
            self._calls.add(self._closings[0])
            self._closings, self._separator = self._closings[1:], ", "
            if not self._closings:
                self._calls.end()
                self._step = self._in_head
        elif character == "<":
            return at
        elif character not in ",:{[" + body.SPACE or (character == "," and has_key):
            self._step = self._in_word
            return at
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        run, ends = (_KEY, ":,{}[]") if self._needs_key else (_VALUE, ",}]")
        found = run.match(text, at)
        assert found is not None, "it may be empty"
        self._word += found.group()
        end = found.end()
        if self._word == QUOTE and run == _VALUE:
            self._put('"', "")
            self._word, self._step = "", self._in_text
        elif end < len(text) and text[end] in ends:
            self._end_word()
            self._step = self._before
        return end

    def _end_word(self) -> None:
        word, self._word = self._word.replace(QUOTE, "").strip(), ""
        if self._needs_key:
            self._put(body.to_json(word.strip('"')), _BEFORE_VALUE)
        else:
            self._put(word if body.is_json(word) else _WORDS.get(word.lower()) or body.to_json(word), ", ")

    def _put(self, written: str, separator: str) -> None:
        self._calls.add(self._separator + written)
        self._separator = separator

    def _in_text(self, text: str, at: int) -> int:
        end = text.find(">", at) + 1 or len(text)
        self._word += text[at:end]
        num_kept = next(num for num in range(len(QUOTE), -1, -1) if self._word.endswith(QUOTE[:num]))
        num_said = len(self._word) - num_kept
        self._calls.add(body.to_json(self._word[:num_said])[1:-1])
        self._word = self._word[num_said:]
        if self._word == QUOTE:
            self._put('"', ", ")
            self._word, self._step = "", self._before
        return end
