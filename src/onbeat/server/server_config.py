"""What the HTTP server can be told; the engine has a configuration of its own."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.hang import HangLimits
from onbeat.core.options import check, option, part
from onbeat.server.paths import ENDPOINTS
from onbeat.server.slo_defaults import SLODefaults, key_digest
from onbeat.text.reply.families import FAMILIES, REASONING, family_named, reasoning_named

MAX_QUOTED = 100
"""Characters of a caller's names and paths that errors repeat; no field of any API has a name as long."""
MAX_STOP_STRINGS = 16
"""Most stop strings of one request."""

MAX_INPUTS = 2048
"""Most texts of one request for embeddings or scores, as OpenAI has it."""

MAX_BAD_WORDS = 128
"""Most `bad_words` of one request: each is looked for at every token."""

MAX_MESSAGES = 2**12
"""Most messages of one chat, and parts of their contents: the event loop checks them, one by one."""

MAX_VARIABLES_BYTES = 2**16
"""Most bytes of `chat_template_kwargs`, as JSON: no context says how much of it a template may be given."""

MAX_LISTED_TOKENS = 2**17
"""Most token ids that a request may list for its sampling, over all choices: each is sent its own lists."""

MAX_BIASES = 2**15
"""Most entries of `logit_bias`: the event loop checks them, one by one."""

MAX_JSON_VALUES = 2**18
"""Most values of one body, such as the token ids of its prompts: reading them takes some 15 ms."""

MAX_JSON_PARTS = 2**16
"""Most objects, arrays and fields of one body: each takes as long to read as ten numbers."""

MAX_JSON_LEVELS = 250
"""Objects and arrays inside of one another: what writes parts of a body again as JSON takes 254 levels."""

MAX_ANSWER_PARTS = 2**21
"""Most tokens and log-probabilities of one answer that has several choices: some 150 MB of JSON. 32 times as
many as the context has tokens are always taken, so that ordinary requests never meet this: 16 choices may
fill it, and so may two with 15 alternatives for each token."""

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+", re.ASCII)
"""What a browser sends as `Origin`, and `*` for all of them."""

_ROOT_PATH = re.compile(r"/?|(/[A-Za-z0-9._~-]+)+")
"""No prefix at all, or some parts of a path."""

_option = partial(option, group="server")


def _is_loopback(host: str) -> bool:
    """Return whether a server that listens there hears this machine alone."""
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except (OSError, UnicodeError):
        return False  # which binding tells
    return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of what clients may send and hold open before a request is complete."""

    max_connections: int = _option(
        4096,
        at_least=1,
        metavar="N",
        help="most open connections, idle ones included; a further one gets 503",
    )
    max_head_bytes: int = 64 * 2**10
    """Largest request line and headers; also of what is no body within a body: chunk extensions, trailers."""
    head_seconds: float = 30.0
    """What a client has for the whole head, from connecting or from its first byte."""
    body_seconds: float = 30.0
    """How often it is checked that a body comes on."""
    min_body_bytes: int = 16 * 2**10
    """What must come of an incomplete body within `body_seconds`."""
    max_unfinished_bytes: int = 128 * 2**20
    """Most that is held of incomplete bodies, of all connections together; four of the largest always fit."""

    def __post_init__(self) -> None:
        check(self, ConnectionLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server listens, whom it lets in and what it allows one request."""

    host: str = _option("127.0.0.1", help="address to listen on")
    port: int = _option(8000, at_least=0, at_most=65535, help="0 takes any free port")
    served_model_names: tuple[str, ...] = _option(
        (),
        flag="--served-model-name",
        many="append",
        metavar="NAME",
        help="name in /v1/models and requests; repeatable, the first is in responses (default: the engine's)",
    )
    api_keys: tuple[str, ...] = ()
    """Any of them opens the server. If there are any, only `OPEN_PATHS` are open without one."""
    fleet_key: str | None = _option(
        None,
        metavar="KEY",
        help="key that opens /fleet, in place of the API keys (or $ONBEAT_FLEET_KEY); without any key /fleet "
        "is closed",
    )
    ssl_keyfile: Path | None = _option(None, metavar="FILE", help="TLS key, PEM")
    ssl_certfile: Path | None = _option(None, metavar="FILE", help="TLS certificate, PEM")
    allowed_origins: tuple[str, ...] = _option(
        (),
        many="append",
        metavar="ORIGIN",
        help="web origin whose pages may call the server (CORS); repeatable, or a JSON list; *: every origin",
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        many="append",
        metavar="NAME",
        help="host name under which clients may reach the server, such as a proxy's; repeatable; *: any name "
        "(default: any, or on a loopback address without API keys only localhost and the like)",
    )
    connections: ConnectionLimits = part(ConnectionLimits)
    front_ends: int = _option(
        1,
        at_least=1,
        at_most=64,
        metavar="N",
        aliases=("--api-server-count", "-asc"),
        help="processes that speak HTTP; each that dies is started again, and the engines live on",
    )
    max_body_bytes: int = _option(10 * 2**20, at_least=1, metavar="BYTES", help="largest request")
    max_n: int = _option(16, at_least=1, metavar="N", help="largest `n` of a request")
    max_choices: int = 512
    """Most choices of one request, over all its prompts."""
    max_unread_bytes: int = 2**28
    """What answers that wait for their readers may hold together, beside what sockets hold."""
    max_logprobs: int = _option(
        20, at_least=-1, metavar="N", help="largest `top_logprobs`; -1 allows the whole vocabulary"
    )
    shutdown_timeout: float = _option(
        30.0, metavar="SECONDS", at_least=0, below=inf, help="time to drain after SIGTERM"
    )
    hang: HangLimits = field(default_factory=HangLimits)
    log_requests: bool = _option(default=True, help="log one line for each request")
    root_path: str = _option(
        "", metavar="PREFIX", help="path prefix that a proxy puts before this server, such as /llm"
    )
    force_include_usage: bool = _option(
        default=False,
        flag="--enable-force-include-usage",
        help="put the usage so far into every event of a stream",
    )
    metrics_aliases: Literal["vllm"] | None = _option(None, help="export metrics under these names too")
    slo: SLODefaults = field(default_factory=SLODefaults)
    """What requests get that do not state it themselves: objectives, class, weight."""
    tool_call_parser: str = _option(
        "auto",
        metavar="NAME",
        help="how tool calls are found in answers; auto: as the chat template writes them; none: not at "
        f"all; or {', '.join(FAMILIES)} (or vLLM's name)",
    )
    reasoning_parser: str = _option(
        "auto",
        metavar="NAME",
        help="how reasoning is found in answers; auto: as the template or vocabulary has it; none: not at "
        f"all; or {', '.join(REASONING)}",
    )

    def __post_init__(self) -> None:
        check(self, ServerConfig)
        self._check_addresses()
        if self.tool_call_parser not in ("auto", "none"):
            family_named(self.tool_call_parser)
        if self.reasoning_parser not in ("auto", "none"):
            reasoning_named(self.reasoning_parser)
        for name, keys in (("an API key", self.api_keys), ("the fleet's key", self.fleet_keys)):
            if any(not (key.isascii() and key.isprintable() and key.strip() == key != "") for key in keys):
                raise ConfigError(
                    f"{name} is empty, not ASCII, or has a space or line end around it, as no request can "
                    "carry it; leave it out or choose another"
                )
        if "" in self.served_model_names:
            raise ConfigError("served_model_name is empty; give a name, or leave the flag out")
        if self.slo.keys.keys() - {key_digest(key) for key in self.api_keys}:
            raise ConfigError(
                "api_keys of --slo-classes names an API key that opens nothing here; "
                "give the key itself by --api-key, too"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile; only one is given")

    def _check_addresses(self) -> None:
        if wrong := [each for each in self.allowed_origins if not _ORIGIN.fullmatch(each)]:
            raise ConfigError(
                f"allowed_origins holds {wrong[0]!r}, which no browser sends; give *, or an origin such as "
                "https://app.example or http://localhost:3000, in small letters and without a path"
            )
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path is {quoted(self.root_path)}; give a path such as /llm, without / at its end"
            )
        prefix = self.prefix
        if prefix and (taken := [path for path in sorted(ENDPOINTS) if f"{path}/".startswith(f"{prefix}/")]):
            raise ConfigError(f"root_path is {prefix!r}, where {taken[0]} already is; choose another prefix")

    @property
    def prefix(self) -> str:
        """What stands before paths that a proxy shows, such as `/llm`; empty for nothing."""
        return self.root_path.rstrip("/")

    @property
    def answered_hosts(self) -> frozenset[str] | None:
        """Names with a dot under which the server answers, in small letters; None where it is any.

        Where neither keys nor the network keep strangers out, a page of theirs could otherwise give its own
        name this machine's address, and be taken by a browser for a page of this server (DNS rebinding).
        """
        is_guarded = bool(self.api_keys) or not _is_loopback(self.host)
        if "*" in self.allowed_hosts or (is_guarded and not self.allowed_hosts):
            return None
        return frozenset(map(str.lower, (*self.allowed_hosts, self.host, socket.gethostname())))

    @property
    def fleet_keys(self) -> tuple[str, ...]:
        """The keys that open /fleet; where there are none, nobody is let in."""
        return self.api_keys if self.fleet_key is None else (self.fleet_key,)

    @property
    def guarding_keys(self) -> tuple[str, ...]:
        """The keys that open the rest of the API; where there are none, everybody is let in."""
        return tuple(dict.fromkeys((*self.api_keys, *self.fleet_keys))) if self.api_keys else ()
