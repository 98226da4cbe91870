"""The paths of the API, known before anything that answers them is loaded."""

from __future__ import annotations

OPEN_PATHS = frozenset(
    ("/", "/health", "/ping", "/ready", "/load", "/version", "/metrics", "/state", "/docs", "/openapi.json")
)
"""The paths that need no API key, beside the files of the page of `/docs`. All others do, those that do not
exist included."""

RERANK_PATHS = ("/v1/rerank", "/rerank")
"""Jina's path, and vLLM's."""
SCORE_PATHS = ("/score", "/v1/score")
ENDPOINTS = OPEN_PATHS | {
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}"),
    *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/{response_id}"),
    *("/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/tokenizer_info"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/v1/embeddings", *RERANK_PATHS, *SCORE_PATHS),
    *("/fleet", "/fleet/drain", "/fleet/scale", "/fleet/restart"),
}
"""The paths that the log and the metrics tell apart."""
