"""What answers look like, for the description at /openapi.json alone: none is made through these models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


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


class TextUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Usage(TextUsage):
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


class AnsweredFunction(BaseModel):
    name: str
    arguments: str = Field(
        description="JSON as the model wrote it; not complete where the answer was cut off"
    )


class AnsweredCall(BaseModel):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(BaseModel):
    role: str
    content: str | None = Field(description="Null beside calls without text")
    reasoning: str | None = Field(None, description="What the model thought before it answered")
    reasoning_content: str | None = Field(None, description="The same, by its older name")
    tool_calls: list[AnsweredCall] | None = None


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatChoice(_Choice):
    finish_reason: Literal["stop", "length", "tool_calls"]  # type: ignore[assignment]
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class JobReport(BaseModel):
    """How the job of a call stands after it."""

    id: str
    calls: int
    elapsed_ms: float
    in_calls_ms: float
    remaining_ms: float | None
    share_ms: float | None
    replica: str | None
    moved: str | None
    """Why another replica than that of the call before it served the call; null if it was the same."""
    met: bool | None


class SLOReport(BaseModel):
    """How the objectives were kept; of several choices, by the worst."""

    slo_class: str | None = Field(alias="class")
    ttft_ms: float | None
    tbt_p99_ms: float | None
    engine_ttft_ms: float | None
    token_attainment: float | None
    met: bool
    predicted_ttft_ms: float | None
    relegated: bool
    job: JobReport | None = None
    """Only of a call of a job."""


class PromptLogprob(BaseModel):
    """One token at a place of the prompt: the prompt's own, or one of the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id; null for the first token, before which there is none."""


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
    prompt_logprobs: PromptLogprobs | None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: TextUsage
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


class InputTokens(TokenCount):
    object: Literal["response.input_tokens"]


class ModelCard(BaseModel):
    """A model as both OpenAI's and Anthropic's clients read it."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    additional_special_tokens: list[str]
    chat_template: str | None


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
