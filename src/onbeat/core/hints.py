"""What somebody who wrote a name that there is not probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_MOST_STRAY = 2
"""Characters of a typo. At 4, `--max-loras` and `--max-logprobs` are one."""
_LEAST_LIKENESS = 0.6
_WORD_ENDS = re.compile(r"[-_.]")


def likely_meant(word: str, known: Iterable[str]) -> str | None:
    """Return the known name of which a word is a typo, or of which alone it is the beginning; else None.

    A name that only has words in common with another is none: a wrong hint costs more time than none.
    """
    typos: list[tuple[float, str]] = []
    starts: list[str] = []
    for name in known:
        matcher = SequenceMatcher(None, word, name, autojunk=False)
        stray = max(len(word), len(name)) - sum(block.size for block in matcher.get_matching_blocks())
        likeness = matcher.ratio()
        if stray <= _MOST_STRAY and likeness >= _LEAST_LIKENESS:
            typos.append((likeness, name))
        elif word and name.startswith(word) and _WORD_ENDS.match(name, len(word)):
            starts.append(name)
    if typos:
        return max(typos)[1]
    return starts[0] if len(starts) == 1 else None
