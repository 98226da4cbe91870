"""Harmony, the form of gpt-oss: an answer is messages, each in a channel, and a call is one to a function.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"city": "Paris"}<|call|>

What stands in `analysis` is reasoning, all else is content. Source: OpenAI harmony response format, 2025.
"""

from __future__ import annotations

import re

from onbeat.text.reply.body import SPACE
from onbeat.text.reply.calls import ContentText, ReasoningText
from onbeat.text.reply.families import HARMONY_MARKS
from onbeat.text.reply.parser import MarkScanner, ReplyOptions, ReplyParser, ReplyStyle

_BEGINS, _ENDS = ("<|start|>", "<|channel|>"), ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(ReplyParser):
    """Turns the text of one choice into events, message by message.

    Parameters
    ----------
    style : of the model.
    options : of the request.
    """

    def __init__(self, style: ReplyStyle, options: ReplyOptions) -> None:
        super().__init__(style, options)
        self._scanner = MarkScanner(set(HARMONY_MARKS) - style.mark_ids.keys())
        self._reasons = style.reasoning is not None
        self._head: str | None = None if options.opens_in_reasoning else ""
        """What has come of a message's header; None inside of a message."""
        self._has_header = self._has_arguments = False

    @property
    def _is_reasoning(self) -> bool:
        return self._head is None and super()._is_reasoning

    def _count_token(self, *, was_reasoning: bool, final: bool) -> None:
        """Count the last token, once it is known; a header is uncertain as long as its channel is."""
        if final:
            return
        if was_reasoning or self._is_reasoning:
            self.num_reasoning_tokens += self._num_uncertain + 1
            self._num_uncertain = 0
        else:
            self._num_uncertain = 0 if self._head is None else self._num_uncertain + 1

    def _run(self, *, settles: bool) -> None:
        """Take what is pending, but for an end that may become a mark; `settles` says that it does not."""
        mark = "-"
        while mark and not self.is_complete:
            before, mark, self._pending = self._scanner.split(self._pending, final=settles)
            self._on_text(before)
            if mark:
                self._on_token(mark)

    def _on_text(self, text: str) -> None:
        if self._head is None:
            self._say(text)
            return
        self._head += text
        start = self._head.strip(SPACE)
        if not (start.startswith(("<|", "to=")) or "to=".startswith(start)):  # an answer without a header
            text, self._head, self._said = self._head, None, ContentText
            self._say(text)

    def _on_token(self, mark: str) -> None:
        if self.is_complete:
            return
        if mark in _ENDS or (mark in _BEGINS and self._head is None):
            self._end("")
            self._head = ""
        if self._head is not None and mark == "<|message|>":
            self._begin_message(self._head)
        elif self._head is not None and mark not in _ENDS:
            self._head += mark

    def _begin_message(self, head: str) -> None:
        """Begin the message of a header."""
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._head, self._has_header = None, True
        thinks = channel is not None and channel[1] == "analysis" and self._reasons
        self._said = ReasoningText if thinks else ContentText
        name = "" if recipient is None else recipient[1].removeprefix("functions.")
        if name in self._calls.tools:
            self._calls.start(name)
            self._has_arguments = False
            return
        if self._has_content and not thinks:
            self._say("\n")
        if recipient is not None:
            self._say(f"{recipient[1]} ")

    def _end(self, head: str) -> None:
        """End a message, or the answer with what may have been a header, and is text if it has no mark."""
        if self._calls.is_open and not self._has_arguments:
            self._calls.add("{}")
        self._calls.end()
        is_text = head.strip(SPACE) or not self._has_header
        if is_text and not head.lstrip(SPACE).startswith("<|"):
            self._said = ContentText
            self._say(head)

    def _finish(self) -> None:
        self._run(settles=True)
        self._end(self._head or "")

    def _say(self, text: str) -> None:
        if self._calls.is_open:
            self._has_arguments |= bool(text.strip(SPACE))
            self._calls.add(text)
        elif text and not (self._drops_reasoning and self._said is ReasoningText):
            self._has_content |= self._said is ContentText
            self._calls.events.append(self._said(text))


def new_reader(style: ReplyStyle, options: ReplyOptions) -> ReplyParser:
    """Return what reads one choice's answer in the style of the model."""
    return (HarmonyParser if "<|channel|>" in style.inner_marks else ReplyParser)(style, options)
