"""The sections of the page, each of which a study replaces as a whole."""

from __future__ import annotations

import re


def replace_section(page: str, heading: str, body: str) -> str:
    """Return the page with the section of that heading replaced, or added before the first later number."""
    top, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    made = f"{heading}\n\n{body.strip()}"
    headings = [section.split("\n", 1)[0] for section in sections]
    if heading in headings:
        sections[headings.index(heading)] = made
    else:
        later = [i for i, other in enumerate(headings) if place(other) > place(heading)]
        sections.insert(min(later, default=len(sections)), made)
    return "\n\n".join([top.strip(), *(f"## {section.strip()}" for section in sections)]) + "\n"


def place(heading: str) -> tuple[int, str]:
    """Return where a section stands: the yardstick, then those with a number, then what else there is."""
    number = re.match(r"\((\w+)\)", heading)
    numerals = ("i", "ii", "iii", "iv", "v")
    if number and number[1] in numerals:
        return 1 + numerals.index(number[1]), heading
    return (0 if heading.startswith("Yardstick") else len(numerals) + 1), heading
