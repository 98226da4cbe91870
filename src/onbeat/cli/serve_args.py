"""Flags of the HTTP server, and the configuration that they make."""

from __future__ import annotations

import argparse
import json
import os
from itertools import chain
from pathlib import Path

from onbeat.cli.options import add_options, find_group, read_options
from onbeat.core.errors import ConfigError
from onbeat.core.slo import OBJECTIVES, SLO
from onbeat.files import read_text
from onbeat.server.server_config import ServerConfig
from onbeat.server.slo_defaults import ClassesFile, SLODefaults, read_classes_file

API_KEY_VARIABLE = "ONBEAT_API_KEY"
FLEET_KEY_VARIABLE = "ONBEAT_FLEET_KEY"


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the objectives of requests, and how the server listens, whom it lets in, what it tells."""
    add_options(parser, SLO)
    add_options(parser, SLODefaults, only=("slo_class", "shed"))
    find_group(parser, OBJECTIVES).add_argument(
        "--slo-classes", type=Path, metavar="FILE.yaml", help="more classes, and the classes of API keys"
    )
    add_options(parser, ServerConfig)
    group = find_group(parser, "server")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"key that opens the API, repeatable (also: a line in --api-key-file, or ${API_KEY_VARIABLE})",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with one key a line")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="of the log"
    )
    group.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write a Perfetto trace of steps and requests"
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Build the server's configuration from parsed flags, key file, classes file and environment.

    Raises
    ------
    ConfigError : an objective is out of range, a class does not exist, or a file is wrong.
    """
    file = ClassesFile() if args.slo_classes is None else read_classes_file(args.slo_classes, os.environ)
    return read_options(
        args,
        ServerConfig,
        allowed_origins=tuple(chain.from_iterable(map(_origins, args.allowed_origins))),
        fleet_key=_fleet_key_in_environment() if args.fleet_key is None else args.fleet_key,
        api_keys=(*args.api_key, *_keys_in_file(args.api_key_file), *_keys_in_environment()),
        slo=read_options(
            args, SLODefaults, classes=file.classes, keys=file.keys, slo=read_options(args, SLO)
        ),
    )


def _origins(text: str) -> list[str]:
    """Return the origins of one flag: one as it is, or vLLM's JSON list of them."""
    if not text.startswith("["):
        return [text]
    try:
        origins = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"allowed_origins is {text!r}, which is no JSON list: {error}") from error
    if not all(isinstance(each, str) for each in origins):
        raise ConfigError(f"allowed_origins is {text!r}; a JSON list must hold texts alone")
    return list(origins)


def _keys_in_file(path: Path | None) -> list[str]:
    if path is None:
        return []
    lines = read_text(path, "the API keys in").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no API key; put one on a line")
    return keys


def _fleet_key_in_environment() -> str | None:
    return os.environ.get(FLEET_KEY_VARIABLE) or None


def _keys_in_environment() -> list[str]:
    return [key] if (key := os.environ.get(API_KEY_VARIABLE)) else []
