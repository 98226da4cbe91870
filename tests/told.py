"""What a sentence tells, apart from its wording."""

from __future__ import annotations

import re


def numbers(sentence: object) -> list[float]:
    """Return the numbers of a sentence in their order; E2E has none."""
    return [
        float(each.replace(",", "")) for each in re.findall(r"(?<!\w)\d+(?:,\d{3})*(?:\.\d+)?", str(sentence))
    ]
