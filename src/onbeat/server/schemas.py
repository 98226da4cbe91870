"""Answers as /openapi.json describes them. Documentation only: no answer is made through these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class Objectives(BaseModel):
    """What a request was promised."""

    slo_class: str | None = Field(alias="class")
    ttft_ms: float | None
    tbt_ms: float | None
    e2e_ms: float | None


class ErrorDetail(BaseModel):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None
    reason: str | None = None
    predicted_ttft_ms: float | None = None
    slo: Objectives | None = None


class ErrorBody(BaseModel):
    """What every error looks like."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int
    accepted_prediction_tokens: int = Field(
        description="Of the completion tokens, those that were proposed as drafts; 0 without speculation"
    )
    rejected_prediction_tokens: int = Field(
        description="Draft tokens that are not in the answer; they are not completion tokens"
    )


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(BaseModel):
    role: str
    content: str


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatChoice(_Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class SLOReport(BaseModel):
    """How a promise was kept; of several choices, for the worst."""

    slo_class: str | None = Field(alias="class")
    ttft_ms: float | None
    tbt_p99_ms: float | None
    token_attainment: float | None
    met: bool
    predicted_ttft_ms: float | None
    relegated: bool


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    slo: SLOReport | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    slo: SLOReport | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class EngineLoad(BaseModel):
    server_load: int


class VersionInfo(BaseModel):
    version: str


_MEANINGS = {
    400: "The request is malformed, asks for something unsupported, or does not fit the context",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    413: "The body is over the limit",
    429: "The server sheds this request; see Retry-After",
    500: "The engine failed on this request",
    503: "The server is overloaded, shutting down, or its engine is dead",
    504: "The TTFT objective is out of reach after a wait in the queue",
}


def error_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of error answers."""
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in statuses}
