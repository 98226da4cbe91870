"""The exception tree. Each message says what was wrong, the value, and what to do.

OnbeatError
├── ConfigError                 a flag, file or combination of them; the command line exits with 2
│   ├── DoesNotFit              memory holds no model and request of this size; a search exits with 3
│   ├── MissingExtra            an optional dependency is not installed
│   └── ModelLoadError          a model cannot be found, read or supported
│       └── NeedsVllm           it is beyond onbeat's own engines
├── RequestRejected             the caller's request; an HTTP 4xx
│   ├── InvalidRequest          a field or value is wrong
│   ├── PromptTooLong           prompt (+ max_tokens) does not fit the context or the KV cache
│   ├── Overloaded              the server does not take it now; HTTP 503
│   └── SLOUnattainable         its objectives cannot be kept; HTTP 429, or 504 once it has waited in vain
├── EngineDead                  the engine process is gone; HTTP 503
├── EngineError                 one request failed inside the engine; HTTP 500
└── KVUnavailable               another replica's KV cannot be had; what it would have saved is computed
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from itertools import islice
from typing import Any


class OnbeatError(Exception):
    """Root of everything onbeat raises on purpose."""


class ConfigError(OnbeatError):
    """A flag, a configuration file or a combination of them is wrong."""


class DoesNotFit(ConfigError):
    """Devices have too little memory for a model and the KV that it must hold; the message says bytes."""


class MissingExtra(ConfigError):
    """An optional dependency is needed; the message names the pip command that installs it."""


class ModelLoadError(ConfigError):
    """A model cannot be found, read, or is of a kind that onbeat does not support."""


class NeedsVllm(ModelLoadError):
    """A model, or how it is to run, is beyond onbeat's own engines; vLLM's workers may run it."""


class RequestRejected(OnbeatError):
    """The request cannot be served as it stands.

    Parameters
    ----------
    message : what is wrong, the value, what to do; `{field}` in it stands for `field`.
    param : the request field at fault, as the API spells it.
    code : short machine-readable code of the API's error body.
    field : the path of a field that another API may call otherwise; None is `param`.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0]).replace("{field}", self.field or self.param or "", 1)


class InvalidRequest(RequestRejected):
    """A field or value of the request is wrong. HTTP 400."""


class PromptTooLong(RequestRejected):
    """The prompt, or prompt plus output, does not fit. HTTP 400."""

    def __init__(self, message: str, *, param: str | None = "prompt") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class Overloaded(RequestRejected):
    """The server takes no more requests now. HTTP 503.

    Parameters
    ----------
    message : what is full, and what to do.
    retry_after : seconds after which there is predicted to be room; None without a prediction.
    reason : why, as metrics count it: `queue_full`, `queue_too_long`, `no_replica`.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "server_overloaded",
        retry_after: float | None = None,
        reason: str = "queue_full",
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after
        self.reason = reason


class SLOUnattainable(RequestRejected):
    """The request would miss its objective, and its caller prefers to hear so at once.

    Parameters
    ----------
    message : what is predicted, and against which objective.
    predicted_ttft : seconds from the request's arrival to its first token, had it been taken.
    retry_after : seconds after which the same request is expected to fit; None if waiting does not help,
        since not even an idle replica would keep its objective.
    code : `slo_unattainable` at arrival (HTTP 429), `deadline_exceeded` in the queue (HTTP 504).
    """

    def __init__(
        self,
        message: str,
        *,
        predicted_ttft: float,
        retry_after: float | None = 0.0,
        code: str = "slo_unattainable",
    ) -> None:
        super().__init__(message, param="slo", code=code)
        self.predicted_ttft = predicted_ttft
        self.retry_after = retry_after


class EngineDead(OnbeatError):
    """The engine process has ended; no request can be served until the server is started again."""


class EngineError(OnbeatError):
    """One request failed inside the engine; others go on."""


class KVUnavailable(OnbeatError):
    """KV that another replica holds, or held, cannot be copied: who wanted it computes the tokens itself."""


_MOST_QUOTED = 4
"""Values of a list that a message repeats."""


class _Quote(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)  # which sorts them


quoted = _Quote().repr
"""Returns a value, shortened, as errors repeat it, in a time that does not grow with it."""


def counted(number: int, noun: str, form: str = "") -> str:
    """Return how many there are of something, the number in a form: `1 request`, `2,000 requests`."""
    return f"{number:{form}} {noun}{'s' * (number != 1)}"


def first_of(values: Sequence[Any]) -> str:
    """Return the first few values as a message quotes them, and how many there are beside."""
    rest = len(values) - _MOST_QUOTED
    return ", ".join(map(quoted, values[:_MOST_QUOTED])) + (f" and {rest} more" if rest > 0 else "")
