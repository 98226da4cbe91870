"""`onbeat serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import argparse
import socket
import time
from contextlib import ExitStack
from functools import partial

from rich.console import Console

from onbeat.cli.args import add_config_flag
from onbeat.cli.engine_args import (
    add_engine_arguments,
    add_model_arguments,
    add_scheduler_arguments,
    engine_config,
    model_name,
)
from onbeat.cli.serve_args import add_server_arguments, server_config
from onbeat.core.errors import MissingExtra
from onbeat.engine.config import EngineConfig
from onbeat.hub.files import ModelFiles
from onbeat.server.config import ServerConfig

NAME = "serve"
HELP = "serve a model behind an OpenAI-compatible API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    add_config_flag(parser)
    add_model_arguments(parser)
    add_engine_arguments(parser)
    add_scheduler_arguments(parser)
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; return the exit code."""
    try:
        import uvloop

        from onbeat.server.run import bind, check_tls
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"onbeat serve needs {error.name!r}, which is not installed: pip install 'onbeat[serve]'"
        ) from error
    started = time.monotonic()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    config = server_config(args)
    check_tls(config)
    with ExitStack() as stack:
        sock = stack.enter_context(bind(config))  # a busy port is known before a model is loaded
        files = _find_model(args, console)
        engine = engine_config(args, files)
        _set_up_logging(args.log_level)
        uvloop.run(_serve(args, config, engine, sock, _Announcer(console, started)))
    return 0


def _find_model(args: argparse.Namespace, console: Console) -> ModelFiles:
    from onbeat.cli.models import show_progress
    from onbeat.hub.resolve import resolve_model

    with show_progress() as progress:
        files = resolve_model(
            model_name(args),
            revision=args.revision,
            needs_weights=args.load_format != "dummy",
            progress=progress,
        )
    console.print(f"model {files.name}: {files.path}")
    return files


async def _serve(
    args: argparse.Namespace,
    config: ServerConfig,
    engine: EngineConfig,
    sock: socket.socket,
    announcer: _Announcer,
) -> None:
    from onbeat.engine.build import build_engine
    from onbeat.engine.client import ProcessEngineClient
    from onbeat.metrics.timeline import open_timeline
    from onbeat.server.app import create_app
    from onbeat.server.run import serve
    from onbeat.server.telemetry import Telemetry
    from onbeat.text.chat_template import load_chat_template
    from onbeat.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer or engine.model.path)
    chat_template = load_chat_template(tokenizer, args.chat_template)
    async with ProcessEngineClient(partial(build_engine, engine), on_progress=announcer.say) as client:
        with ExitStack() as stack:
            listeners = [stack.enter_context(open_timeline(args.timeline))] if args.timeline else []
            telemetry = Telemetry(config, client.info.model_name, listeners)
            client.add_observer(telemetry.tracker)
            app = create_app(client, tokenizer, chat_template, config, telemetry)
            served_name = (*config.served_model_names, client.info.model_name)[0]
            on_started = partial(announcer.ready, model=served_name, is_chat=chat_template is not None)
            await serve(app, config, sock, on_started=on_started)


class _Announcer:
    """Tells the person at the terminal how far the start is, and what to try once it is done."""

    def __init__(self, console: Console, started: float) -> None:
        self._console = console
        self._started = started

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def ready(self, url: str, *, model: str, is_chat: bool) -> None:
        path, field = "completions", '"prompt": "The sky is blue because"'
        if is_chat:
            path, field = (
                "chat/completions",
                '"messages": [{"role": "user", "content": "Why is the sky blue?"}]',
            )
        self.say(f"ready in {time.monotonic() - self._started:.1f} s: {url} (API docs: {url}/docs). Try:")
        self.say(
            f"  curl {url}/v1/{path} -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "{model}", {field}, "max_tokens": 64}}\''
        )


def _set_up_logging(level: str) -> None:
    import logging

    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
