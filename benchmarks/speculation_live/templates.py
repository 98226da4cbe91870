"""Editing tasks made of texts: what is asked, and the texts themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .tasks import DATA

NOVEL = DATA.parents[1] / "tests" / "data" / "pride_and_prejudice.txt"
PASSAGE_WORDS = 60
SENTENCE_END = re.compile(r"(?<=[.;!?])\s+")
MISSPELT_WORDS = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task that the set may take in."""

    kind: str
    source: str
    prompt: str


def candidates() -> Iterator[Candidate]:
    """Yield every template of every text."""
    passages = list(read_passages())
    texts = [text for _, text in passages]
    for index, (source, _) in enumerate(passages):
        for kind, template in PASSAGE_TEMPLATES.items():
            yield Candidate(kind, source, template(texts, index))
    for entry in yaml.safe_load((DATA / "own_lists.yaml").read_text(encoding="utf-8")):
        for kind, list_template in LIST_TEMPLATES.items():
            yield Candidate(f"{kind}: {entry['kind']}", "own", list_template(entry))


def read_passages() -> Iterator[tuple[str, str]]:
    """Yield (work, text) of passages in the public domain."""
    for passage in cut_passages(NOVEL):
        yield "Pride and Prejudice, Jane Austen, 1813", passage
    for work in yaml.safe_load((DATA / "public_domain.yaml").read_text(encoding="utf-8")):
        for passage in work["passages"]:
            yield work["work"], passage


def cut_passages(path: Path, num_words: int = PASSAGE_WORDS) -> Iterator[str]:
    """Yield paragraphs that follow each other, as many as make `num_words` words each."""
    gathered: list[str] = []
    for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
        gathered.append(" ".join(paragraph.split()))
        if sum(len(text.split()) for text in gathered) >= num_words:
            yield " ".join(gathered)
            gathered = []


def numbered(text: str) -> str:
    """Return a text with each sentence on a numbered line."""
    return "\n".join(f"{number}. {line}" for number, line in enumerate(SENTENCE_END.split(text), start=1))


def misspelt(text: str) -> str:
    """Return a text with two letters exchanged in a few of its longer words."""
    words = text.split(" ")
    long_words = [index for index, word in enumerate(words) if len(word) > 5 and word.isalpha()]
    for index in long_words[1 :: max(1, len(long_words) // MISSPELT_WORDS)]:
        word = words[index]
        words[index] = f"{word[:2]}{word[3]}{word[2]}{word[4:]}"
    return " ".join(words)


def _repeat(texts: Sequence[str], index: int) -> str:
    return f"Repeat the following list exactly.\n\n{numbered(texts[index])}"


def _add_line(texts: Sequence[str], index: int) -> str:
    return f"Copy the following lines and add one more line at the end.\n\n{numbered(texts[index])}"


def _spelling_of_list(texts: Sequence[str], index: int) -> str:
    asked = "Copy the following list of sentences and correct the spelling mistakes."
    return f"{asked}\n\n{numbered(misspelt(texts[index]))}"


def _spelling(texts: Sequence[str], index: int) -> str:
    return f"Copy the following text and correct its spelling mistakes.\n\nText: {misspelt(texts[index])}"


def _second_paragraph(texts: Sequence[str], index: int) -> str:
    paragraphs = "\n\n".join((texts[index - 1], texts[index], texts[index - 2]))
    return f"Here are three paragraphs.\n\n{paragraphs}\n\nCopy the second paragraph word for word."


def _spelling_with_example(texts: Sequence[str], index: int) -> str:
    example, text = texts[index - 1], misspelt(texts[index])
    asked = "Correct the spelling of the last text, as in the example."
    return f"{asked}\n\nText: {misspelt(example)}\nCorrected: {example}\n\nText: {text}\nCorrected:"


PASSAGE_TEMPLATES: dict[str, Callable[[Sequence[str], int], str]] = {
    "repeat the list": _repeat,
    "copy the lines and add one": _add_line,
    "correct the spelling of a list": _spelling_of_list,
    "correct the spelling": _spelling,
    "copy the second paragraph": _second_paragraph,
    "correct the spelling after an example": _spelling_with_example,
}
LIST_TEMPLATES: dict[str, Callable[[dict[str, Any]], str]] = {
    "repeat": lambda entry: f"Repeat the following {entry['kind']} exactly.\n\n{entry['text']}",
    "replace": lambda entry: (
        f"Repeat the following {entry['kind']} exactly, but write “{entry['new']}” in place of "
        f"“{entry['old']}”.\n\n{entry['text']}"
    ),
    "add": lambda entry: (
        f"Copy the following {entry['kind']} and add one line at the end.\n\n{entry['text']}"
    ),
}
