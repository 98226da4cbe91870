"""The requests that docs/api.md shows are answered, and every path that takes a body has one."""

from __future__ import annotations

import json
import re
import shlex
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cpu.server.asking import CHAT
from tests.cpu.server.running import Served

PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


class Example(NamedTuple):
    path: str
    headers: dict[str, str]
    body: Any


def commands(text: str) -> list[Example]:
    """Return the requests of the calls of curl in a text."""
    found: list[list[str]] = []
    for word in shlex.split(text, comments=True):
        if word == "curl":
            found.append([])
        elif found:
            found[-1].append(word)
    return list(map(_example, found))


def _example(words: list[str]) -> Example:
    (url,) = [word for word in words if word.startswith("localhost:8000")]
    values = dict[str, list[str]]()
    for name, value in pairwise(words):
        values.setdefault(name, []).append(value)
    headers = dict(header.split(": ", 1) for header in values.get("-H", []))
    body = json.loads(values["-d"][0]) if "-d" in values else None
    return Example(url.removeprefix("localhost:8000"), headers, body)


def bodies(text: str) -> list[Example]:
    """Return a chat's body that a block is."""
    return [Example(CHAT, {}, json.loads(text))] if text.startswith('{"messages"') else []


EXAMPLES = [
    *chain.from_iterable(commands(text) for kind, text in BLOCKS if kind in ("sh", "bash")),
    *chain.from_iterable(bodies(text) for kind, text in BLOCKS if kind == "json"),
]


@pytest.mark.parametrize("served", [{"served_model_names": ("smollm2-135m-instruct",)}], indirect=True)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.path)
async def test_an_example_is_answered(served: Served, example: Example) -> None:
    if example.body is None:
        answer = await served.get(example.path)
    else:
        answer = await served.post(example.path, example.body, headers=example.headers)
    assert answer.status == 200, answer.body
    assert "x-onbeat-ignored-fields" not in answer.headers


def test_every_path_has_an_example() -> None:
    rows = PAGE.split("\n\n")[2].splitlines()
    rows_of_posts = [row.split("|")[1] for row in rows if row.startswith("| `POST")]
    first = {re.findall(r"`(?:POST )?(/[^`]*)`", cell)[0] for cell in rows_of_posts}
    assert len(first) >= 9
    # Adapters need vLLM's workers, which are not here.
    assert first - {"/v1/load_lora_adapter"} <= {example.path for example in EXAMPLES}
