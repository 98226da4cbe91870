"""The description at /openapi.json, where FastAPI cannot find it by itself: bodies, headers, answers.

The models of answers are documentation only: no answer is made through them.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE
from onbeat.server.fields import HARMLESS, NO_OP_VALUES
from onbeat.server.middleware import OPEN_PATHS
from onbeat.server.objectives import LONGEST_TENANT, RESUME_HEADER, TBT_HEADER, TENANT_HEADER, TTFT_HEADER
from onbeat.server.prompts import TOKEN_ID_SCHEMA

_COMPONENT = "#/components/schemas/{model}"


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body that a route parses by hand; `describe` adds its schema."""
    schema = {"$ref": _COMPONENT.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_STREAM: dict[str, Any] = {
    "description": "The whole answer, or with `stream` server-sent events",
    "content": {
        "text/event-stream": {
            "schema": {
                "type": "object",
                "description": "One event; `data` is a chunk as JSON, an error body, or [DONE]",
                "properties": {"data": {"type": "string"}},
                "required": ["data"],
            }
        }
    },
}


def generation_route(
    body: type[BaseModel], answer: type[BaseModel], error: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Return the description of a completion endpoint, as arguments of FastAPI's route.

    Bodies are parsed by hand: FastAPI would accept NaN and answer mistakes with its own 422.
    """
    errors = error_answers(400, 401, 404, 413, 429, 500, 503, 504, model=error)
    return {
        "tags": ["generation"],
        "response_model": answer,
        "responses": {200: _STREAM, **errors},
        "openapi_extra": {**json_body(body), "parameters": _slo_headers()},
    }


def _slo_headers() -> list[dict[str, Any]]:
    """Return the description of the headers that say a request's objectives, and for whom it is."""
    objective = {"type": "number", "minimum": SHORTEST_OBJECTIVE * 1e3, "maximum": LONGEST_OBJECTIVE * 1e3}
    tenant = {"type": "string", "maxLength": LONGEST_TENANT}
    resume = {"type": "string", "enum": ["on", "off"], "default": "on"}
    described = [
        (TTFT_HEADER, "TTFT objective, milliseconds", objective),
        (TBT_HEADER, "TBT objective, milliseconds", objective),
        (RESUME_HEADER, "Whether it goes on elsewhere where its replica is lost", resume),
        (TENANT_HEADER, "Who shares the server fairly with others", tenant),
    ]
    return [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, text, schema in described
    ]


def describe(app: FastAPI, bodies: Iterable[type[BaseModel]], *, vocab_size: int, needs_key: bool) -> None:
    """Let an application describe the bodies it parses by hand, and its API key.

    Parameters
    ----------
    app : changed in place.
    bodies : the models that `json_body` was called with.
    vocab_size : token ids are below.
    needs_key : whether the guarded paths need an API key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(_body_schemas(bodies))
            _bound_token_ids(schemas, vocab_size)
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)  # FastAPI's 422, which this server never sends
            _finish_operations(schema, needs_key=needs_key)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _body_schemas(bodies: Iterable[type[BaseModel]]) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for model in bodies:
        schema = deepcopy(model.model_json_schema(ref_template=_COMPONENT))  # it holds constants of ours
        schemas.update(schema.pop("$defs", {}))
        is_closed = schema.get("additionalProperties") is False
        for name in () if is_closed else HARMLESS - schema["properties"].keys():
            schema["properties"][name] = {"description": "Accepted, without effect"}
        for name in () if is_closed else NO_OP_VALUES.keys() - schema["properties"].keys():
            schema["properties"][name] = {
                "description": "Not supported: only values that ask for nothing are accepted",
                "enum": list(NO_OP_VALUES[name]),
            }
        schemas[model.__name__] = schema
    return schemas


def _bound_token_ids(node: Any, vocab_size: int) -> None:
    """Give all token ids within a description their largest value."""
    if isinstance(node, dict) and node.items() >= TOKEN_ID_SCHEMA.items():
        node["maximum"] = vocab_size - 1
    elif isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            _bound_token_ids(each, vocab_size)


def _finish_operations(schema: dict[str, Any], *, needs_key: bool) -> None:
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if (needs_key and path not in OPEN_PATHS) or path.startswith("/fleet"):
                operation["security"] = [{"ApiKey": []}]
    schema["components"]["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}


class Objectives(BaseModel):
    """What a request was held to."""

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
    """How the objectives were kept; of several choices, by the worst."""

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


class ModelResponse(BaseModel):
    """OpenAI's response: `output` holds items of type `reasoning`, `message` and `function_call`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]
    incomplete_details: dict[str, Any] | None
    error: dict[str, Any] | None
    usage: dict[str, Any] | None
    slo: SLOReport | None = None


class AnthropicUsage(BaseModel):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AnthropicMessage(BaseModel):
    """Anthropic's message: `content` holds blocks of type `thinking`, `text` and `tool_use`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage
    slo: SLOReport | None = None


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """What every error of Anthropic's paths looks like; `error` has the fields of the others as well."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class TokenCount(BaseModel):
    input_tokens: int


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


class ReplicaLimitsShown(BaseModel):
    device: str
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int


class ReplicaStatus(BaseModel):
    replica: str
    state: Literal["starting", "ready", "draining", "down", "stopped"]
    why: str
    lives: int
    requests: int
    streaming: int
    process_id: int | None
    host: str
    silence_seconds: float | None
    limits: ReplicaLimitsShown | None
    load: dict[str, Any] | None


class FleetScaling(BaseModel):
    policy: str
    min: int
    max: int
    wanted: int
    why: str
    load_share: float | None
    planned_share: float | None


class FleetStatus(BaseModel):
    ready: bool
    requests_waiting: int
    scaling: FleetScaling | None
    replicas: list[ReplicaStatus]


class VersionInfo(BaseModel):
    version: str


_MEANINGS = {
    400: "The request is malformed, asks for something unsupported, or does not fit the context",
    401: "The API key is missing or wrong",
    403: "The caller may not do that",
    404: "There is no such model",
    413: "The body is over the limit",
    429: "The server sheds this request; see Retry-After",
    500: "The engine failed on this request",
    503: "The server is overloaded, shutting down, or its engine is dead",
    504: "The TTFT objective is out of reach after a wait in the queue",
}


def error_answers(*statuses: int, model: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of error answers, which are of a model (None: OpenAI's)."""
    return {status: {"model": model or ErrorBody, "description": _MEANINGS[status]} for status in statuses}
