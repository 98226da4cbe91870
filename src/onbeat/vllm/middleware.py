"""onbeat's objectives in front of vLLM's API: `vllm serve --middleware onbeat.vllm.SLOMiddleware`.

vLLM makes one for its application, and runs it outside of its own check of API keys. Nothing of vLLM is
imported: what is needed of it hangs at the application's state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onbeat.core.errors import OnbeatError
from onbeat.server.body import receive_body
from onbeat.server.errors import ClientGone, error_response
from onbeat.server.slo_defaults import key_digest
from onbeat.vllm.objectives import ROUTES, KnownCaller, read_request
from onbeat.vllm.plugin_config import log_as_vllm_does, read_config
from onbeat.vllm.relay import TOLD_SECONDS, AnswerRelay
from onbeat.vllm.telemetry import Subscriber
from onbeat.vllm.verdicts import OpenRequests

logger = logging.getLogger("onbeat.vllm")

METRICS = "/metrics"
_CORS = {
    "allow_origins": "allowed_origins",
    "allow_credentials": "allow_credentials",
    "allow_methods": "allowed_methods",
    "allow_headers": "allowed_headers",
}
"""Settings of Starlette's CORS -> those of vLLM's server, whose own CORS never sees what we refuse."""


class SLOMiddleware:
    """Reads objectives, refuses with 429, 503 and 504, judges answers, and adds onbeat's metrics to vLLM's.

    Parameters
    ----------
    app : vLLM's application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._shared: _Shared | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            shared = self._shared_of(scope)
            try:
                await self._app(scope, receive, send)
            finally:
                shared.close()
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and scope["method"] == "POST" and path in ROUTES:
            await self._shared_of(scope).serve(self._app, path, scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "GET" and path.rstrip("/") == METRICS:
            self._shared_of(scope).requests.count_late()
            await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _shared_of(self, scope: Scope) -> _Shared:
        """Return what is made once the application has its state.

        Raises
        ------
        ConfigError : the configuration is wrong; the start of the server fails with it.
        """
        if self._shared is None:
            self._shared = _Shared(scope["app"].state)
        return self._shared


class _Shared:
    """What all requests share.

    Parameters
    ----------
    state : of vLLM's application: `vllm_config` and `args`.
    """

    def __init__(self, state: Any) -> None:
        log_as_vllm_does()
        vllm_config, args = getattr(state, "vllm_config", None), getattr(state, "args", None)
        self._config, self._defaults = read_config(
            getattr(vllm_config, "additional_config", None), os.environ
        )
        self._cors = {name: getattr(args, own) for name, own in _CORS.items() if hasattr(args, own)}
        self._asks_for_keys = bool(getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY"))
        self.requests = OpenRequests(self._defaults.mode)
        self._subscriber: Subscriber | None = None
        self._hearing: asyncio.Task[None] | None = None
        if self._config.telemetry is None:
            logger.warning(
                "no telemetry address is set, which `onbeat vllm serve` does: verdicts lack the predicted "
                "TTFT, and /metrics the step times"
            )
        else:
            parallel = getattr(vllm_config, "parallel_config", None)
            num_ranks = int(getattr(parallel, "data_parallel_size", 1) or 1)
            self._subscriber = Subscriber(self._config.telemetry, num_ranks)
            self._hearing = asyncio.get_running_loop().create_task(self._hear(self._subscriber))

    def close(self) -> None:
        """Stop hearing the scheduler."""
        if self._hearing is not None:
            self._hearing.cancel()
        if self._subscriber is not None:
            self._subscriber.close()

    async def _hear(self, subscriber: Subscriber) -> None:
        while True:
            self.requests.take(await subscriber.receive())

    async def serve(self, app: ASGIApp, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Let vLLM answer a request that it can be held to."""
        headers = Headers(scope=scope)
        caller = self._caller(headers)
        try:
            raw = bytes(await receive_body(headers, receive, self._config.max_body_bytes))
            request = read_request(path, raw, headers, caller, self._defaults, slo_id=uuid.uuid4().hex)
        except OnbeatError as error:
            response = error_response(error, path)
            await CORSMiddleware(response, **self._cors)(scope, receive, send)
            return
        except ClientGone:
            return
        if request is None:
            await app(scope, _replayed(raw, receive), send)
            return
        opened = self.requests.open(request)
        told_seconds = 0.0 if self._subscriber is None else TOLD_SECONDS
        relay = AnswerRelay(
            opened, scope, receive, send, ignored=caller.ignored_fields, told_seconds=told_seconds
        )
        try:
            scope = _with_length(scope, len(request.body))
            await app(scope, _replayed(request.body, receive), relay.send)
        except Exception:
            if not await relay.rescue():
                raise
        finally:
            self.requests.close(opened)

    def _caller(self, headers: Headers) -> KnownCaller:
        """Return whose key a request carries. Whether the key is good, vLLM decides."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return KnownCaller()
        digest = key_digest(key.strip())
        is_known = self._asks_for_keys or digest in self._defaults.keys
        return KnownCaller(digest if is_known else None)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body at once, and then what the client sends."""
    is_given = False

    async def receive_replayed() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_replayed


def _with_length(scope: Scope, num_bytes: int) -> Scope:
    """Return the scope of a request whose body has another length, in one piece."""
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name.lower() not in (b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*kept, (b"content-length", str(num_bytes).encode())]}
