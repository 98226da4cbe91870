"""From exceptions to HTTP: the one place where an error gets its status and its body.

========================================  ======  =======================================================
error                                     status  type / code of the body
========================================  ======  =======================================================
InvalidRequest                            400     invalid_request_error / invalid_value or its own code
PromptTooLong                             400     invalid_request_error / context_length_exceeded
missing or wrong API key                  401     invalid_request_error / invalid_api_key
unknown model                             404     invalid_request_error / model_not_found
unknown path, wrong method                404/5   invalid_request_error / not_found, method_not_allowed
body over the limit                       413     invalid_request_error / request_too_large
Overloaded                                503     server_error / server_overloaded or its own code
EngineDead                                503     server_error / engine_dead
EngineError                               500     server_error / engine_error
anything else                             500     server_error / internal_error
========================================  ======  =======================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import EngineDead, EngineError, InvalidRequest, Overloaded, RequestRejected

CLIENT_GONE = 499
"""Logged and counted, never sent: the client closed the connection before it had its answer."""

RETRY_AFTER_SECONDS = 1


class ApiError(RequestRejected):
    """A refusal that only HTTP knows, with its status.

    Parameters
    ----------
    status : HTTP status.
    message : what is wrong, the value, what to do.
    param : the request field at fault.
    code : the body's `code`.
    headers : sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.headers = dict(headers or {})


class ErrorReply(NamedTuple):
    """An error as a client sees it."""

    status: int
    body: bytes
    """JSON: `{"error": {"message", "type", "param", "code"}}`."""
    headers: dict[str, str]


def unsupported(message: str, param: str) -> InvalidRequest:
    """Return the error for a field that onbeat knows and cannot honour."""
    return InvalidRequest(message, param=param, code="unsupported_parameter")


def error_reply(error: Exception) -> ErrorReply:
    """Return the status, body and headers that an exception becomes."""
    param: str | None = None
    headers: dict[str, str] = {}
    match error:
        case ApiError():
            status, code, param, headers = error.status, error.code, error.param, error.headers
        case Overloaded():
            status, code, param = 503, error.code or "server_overloaded", error.param
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        case RequestRejected():
            status, code, param = 400, error.code or "invalid_value", error.param
        case EngineDead():
            status, code = 503, "engine_dead"
        case EngineError():
            status, code = 500, "engine_error"
        case HTTPException():
            return _http_exception_reply(error)
        case _:
            return ErrorReply(500, error_body(500, "the server failed on this request", "internal_error"), {})
    return ErrorReply(status, error_body(status, str(error), code, param), headers)


def _http_exception_reply(error: HTTPException) -> ErrorReply:
    codes = {404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, HTTPStatus(error.status_code).name.lower())
    messages = {404: "there is no such path; GET /docs lists them", 405: "this path has no such method"}
    message = messages.get(error.status_code, str(error.detail))
    return ErrorReply(
        error.status_code, error_body(error.status_code, message, code), dict(error.headers or {})
    )


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> bytes:
    """Return the JSON of an error."""
    if status >= 500:
        kind = "server_error"
    else:
        kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    # A message may quote half a surrogate pair from the request, which JSON cannot carry.
    message = message.encode(errors="backslashreplace").decode()
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_response(error: Exception) -> Response:
    """Return the HTTP response that an exception becomes."""
    reply = error_reply(error)
    return Response(reply.body, reply.status, reply.headers, "application/json")


def handle_error(_request: Request, error: Exception) -> Response:
    """Answer an exception (the shape that Starlette wants of a handler)."""
    return error_response(error)
