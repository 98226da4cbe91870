"""Flags of the HTTP server, and the configuration that they make."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from onbeat.cli.args import add_shed_order_argument, checked, count
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLO_CLASSES, SLO_MODES, ShedMode
from onbeat.server.config import ConnectionLimits, ServerConfig
from onbeat.server.slo_classes_file import ClassesFile, read_classes_file
from onbeat.server.slo_defaults import SLODefaults

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
    group.add_argument(
        "--max-connections",
        type=count,
        default=ConnectionLimits().max_connections,
        metavar="N",
        help="most open connections; one more gets a 503 and is closed",
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


def _milliseconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


milliseconds = checked(_milliseconds, "milliseconds, such as 500")


def add_objective_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what requests are promised that do not say it themselves."""
    group = parser.add_argument_group("objectives")
    group.add_argument(
        "--slo-ttft-ms",
        type=milliseconds,
        metavar="MS",
        help="to the first token, for requests without a class",
    )
    group.add_argument("--slo-tbt-ms", type=milliseconds, metavar="MS", help="between tokens, likewise")
    group.add_argument("--slo-e2e-ms", type=milliseconds, metavar="MS", help="to the last token, likewise")
    group.add_argument(
        "--slo-class",
        metavar="NAME",
        help=f"class of requests that name none: {', '.join(SLO_CLASSES)}, or one of --slo-classes",
    )
    group.add_argument(
        "--slo-classes", type=Path, metavar="FILE.yaml", help="more classes, and the classes of API keys"
    )
    group.add_argument(
        "--slo-mode",
        choices=SLO_MODES,
        default="stream",
        help="TBT is kept if 99%% of the tokens meet their deadlines (stream), or if the P99 gap is "
        "within it (gap)",
    )
    group.add_argument(
        "--shed",
        choices=tuple(mode.value for mode in ShedMode),
        default=ShedMode.RELEGATE.value,
        help="a request that slo predicts to miss its TTFT objective takes its turn all the same (off), is "
        "served from what others leave (relegate, the default), or is refused with 429 (reject)",
    )
    add_shed_order_argument(group)


def slo_defaults(args: argparse.Namespace) -> SLODefaults:
    """Build from parsed flags, classes file and environment what requests are promised.

    Raises
    ------
    ConfigError : an objective is out of range, a class does not exist, or the file is wrong.
    """
    file = ClassesFile() if args.slo_classes is None else read_classes_file(args.slo_classes, os.environ)
    return SLODefaults(
        classes=file.classes,
        slo=SLO(
            ttft=_seconds(args.slo_ttft_ms), tbt=_seconds(args.slo_tbt_ms), e2e=_seconds(args.slo_e2e_ms)
        ),
        slo_class=args.slo_class,
        shed=ShedMode(args.shed),
        mode=args.slo_mode,
        keys=file.keys,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Build the server's configuration from parsed flags, key file and environment."""
    return ServerConfig(
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name),
        api_keys=(*args.api_key, *_keys_in_file(args.api_key_file), *_keys_in_environment()),
        allowed_origins=tuple(args.allowed_origins),
        connections=ConnectionLimits(max_connections=args.max_connections),
        max_body_bytes=args.max_body_bytes,
        max_n=args.max_n,
        max_top_logprobs=args.max_logprobs,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        shutdown_timeout=args.shutdown_timeout,
        log_requests=args.log_requests,
        metrics_aliases=args.metrics_aliases,
        slo=slo_defaults(args),
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
