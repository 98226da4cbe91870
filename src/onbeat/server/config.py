"""What the HTTP server can be told; the engine has a configuration of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from onbeat.core.errors import ConfigError
from onbeat.server.slo_defaults import SLODefaults, key_digest

MAX_STOP_STRINGS = 16
"""Most stop strings of one request."""

MAX_MESSAGES = 2**13
"""Most messages of one chat, and parts of their contents: the event loop checks them, one by one."""

MAX_LISTED_TOKENS = 2**17
"""Most token ids that a request may list for its sampling, over all choices: each is sent its own lists."""

MAX_JSON_VALUES = 2**19
"""Most values of one body, such as the token ids of its prompts."""

MAX_JSON_PARTS = 2**17
"""Most objects, arrays and fields of one body: each takes as long to read as ten numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of what clients may send and hold open before a request is complete."""

    max_connections: int = 4096
    """Open connections, idle ones included; one more is refused."""
    max_head_bytes: int = 64 * 2**10
    """Largest request line and headers; also of what is no body within a body: chunk extensions, trailers."""
    head_seconds: float = 30.0
    """What a client has for the whole head, from connecting or from its first byte."""
    body_seconds: float = 30.0
    """How often it is checked that a body comes on."""
    min_body_bytes: int = 16 * 2**10
    """What must come of an incomplete body within `body_seconds`."""

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError(f"max_connections is {self.max_connections}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """When an engine is held to hang. It gives a sign of life every second, also while a step runs."""

    silence_seconds: float = 30.0
    """Longest time without a sign of life."""
    step_seconds: float = 30.0
    """A step may always take this long."""
    step_ratio: float = 100.0
    """Beyond that, it may take this many times what was predicted."""
    unpredicted_step_seconds: float = 600.0
    """What a step may take where nothing predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server listens, whom it lets in and what it allows one request."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    served_model_names: tuple[str, ...] = ()
    """Names under which the model answers, the first in responses; empty means the engine's own name."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the server. If there are any, only `middleware.OPEN_PATHS` are open without one."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the server (CORS); `*` is every origin."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    max_body_bytes: int = 10 * 2**20
    max_n: int = 16
    """Most choices per prompt."""
    max_choices: int = 512
    """Most choices of one request, over all its prompts."""
    max_top_logprobs: int = 20
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    hang: HangLimits = field(default_factory=HangLimits)
    log_requests: bool = True
    """Whether to log a line for each request."""
    metrics_aliases: Literal["vllm"] | None = None
    """Export the metrics under this server's names as well."""
    slo: SLODefaults = field(default_factory=SLODefaults)
    """What requests are promised that do not say it themselves."""
    response_role: str = "assistant"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535")
        for name in ("max_body_bytes", "max_n", "max_choices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_top_logprobs < 0:
            raise ConfigError(f"max_top_logprobs is {self.max_top_logprobs}; it must not be negative")
        # also against nan and inf, which no timer takes: the first signal would be the last one heard
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(
                f"shutdown_timeout is {self.shutdown_timeout}; it must be finite and not negative"
            )
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ConfigError("an API key is empty or not ASCII; leave it out or choose another")
        if self.slo.keys.keys() - {key_digest(key) for key in self.api_keys}:
            raise ConfigError(
                "terms are given for an API key that opens nothing here; add it to the API keys"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile; only one is given")
        if self.metrics_aliases not in (None, "vllm"):
            raise ConfigError(f"metrics_aliases is {self.metrics_aliases!r}; the only aliases are 'vllm'")
