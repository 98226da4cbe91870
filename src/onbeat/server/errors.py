"""From exceptions to HTTP: the one place where an error gets its status and its body.

========================================  ======  =======================================================
error                                     status  type / code of the body
========================================  ======  =======================================================
InvalidRequest                            400     invalid_request_error / invalid_value or its own code
PromptTooLong                             400     invalid_request_error / context_length_exceeded
missing or wrong API key                  401     invalid_request_error / invalid_api_key
limit of an API key reached               429     rate_limit_error / rate_limit_exceeded
unknown model                             404     invalid_request_error / model_not_found
unknown path, wrong method                404/5   invalid_request_error / not_found, method_not_allowed
body over the limit                       413     invalid_request_error / request_too_large
SLOUnattainable                           429     rate_limit_error / slo_unattainable
Overloaded                                503     server_error / server_overloaded or its own code
SLOUnattainable, waited in vain           504     server_error / deadline_exceeded
EngineDead                                503     server_error / engine_dead
the engine hangs (health checks alone)    503     server_error / engine_hangs
EngineError                               500     server_error / engine_error
anything else                             500     server_error / internal_error
========================================  ======  =======================================================

What never becomes a request is refused in `connection`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType, field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core import errors
from onbeat.core.slo import SLO
from onbeat.server.paths import ENDPOINTS
from onbeat.server.server_config import MAX_QUOTED

CLIENT_GONE = 499
"""Logged and counted, never sent: the client closed the connection before it had its answer."""

PREDICTED_TTFT_HEADER = "x-onbeat-predicted-ttft-ms"

IGNORED_FIELDS_HEADER = "x-onbeat-ignored-fields"
"""Of answers: the fields of the request that this server does not know and left out."""

RETRY_AFTER_SECONDS = 1
RETRY_AFTER_RESTART_SECONDS = 5
"""A server that is started again has to load its model."""
LONGEST_RETRY_SECONDS = 24 * 3600
"""Stands for every longer wait, and for one that nobody can tell the end of."""


class ApiError(errors.RequestRejected):
    """A refusal that only HTTP knows, with its status.

    Parameters
    ----------
    status : HTTP status.
    message : what is wrong, the value, what to do.
    param : the request field at fault.
    code : the body's `code`.
    headers : sent along.
    details : further fields of the body's error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.headers = dict(headers or {})
        self.details = dict(details or {})


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


class Objectives(Struct):
    """What a request was held to."""

    ttft_ms: float | None
    tbt_ms: float | None
    e2e_ms: float | None
    slo_class: str | None = field(name="class")


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    reason: str | UnsetType = UNSET
    limit: str | UnsetType = UNSET
    predicted_ttft_ms: float | UnsetType | None = UNSET
    predicted_job_ms: float | UnsetType | None = UNSET
    slo: Objectives | UnsetType = UNSET


class ErrorBody(Struct):
    """What every error looks like."""

    error: ErrorDetail


class AnthropicErrorBody(Struct, kw_only=True):
    """What every error of Anthropic's paths looks like; `error` has the fields of the others as well."""

    type: Literal["error"] = "error"
    error: ErrorDetail


class ErrorReply(NamedTuple):
    """An error as a client sees it."""

    status: int
    code: str
    error: ErrorDetail
    headers: dict[str, str]


def unsupported(message: str, param: str) -> errors.InvalidRequest:
    """Return the error for a field that onbeat knows and cannot honour."""
    return errors.InvalidRequest(message, param=param, code="unsupported_parameter")


def error_reply(error: Exception) -> ErrorReply:
    """Return the status, body and headers that an exception becomes."""
    param: str | None = None
    headers: dict[str, str] = {}
    details: dict[str, Any] = {}
    message = str(error)
    match error:
        case ApiError():
            status, code, param = error.status, error.code, error.param
            headers, details = error.headers, error.details
        case errors.Overloaded():
            status, code, param = 503, error.code, error.param
            if error.retry_after is None:
                headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            else:
                headers = retry_headers(error.retry_after)
        case errors.RequestRejected():
            status, code, param = 400, error.code, error.param
        case errors.EngineDead():
            status, code = 503, "engine_dead"
            headers = {"Retry-After": str(RETRY_AFTER_RESTART_SECONDS)}
        case errors.EngineError():
            status, code = 500, "engine_error"
        case HTTPException():
            status, headers = error.status_code, dict(error.headers or {})
            code = HTTPStatus(status).name.lower()
            message = f"no such method here; try {headers['Allow']}" if status == 405 else str(error.detail)
        case _:
            status, code = 500, "internal_error"
            message = "the server failed on this request"
    return ErrorReply(status, code, _detail(status, message, code, param, details), headers)


def too_large(max_bytes: int) -> ApiError:
    """Return what a request gets whose body is over a limit."""
    return ApiError(
        413,
        f"the request's body is larger than the limit of {max_bytes} bytes; send less",
        code="request_too_large",
    )


def engine_hangs(reason: str) -> ApiError:
    """Return what health checks get while the engine hangs."""
    return ApiError(
        503,
        f"the engine hangs: {reason}; see the server's log",
        code="engine_hangs",
        headers={"Retry-After": str(RETRY_AFTER_RESTART_SECONDS)},
    )


class HasObjectives(Protocol):
    """What an answer says of a request that is refused."""

    @property
    def slo(self) -> SLO | None: ...

    @property
    def slo_class(self) -> str | None: ...


NEVER_RETRY = {"x-should-retry": "false"}
"""Of refusals that waiting does not help: clients of OpenAI and Anthropic do not come again by themselves."""
_LATE, _OUT_OF_REACH = "predicted_ttft_above_objective", "out_of_reach_when_idle"
_REASONS = {"deadline_exceeded": "ttft_out_of_reach_after_waiting", "server_overloaded": "queue_too_long"}
"""Code of an error of objectives -> why."""


def unattainable(error: errors.SLOUnattainable, request: HasObjectives) -> ApiError:
    """Return what a caller gets to know whose objectives cannot be kept: 429 at once, 504 after a wait."""
    has_waited = error.code == "deadline_exceeded"
    predicted = error.predicted_ttft if math.isfinite(error.predicted_ttft) else None
    slo = request.slo
    ttft, tbt, e2e = (milliseconds(getattr(slo, name, None)) for name in ("ttft", "tbt", "e2e"))
    retry = NEVER_RETRY
    if error.retry_after is not None:
        # After a wait there is no estimate unless the engine gives one; clients then back off by themselves.
        retry = {} if has_waited and not error.retry_after > 0 else retry_headers(error.retry_after)
    return ApiError(
        504 if has_waited else 429,
        str(error),
        code=error.code,
        param=error.param,
        headers={**retry, **predicted_ttft_header(predicted)},
        details={
            "reason": _REASONS.get(error.code, _OUT_OF_REACH if retry is NEVER_RETRY else _LATE),
            "predicted_ttft_ms": milliseconds(predicted),
            "slo": Objectives(ttft, tbt, e2e, request.slo_class),
        },
    )


def job_unattainable(error: errors.SLOUnattainable) -> ApiError:
    """Return what a caller gets to know whose job cannot end in time: 429 at its first call."""
    return ApiError(
        429,
        str(error),
        code=error.code,
        param="slo.job",
        headers=retry_headers(error.retry_after or 0.0),
        details={
            "reason": "predicted_job_time_above_deadline",
            "predicted_job_ms": milliseconds(error.predicted_ttft),
        },
    )


def predicted_ttft_header(predicted: float | None) -> Mapping[str, str]:
    """Return the header that tells a prediction, if there is one; answers have it as well as refusals.

    Parameters
    ----------
    predicted : seconds from the request's arrival to its first token.
    """
    return {} if predicted is None else {PREDICTED_TTFT_HEADER: f"{predicted * 1e3:.1f}"}


def retry_headers(seconds: float) -> dict[str, str]:
    """Return when to try again: as the standard has it, and as OpenAI's clients read it first."""
    seconds = min(seconds, LONGEST_RETRY_SECONDS) if seconds > 0 else RETRY_AFTER_SECONDS
    return {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1e3))}


def milliseconds(seconds: float | None) -> float | None:
    """Return a time as answers state it; None stays None."""
    return None if seconds is None else round(seconds * 1e3, 3)


def error_body(status: int, message: str, code: str | None) -> bytes:
    """Return the JSON of an error."""
    return msgspec.json.encode(ErrorBody(_detail(status, message, code)))


def _detail(
    status: int,
    message: str,
    code: str | None,
    param: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> ErrorDetail:
    if status >= 500:
        kind = "server_error"
    else:
        kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    # A message may quote half a surrogate pair from the request, which JSON cannot carry.
    message = message.encode(errors="backslashreplace").decode()
    return ErrorDetail(message, kind, param, code, **(details or {}))


_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Statuses -> what Anthropic's API calls such an error; others are the caller's mistake or ours."""


def anthropic_error(reply: ErrorReply) -> AnthropicErrorBody:
    """Return an error as Anthropic's API has it, with what ours tells beside."""
    usual = "api_error" if reply.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(reply.status, usual)
    return AnthropicErrorBody(error=msgspec.structs.replace(reply.error, type=kind))


def error_response(error: Exception, path: str) -> Response:
    """Return the HTTP response that an exception becomes, in the form of the API that a path belongs to."""
    reply = error_reply(error)
    body = anthropic_error(reply) if path.startswith(_ANTHROPIC_PATH) else ErrorBody(reply.error)
    return Response(msgspec.json.encode(body), reply.status, reply.headers, "application/json")


_LIKENESS_OF_PATHS = 0.8
"""From here on a path may be meant by another: a base address with /v1 too many, or without it."""


async def handle_error(request: Request, error: Exception) -> Response:
    """Answer an exception (Starlette's shape of a handler; it runs one that is not async in a thread)."""
    path = request.url.path
    if isinstance(error, HTTPException) and error.status_code == 404:
        shown = path[:MAX_QUOTED]
        near = get_close_matches(shown, ENDPOINTS, 1, _LIKENESS_OF_PATHS)
        hint = f"did you mean {near[0]}? " if near else ""
        if near == [shown]:  # of an API that is not there without a flag
            hint = "it needs a server started with --enable-lora; "
        error = ApiError(404, f"there is no path {shown!r}; {hint}GET /docs lists all", code="not_found")
    return error_response(error, path)
