"""One parser for all families: the text of an answer in, reasoning, content and calls out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from onbeat.core.tokenizer import Tokenizer
from onbeat.text.reply.body import SPACE, Body, end_of_space
from onbeat.text.reply.calls import Calls, ContentText, MarkToken, ReasoningText, ReplyEvent, Tools
from onbeat.text.reply.families import BODIES, ReasoningMarks, ReplyFamily


class MarkScanner:
    """Finds the first of several marks, and never decides what a longer piece could decide otherwise.

    Parameters
    ----------
    marks : texts; of two that begin at one place the longer counts.
    """

    def __init__(self, marks: Collection[str]) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")
        self._longest = max(map(len, self._marks), default=0)

    def split(self, text: str, *, final: bool) -> tuple[str, str, str]:
        """Return the text before the first mark, the mark, and what is behind it.

        Without a mark it is empty, and the last is the end of the text that may yet become one.

        Parameters
        ----------
        final : whether no more text comes.
        """
        found = self._pattern.search(text)
        end = len(text) if found is None else found.start() + 1
        for start in range(max(len(text) - self._longest + 1, 0), 0 if final else end):
            if self._may_become_mark(text[start:]):
                return text[:start], "", text[start:]
        if found is None:
            return text, "", ""
        return text[: found.start()], found.group(), text[found.end() :]

    def at(self, text: str, position: int, *, final: bool) -> str | None:
        """Return the mark at a position of a text, "" if there is none, None if only more text tells."""
        if not final and self._may_become_mark(text[position : position + self._longest]):
            return None
        found = self._pattern.match(text, position)
        return "" if found is None else found.group()

    def _may_become_mark(self, end: str) -> bool:
        return any(len(mark) > len(end) and mark.startswith(end) for mark in self._marks)


class ReplyStyle:
    """How the answers of one model are written: its family's marks, and which of them are tokens.

    Parameters
    ----------
    family : how it calls tools; None if it does not.
    reasoning : what stands around its reasoning; None if it does not reason.
    tokenizer : the model's. A mark that is one of its special tokens counts only as that token, so that a
        model may write about it.
    """

    def __init__(
        self, family: ReplyFamily | None, reasoning: ReasoningMarks | None, tokenizer: Tokenizer | None = None
    ) -> None:
        self.family, self.reasoning = family, reasoning
        pairs = () if family is None else family.marks
        self.openings = frozenset(opening for opening, _ in pairs)
        self.closings = {opening: closing for opening, closing in pairs if closing}
        marks = {*self.openings, *self.closings.values()}
        if reasoning is not None:
            marks |= {reasoning.opening, reasoning.closing}
        self._tokenizer = tokenizer
        self.inner_marks = () if family is None else family.inner_marks
        if reasoning is not None:
            self.inner_marks += reasoning.inner_marks
        special = () if tokenizer is None else tokenizer.special_token_ids
        names = {} if tokenizer is None else {tokenizer.token_text(each): each for each in special}
        self.mark_ids = {each: names[each] for each in (*marks, *self.inner_marks) if each in names}
        """Of the marks that are special tokens."""
        self.scanner = MarkScanner(marks - names.keys())

    @cached_property
    def guided(self) -> ReplyStyle:
        """How answers are written that keep to a grammar."""
        family = None if self.family is None else self.family.guided
        return ReplyStyle(family, self.reasoning, self._tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """What one request wants of its answers."""

    tools: Tools
    """What may be called; without any, calls are text."""
    new_call_id: Callable[[], str]
    opens_in_reasoning: bool = False
    """Whether the prompt ends inside of reasoning."""
    is_single: bool = False
    """Whether an answer ends with its first call."""
    drops_reasoning: bool = False
    is_guided: bool = False
    """Whether answers keep to a grammar, which has no calls in reasoning."""


class ReplyParser:
    """Turns the text of one choice into events, for any family. What it finds does not depend on the pieces.

    Text is reasoning, or content, or belongs to the body of a region of calls, which begins with an opening
    mark. A region that turns out to hold no call was text all along.

    Parameters
    ----------
    style : of the model.
    options : of the request.
    """

    def __init__(self, style: ReplyStyle, options: ReplyOptions) -> None:
        self._style = style
        self.mark_token_ids = frozenset(style.mark_ids.values())
        """Special tokens that it is to be told of, though they are no text."""
        self._family = style.family if options.tools else None
        self._drops_reasoning = options.drops_reasoning
        self._is_guided = options.is_guided
        self._calls = Calls(options.tools, options.new_call_id, is_single=options.is_single)
        self._said: type[ContentText | ReasoningText] = (
            ReasoningText if options.opens_in_reasoning else ContentText
        )
        self._skips_space = options.opens_in_reasoning
        self._may_open = True  # nothing but the prompt has begun or ended reasoning
        self._is_start = True
        """Whether nothing but white space has been said since the answer, or its content, began."""
        self._label = self._held = ""
        """What may begin the reasoning and is none, and what has come of it."""
        self._space: list[str] = []
        """White space that is said only if text follows, and no mark."""
        self._has_content = False
        self._pending = ""
        self._body: Body | None = None
        self._opening = self._closing = ""
        """The mark that opened the region of the body, and the one that closes it; empty where none does."""
        self._num_before = 0
        """Calls before that region."""
        self._owed = ""
        """The closing mark of a region that ended without it."""
        self._num_uncertain = 0
        """The last tokens, as long as they may turn out to be reasoning."""
        self.num_reasoning_tokens = 0
        """Tokens so far that were reasoning, its marks included."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is wanted, so that the answer ends here."""
        return self._calls.is_complete

    @property
    def _is_reasoning(self) -> bool:
        return self._said is ReasoningText

    def push(self, pieces: Sequence[str | MarkToken], *, final: bool) -> list[ReplyEvent]:
        """Take what one token adds, which may be nothing, and return what is certain by now.

        Parameters
        ----------
        pieces : text and special tokens, in their order.
        final : whether the answer ends here, so that nothing is held back any longer.
        """
        was_reasoning = self._is_reasoning
        for piece in pieces:
            if isinstance(piece, MarkToken):
                self._run(settles=True)
                self._on_token(piece.text)
            else:
                self._pending += piece
                self._run(settles=False)
        if final:
            self._finish()
        self._count_token(was_reasoning=was_reasoning, final=final)
        events, self._calls.events = self._calls.events, []
        return events

    def _count_token(self, *, was_reasoning: bool, final: bool) -> None:
        """Count the token that has just been taken, once it is known what it is; none comes with the end."""
        is_reasoning = self._said is ReasoningText
        if self._body is not None:
            self._num_uncertain = self._num_uncertain + 1 if is_reasoning else 0
            return
        if was_reasoning or is_reasoning:
            self.num_reasoning_tokens += self._num_uncertain + (not final)
            self._num_uncertain = 0
        else:
            self._num_uncertain = self._num_uncertain + 1 if self._pending and self._is_start else 0

    def _run(self, *, settles: bool) -> None:
        """Take what is pending, but for an end that may become a mark; `settles` says that it does not."""
        text, waits = self._pending, False
        while text and not waits and not self.is_complete:
            read = self._read_text if self._body is None else self._read_body
            text, waits = read(text, settles=settles)
        self._pending = "" if self.is_complete else text

    def _read_text(self, text: str, *, settles: bool) -> tuple[str, bool]:
        """Take text up to the next mark; return what is left, and whether it waits for more."""
        if self._is_start and self._said is ContentText and self._family is not None:
            start = end_of_space(text, 0)
            if start < len(text) and text[start] in self._family.bare:
                self._say(text[:start])
                self._begin("")
                return text[start:], False
        before, mark, rest = self._style.scanner.split(text, final=settles)
        self._say(before)
        if mark:
            self._on_mark(mark, is_token=False)
        return rest, not mark

    def _read_body(self, text: str, *, settles: bool) -> tuple[str, bool]:
        """Take what belongs to the region of calls; return as `_read_text` does."""
        body, at = self._body, 0
        assert body is not None, "it is being read"
        while True:
            at = body.push(text, at)
            if self._calls.num_begun > self._num_before:
                self._settle()
            if at == len(text) or self.is_complete:
                return "", True
            mark = self._style.scanner.at(text, at, final=settles)
            if mark is None:
                return text[at:], True
            if self._ends_body(mark):
                self._end_body(mark)
                return text[at + len(mark) :], False
            if not body.take(text[at]):
                self._end_body("")
                return text[at:], False
            at += 1

    def _on_token(self, mark: str) -> None:
        """Take a special token that is a mark."""
        if self._body is not None and (self._body.is_in_text or mark in self._style.inner_marks):
            self._pending = mark
            self._run(settles=True)
        elif self._body is not None and self._ends_body(mark):
            self._end_body(mark)
        elif not self.is_complete:
            if self._body is not None:
                self._end_body("")
            self._on_mark(mark, is_token=True)

    def _on_mark(self, mark: str, *, is_token: bool) -> None:
        """Take a mark in text. One that means nothing here is text, unless it is a special token."""
        may_call = self._family is not None and not (self._is_guided and self._said is ReasoningText)
        if may_call and mark in self._style.openings:
            self._begin(mark)
        elif mark == self._owed:
            self._owed = ""
        elif not self._is_reasoning_mark(mark, is_token=is_token) and not is_token:
            self._say(mark)

    def _is_reasoning_mark(self, mark: str, *, is_token: bool) -> bool:
        """Return whether a mark begins or ends reasoning, or says so again; go over to what it begins."""
        marks = self._style.reasoning
        if marks is None or mark not in (marks.opening, marks.closing):
            return False
        if mark == marks.opening:
            counts = is_token or (self._is_start and self._may_open)
            turns = counts and self._said is ContentText
        else:
            turns = self._said is ReasoningText
            counts = turns or (self._is_start and self._may_open and not self._is_guided)
        self._may_open &= not counts
        if turns:
            self._said = ReasoningText if mark == marks.opening else ContentText
            self._is_start = True
            self._label, self._held = marks.label, ""
        if turns or (counts and self._is_start):
            self._skips_space = True
            self._space.clear()
        return counts

    def _begin(self, opening: str) -> None:
        assert self._family is not None, "calls are read"
        self._body = BODIES[self._family.form](self._calls)
        self._closing = self._style.closings.get(opening, "")
        self._opening, self._num_before, self._owed = opening, self._calls.num_begun, ""
        if opening in self._style.inner_marks:  # it is a part of the call
            self._opening = ""
            self._body.take(opening[0])
            self._body.push(opening[1:], 0)

    def _settle(self) -> None:
        """Go on with content behind the calls, in a line of its own: there is nothing to take back."""
        self._said = ContentText
        self._is_start, self._skips_space = False, True
        self._space = ["\n"] * self._has_content

    def _ends_body(self, mark: str) -> bool:
        is_inside = not mark or mark in self._style.inner_marks
        return not is_inside and (mark in self._style.openings or mark == self._closing)

    def _end_body(self, mark: str, *, final: bool = False) -> None:
        """End the region of calls, at a mark or (an empty one) at text that belongs to no call."""
        body, self._body = self._body, None
        assert body is not None, "it is being read"
        body.close(final=final)
        if self._calls.num_begun > self._num_before:
            self._owed = "" if mark == self._closing else self._closing
            self._say(body.raw)
        else:
            self._say(self._opening + body.raw + mark * (mark == self._closing))
        if mark in self._style.openings:
            self._begin(mark)

    def _say(self, text: str) -> None:
        if self._label and self._said is ReasoningText:
            self._held += text
            if self._held != self._label and self._label.startswith(self._held):
                return
            text, self._label = self._held.removeprefix(self._label), ""
        if self._skips_space:
            text = text.lstrip(SPACE)
        end = len(text.rstrip(SPACE))
        if end:
            self._has_content |= self._said is ContentText
            if self._said is ContentText or not self._drops_reasoning:
                self._calls.events.append(self._said("".join(self._space) + text[:end]))
            self._space.clear()
            self._is_start = self._skips_space = False
        if end < len(text):
            self._space.append(text[end:])

    def _finish(self) -> None:
        self._run(settles=True)
        if self.is_complete:
            return
        if self._body is not None:
            self._end_body("", final=True)
        if self._space and self._said is ContentText and not self._skips_space:
            self._calls.events.append(ContentText("".join(self._space)))


def opens_in_reasoning(prompt: str, marks: ReasoningMarks | None, continued: str | None) -> bool:
    """Return whether a prompt ends inside of reasoning, so that the answer goes on with it.

    A mark that somebody has written into a message says nothing: only white space may follow the one that the
    template ends with.

    Parameters
    ----------
    prompt : as the template has rendered it.
    marks : the model's; None if it does not reason.
    continued : the final message, if the answer goes on with it.
    """
    if marks is None:
        return False
    if continued is not None:
        return continued.rfind(marks.opening) > continued.rfind(marks.closing)
    return prompt.rstrip(SPACE).endswith((marks.opening, (marks.opening + marks.label).rstrip()))
