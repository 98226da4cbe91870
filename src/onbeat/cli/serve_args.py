"""Flags of the HTTP server, and the configuration that they make."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from onbeat.cli.args import count
from onbeat.core.errors import ConfigError
from onbeat.server.config import ServerConfig

API_KEY_VARIABLE = "ONBEAT_API_KEY"


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """How the server listens, whom it lets in, what it tells."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=8000, help="0 takes any free port")
    group.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="names in /v1/models and requests"
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help=f"keys that open the API (also: one a line in --api-key-file, or ${API_KEY_VARIABLE})",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with one key a line")
    group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="TLS key, PEM")
    group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="TLS certificate, PEM")
    group.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="web origins allowed by CORS"
    )
    group.add_argument(
        "--max-body-bytes", type=count, default=10 * 2**20, metavar="BYTES", help="largest request"
    )
    group.add_argument("--max-n", type=int, default=16, metavar="N", help="largest `n` of a request")
    group.add_argument("--max-logprobs", type=int, default=20, metavar="N", help="largest `top_logprobs`")
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help="time to drain after SIGTERM"
    )
    group.add_argument(
        "--log-requests", action=argparse.BooleanOptionalAction, default=True, help="one line a request"
    )
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="of the log"
    )
    group.add_argument("--metrics-aliases", choices=("vllm",), help="export metrics under these names too")
    group.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write a Perfetto trace of steps and requests"
    )
    group.add_argument(
        "--record", type=Path, metavar="FILE", help="write what the scheduler did, for `onbeat replay FILE`"
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Build the server's configuration from parsed flags, key file and environment."""
    return ServerConfig(
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name),
        api_keys=(*args.api_key, *_keys_in_file(args.api_key_file), *_keys_in_environment()),
        allowed_origins=tuple(args.allowed_origins),
        max_body_bytes=args.max_body_bytes,
        max_n=args.max_n,
        max_top_logprobs=args.max_logprobs,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        shutdown_timeout=args.shutdown_timeout,
        log_requests=args.log_requests,
        metrics_aliases=args.metrics_aliases,
    )


def _keys_in_file(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no API key; put one on a line")
    return keys


def _keys_in_environment() -> list[str]:
    return [key] if (key := os.environ.get(API_KEY_VARIABLE)) else []
