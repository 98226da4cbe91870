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
NEW_WORD = "purple"
STRAIGHT = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2019": "'"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task that the set may take in."""

    kind: str
    source: str
    prompt: str


def candidates() -> Iterator[Candidate]:
    """Yield every template of every text."""
    for entry in yaml.safe_load((DATA / "own_lists.yaml").read_text(encoding="utf-8")):
        for kind, list_template in LIST_TEMPLATES.items():
            yield Candidate(f"{kind}: {entry['kind']}", "own", list_template(entry))
    passages = list(read_passages())
    texts = [text for _, text in passages]
    for kind, template in PASSAGE_TEMPLATES.items():
        for index, (source, _) in enumerate(passages):
            yield Candidate(kind, source, template(texts, index))


def read_passages() -> Iterator[tuple[str, str]]:
    """Yield (work, text) of passages in the public domain."""
    for passage in cut_passages(NOVEL):
        yield "Pride and Prejudice, Jane Austen, 1813", straight(passage)
    for work in yaml.safe_load((DATA / "public_domain.yaml").read_text(encoding="utf-8")):
        for passage in work["passages"]:
            yield work["work"], straight(passage)


def cut_passages(path: Path, num_words: int = PASSAGE_WORDS) -> Iterator[str]:
    """Yield paragraphs that follow each other, as many as make `num_words` words each."""
    gathered: list[str] = []
    for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
        gathered.append(" ".join(paragraph.split()))
        if sum(len(text.split()) for text in gathered) >= num_words:
            yield " ".join(gathered)
            gathered = []


def straight(text: str) -> str:
    """Return a text with the quotation marks that the model writes."""
    return text.translate(STRAIGHT)


def numbered(text: str) -> str:
    """Return a text with each sentence on a numbered line."""
    return "\n".join(f"{number}. {line}" for number, line in enumerate(SENTENCE_END.split(text), start=1))


def misspelt(text: str) -> str:
    """Return a text with two letters exchanged in a few of its longer words."""
    words = text.split(" ")
    places = _long_words(words)
    for place in places[1 :: max(1, len(places) // MISSPELT_WORDS)]:
        word = words[place]
        words[place] = f"{word[:2]}{word[3]}{word[2]}{word[4:]}"
    return " ".join(words)


def _long_words(words: Sequence[str]) -> list[int]:
    return [place for place, word in enumerate(words) if len(word) > 5 and word.isalpha()]


def _repeat(texts: Sequence[str], index: int) -> str:
    return f"Repeat the following list exactly.\n\n{numbered(texts[index])}"


def _second_paragraph(texts: Sequence[str], index: int) -> str:
    paragraphs = "\n\n".join((texts[index - 1], texts[index], texts[index - 2]))
    return f"Here are three paragraphs.\n\n{paragraphs}\n\nCopy the second paragraph word for word."


def _spelling(texts: Sequence[str], index: int) -> str:
    example, text = texts[index - 1], texts[index]
    asked = "Correct the spelling of the last text, as in the example."
    return f"{asked}\n\nText: {misspelt(example)}\nCorrected: {example}\n\nText: {misspelt(text)}\nCorrected:"


def _replace(texts: Sequence[str], index: int) -> str:
    example, text = texts[index - 1], texts[index]
    asked = f'Write "{NEW_WORD}" in place of one word of the last text, as in the example.'
    parts = [asked]
    for given in (example, text):
        words = given.split(" ")
        places = _long_words(words)
        old = words[places[len(places) // 2]]
        parts.append(f'Text: {given}\nWith "{NEW_WORD}" in place of "{old}":')
        if given is example:
            parts[-1] += f" {given.replace(old, NEW_WORD)}"
    return "\n\n".join(parts)


PASSAGE_TEMPLATES: dict[str, Callable[[Sequence[str], int], str]] = {
    "correct the spelling": _spelling,
    "replace a word": _replace,
    "copy the second paragraph": _second_paragraph,
    "repeat the list": _repeat,
}
LIST_TEMPLATES: dict[str, Callable[[dict[str, Any]], str]] = {
    "repeat": lambda entry: f"Repeat the following {entry['kind']} exactly.\n\n{entry['text'].strip()}",
    "replace": lambda entry: (
        f'Repeat the following {entry["kind"]} exactly, but write "{entry["new"]}" in place of '
        f'"{entry["old"]}".\n\n{entry["text"].strip()}'
    ),
    "add": lambda entry: (
        f"Copy the following {entry['kind']} and add one line at the end.\n\n{entry['text'].strip()}"
    ),
}
