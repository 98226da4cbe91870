"""A request to a route of vLLM's: what it is held to, and its body as vLLM is to get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.datastructures import Headers

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.fields import refuse_misplaced, validated
from onbeat.server.objectives import (
    Caller,
    ObjectiveFields,
    RequestObjectives,
    metadata_objectives,
    request_objectives,
)
from onbeat.server.slo_defaults import SLODefaults
from onbeat.vllm.objectives import PREFIX, as_extra_args, refuse_job

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ROUTES = frozenset((CHAT, COMPLETIONS, RESPONSES, MESSAGES))
"""The paths whose requests and answers are understood; to others the server's defaults apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """What a client asked for."""

    path: str
    slo_id: str
    body: bytes
    """For vLLM."""
    objectives: RequestObjectives
    is_streamed: bool


def read_request(
    path: str, raw: bytes, headers: Headers, caller: Caller, defaults: SLODefaults, *, slo_id: str
) -> ReadRequest | None:
    """Return a request with its objectives in `vllm_xargs`; None if its body is no JSON object.

    What is no object is for vLLM to refuse, in its own words. Of the body `slo` is taken out, and replaced
    by what it comes to; keys `slo_...` of `vllm_xargs` and of `metadata` state objectives where there is
    no `slo`.

    Raises
    ------
    InvalidRequest : an objective is wrong, wherever it is stated.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(body, dict):
        return None
    refuse_misplaced(body)
    stated = body.pop("slo", None)
    others = _mapping(body, "vllm_xargs")
    if stated is None:
        stated = metadata_objectives(others) or metadata_objectives(_mapping(body, "metadata"))
    fields = validated(ObjectiveFields, {"slo": stated, **_shared(path, body)}, [])
    objectives = request_objectives(fields, headers, caller, defaults)
    refuse_job(objectives.job)
    kept = {name: value for name, value in others.items() if not name.startswith(PREFIX)}
    body["vllm_xargs"] = kept | as_extra_args(objectives, slo_id)
    return ReadRequest(
        path=path,
        slo_id=slo_id,
        body=orjson.dumps(body),
        objectives=objectives,
        is_streamed=body.get("stream") is True,
    )


def _mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{name} is {quoted(value)}; it should be an object", param=name, code="invalid_value"
        )
    return value


def _shared(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that bear on objectives and that vLLM gets, too."""
    if path == MESSAGES:  # whose tiers name no class
        user = _mapping(body, "metadata").get("user_id")
        return {"user": user if isinstance(user, str) else None}
    return {"service_tier": body.get("service_tier"), "user": body.get("user")}
