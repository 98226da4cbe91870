"""A local index: texts and their embeddings, which a running server makes, searched by their cosines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from openai import AsyncOpenAI

QUERY_MS = 200
"""What a query may take; documents have no objective."""


@dataclass(frozen=True)
class Passage:
    """One document."""

    name: str
    text: str


def read_passages(path: Path) -> list[Passage]:
    """Return the documents of a file, one a line."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Passage(row["id"], row["text"]) for row in rows]


class Index:
    """Finds the passages whose embeddings are nearest to that of a query.

    Embeddings of a model that was made to chat share a large common part. Their mean is therefore taken away
    before they are compared.
    """

    def __init__(self, client: AsyncOpenAI, model: str, passages: Sequence[Passage]) -> None:
        self._client = client
        self._model = model
        self.passages = passages
        self._mean: NDArray[np.float64] = np.zeros(0)
        self._vectors: NDArray[np.float64] = np.zeros((0, 0))

    async def build(self) -> None:
        """Embed the passages, in the time that others leave (the class `offline`)."""
        vectors = await self._embed([each.text for each in self.passages], {"class": "offline"})
        self._mean = vectors.mean(axis=0)
        self._vectors = _unit(vectors - self._mean)

    async def search(self, query: str, num: int) -> list[Passage]:
        """Return the nearest passages, the nearest first."""
        (vector,) = await self._embed([query], {"ttft_ms": QUERY_MS})
        nearest = np.argsort(-self._vectors @ _unit(vector - self._mean))[:num]
        return [self.passages[place] for place in nearest]

    async def _embed(self, texts: list[str], slo: dict[str, object]) -> NDArray[np.float64]:
        answer = await self._client.embeddings.create(model=self._model, input=texts, extra_body={"slo": slo})
        return np.array([each.embedding for each in answer.data])


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return scaled
