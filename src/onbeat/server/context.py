"""What is known of one HTTP request while it is served; the access log and the metrics read it at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.types import Scope

_KEY = "onbeat"


@dataclass(slots=True)
class HttpContext:
    """One HTTP request, from its first byte to the end of the answer. Times are of the monotonic clock."""

    request_id: str
    """The caller's `x-request-id`, or one of ours."""
    endpoint: str
    """The route, or `unmatched`: a name from a small set, fit for a metric label."""
    started: float = field(default_factory=time.monotonic)
    key_digest: str | None = None
    """SHA-256 of the API key that let it in, hexadecimal; None where none was asked for."""
    status: int = 0
    completion_id: str | None = None
    """The id of the answer (`chatcmpl-...`); the engine's request ids start with it."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft: float | None = None
    """Seconds from arrival to the first delivery of any choice."""
    finish: str | None = None
    """Finish reasons of the choices, comma separated."""
    error_code: str | None = None
    ignored_fields: list[str] = field(default_factory=list)
    """Paths of fields that nobody knows and the answer does not depend on."""

    @property
    def elapsed(self) -> float:
        """Seconds since the request's first byte."""
        return time.monotonic() - self.started


def put_context(scope: Scope, context: HttpContext) -> None:
    """Attach a context to a request."""
    scope[_KEY] = context


def context_of(scope: Scope) -> HttpContext:
    """Return the context that the outermost middleware attached."""
    context = scope[_KEY]
    assert isinstance(context, HttpContext)
    return context
