"""The prompts: tasks of a file, and which of them a run gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[1] / "data"
TASK_SETS = {"editing": "speculation_editing.jsonl", "chat": "speculation_chat.jsonl"}
"""The files are those that `onbeat bench serve --dataset-name custom` reads."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one request asks for."""

    prompt: str
    max_tokens: int


def read_tasks(path: Path) -> list[Task]:
    """Return the tasks of a file of JSON lines ``{"prompt": str, "output_tokens": int}``."""
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Task(record["prompt"], record["output_tokens"]) for record in records]


def draw_tasks(tasks: Sequence[Task], num_tasks: int, *key: int) -> list[Task]:
    """Return tasks in an order that follows from the key alone; none twice before all came once."""
    order = np.random.default_rng(key)
    drawn: list[Task] = []
    while len(drawn) < num_tasks:
        drawn += [tasks[index] for index in order.permutation(len(tasks))]
    return drawn[:num_tasks]


def copied_share(prompt: Sequence[int], output: Sequence[int], size: int = 4) -> float:
    """Return the share of the output's n-grams (runs of `size` tokens) that the prompt has too."""
    known = set(_runs(prompt, size))
    found = [run in known for run in _runs(output, size)]
    return sum(found) / len(found) if found else 0.0


def _runs(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
