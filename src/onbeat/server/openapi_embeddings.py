"""The description of the endpoints that embed texts: documentation only, no answer is made through it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from onbeat.server.answer_models import SLOReport
from onbeat.server.openapi import generation_route


def embedding_route(body: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
    """Return the description of an endpoint that embeds texts, as arguments of FastAPI's route."""
    own = {"tags": ["embeddings"], "response_model_exclude_none": False}
    described = generation_route(body, answer) | own
    described["responses"] = {
        status: told for status, told in described["responses"].items() if status != 200
    }
    return described


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    slo: SLOReport | None = None


class Pooled(BaseModel):
    object: Literal["pooling"]
    index: int
    data: list[float] | str


class PooledList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage
    slo: SLOReport | None = None


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(BaseModel):
    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
    slo: SLOReport | None = None


class Score(BaseModel):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    slo: SLOReport | None = None
