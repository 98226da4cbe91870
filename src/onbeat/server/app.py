"""Put the HTTP application together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from onbeat.core.errors import OnbeatError
from onbeat.core.fleet import FleetView
from onbeat.core.protocols import EngineClient
from onbeat.core.tokenizer import Tokenizer
from onbeat.server import middleware
from onbeat.server.chat import chat_routes
from onbeat.server.completions import completion_routes
from onbeat.server.embeddings import embedding_routes, score_routes
from onbeat.server.errors import IGNORED_FIELDS_HEADER, PREDICTED_TTFT_HEADER, handle_error
from onbeat.server.generation import Generator, Lifecycle
from onbeat.server.logprobs import LogprobWriter
from onbeat.server.messages import message_routes
from onbeat.server.openapi import describe
from onbeat.server.paths import ENDPOINTS
from onbeat.server.pieces import SlowReaders
from onbeat.server.prompts import PromptEncoder
from onbeat.server.rate_limits import RATE_HEADERS
from onbeat.server.reply import reply_style
from onbeat.server.response_routes import response_routes
from onbeat.server.server_config import ServerConfig
from onbeat.server.services import EngineHealth, Services, garbage_kept, tidy
from onbeat.server.status import adapter_routes, fleet_routes, health_routes, home_routes, model_routes
from onbeat.server.structured import GrammarChecks
from onbeat.server.telemetry import Telemetry
from onbeat.server.tokenization import tokenizer_routes
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.grammar.guard import GrammarGuard
from onbeat.version import __version__

EXPOSED_HEADERS = (
    *("x-request-id", "openai-processing-ms", "retry-after", "retry-after-ms", "x-should-retry"),
    *(PREDICTED_TTFT_HEADER, IGNORED_FIELDS_HEADER, *RATE_HEADERS),
)
"""Headers of answers that pages of other origins may read."""


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    config: ServerConfig,
    telemetry: Telemetry,
    *,
    fleet: FleetView | None = None,
) -> FastAPI:
    """Return the OpenAI-compatible application over a running engine.

    Parameters
    ----------
    engine : where requests go; its `info` must be known already.
    tokenizer : the model's.
    chat_template : how chats become prompts; None for base models, whose chat endpoint then answers 400.
    config : who may call and what one request may ask for.
    telemetry : metrics and timeline; its tracker must observe the engine.
    fleet : the replicas behind the engine client, to show and to ask; None where there is nothing to ask.

    Notes
    -----
    `app.state` has what `server.run` needs of the application: `lifecycle`, `fleet`, `telemetry`, and
    `warm_up`, which does ahead what first requests would wait for; and `max_body_bytes`, for `body`.
    """
    lifecycle = Lifecycle()
    info = engine.info
    services = Services(
        engine=engine,
        fleet=fleet,
        tokenizer=tokenizer,
        chat_template=chat_template,
        reply_style=reply_style(config, chat_template, tokenizer),
        config=config,
        lifecycle=lifecycle,
        encoder=PromptEncoder(tokenizer, vocab_size=info.vocab_size, max_model_len=info.limits.max_model_len),
        grammars=GrammarChecks(
            GrammarGuard(tokenizer, info.vocab_size), telemetry.grammars, is_needed=info.generates
        ),
        shared=telemetry.shared,
        generator=Generator(engine, tokenizer, telemetry.tracker),
        watch=EngineHealth(engine, config.hang),
        slow_readers=SlowReaders(config.max_unread_bytes),
        logprobs=(LogprobWriter(tokenizer), LogprobWriter(tokenizer, as_ids=True)),
        created=int(time.time()),
    )
    telemetry.exporter.watch(engine, fleet)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        duties = (services.watch.run(), services.slow_readers.run(), tidy(lifecycle))
        watching = [asyncio.create_task(duty) for duty in duties]
        async with telemetry.watched_loop():
            with garbage_kept():
                yield
        for task in watching:
            task.cancel()
        services.encoder.close()
        services.grammars.close()

    app = FastAPIOffline(
        title="onbeat",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
        static_url=middleware.DOCS_FILES,
        servers=[{"url": config.prefix}] if config.prefix else None,
    )
    app.state.lifecycle = lifecycle
    app.state.fleet = fleet
    app.state.telemetry = telemetry
    app.state.max_body_bytes = config.max_body_bytes
    app.state.warm_up = services.grammars.warm_up
    routes = [
        chat_routes(services),
        completion_routes(services),
        response_routes(services),
        message_routes(services),
        embedding_routes(services),
        score_routes(services),
        tokenizer_routes(services),
        model_routes(services),
        health_routes(services),
    ]
    if fleet is not None:
        routes.append(fleet_routes(fleet, config))
        if info.max_loras:
            routes.append(adapter_routes(fleet, config, services.model_names))
    for router in (*routes, home_routes(), telemetry.routes()):
        app.include_router(router)
    for kind in (OnbeatError, HTTPException):
        app.add_exception_handler(kind, handle_error)
    describe(app, routes, vocab_size=info.vocab_size, needs_key=bool(config.api_keys))
    _add_middleware(app, config, telemetry)
    return app


def _add_middleware(app: FastAPI, config: ServerConfig, telemetry: Telemetry) -> None:
    """Wrap the application, from the inside out."""
    if keys := config.slo.key_limits:
        app.add_middleware(middleware.RateLimits, keys=keys.keys(), shared=telemetry.shared)
    checks: list[Callable[[Scope], None]] = [middleware.check_path]
    if (names := config.answered_hosts) is not None:
        checks.insert(0, partial(middleware.check_host, names=names))
    if config.guarding_keys:
        checks.append(partial(middleware.check_key, keys=config.guarding_keys))
    app.add_middleware(middleware.Checks, checks=checks)
    app.add_middleware(
        middleware.RequestLog,
        endpoints=ENDPOINTS,
        on_done=telemetry.on_http,
        log_requests=config.log_requests,
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    if config.prefix:
        app.add_middleware(middleware.RootPath, prefix=config.prefix)
