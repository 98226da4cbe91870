"""Where a model's configuration comes from: the package, a file, a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.files import read

CONFIG_NAME = "config.json"


@cache
def packaged_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the configurations in the package, by file name without its ending."""
    found: dict[str, Mapping[str, Any]] = {}
    for entry in sorted(files("onbeat.perfmodel").joinpath("data", "models").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".json"):
            found[entry.name.removesuffix(".json")] = json.loads(entry.read_text("utf-8"))
    return found


@cache
def _names() -> Mapping[str, str]:
    """Every name a packaged configuration goes by (lower case) -> its file name."""
    names: dict[str, str] = {}
    for stem, config in packaged_configs().items():
        for hub_id in config["hub_ids"]:
            names[hub_id.lower()] = stem
            names.setdefault(hub_id.rpartition("/")[2].lower(), stem)
        names[stem.lower()] = stem
    return names


def read_model_config(name_or_path: str) -> tuple[str, Mapping[str, Any]]:
    """Return a model's name and its configuration as Hugging Face writes it.

    Parameters
    ----------
    name_or_path : the name of a packaged configuration, a hub id (letters of either case), a `config.json`,
        or a directory that holds one.

    Raises
    ------
    ConfigError : an unknown name (near matches are named), or a file that is not a JSON object.
    """
    path = config_path(name_or_path)
    if path is not None:
        name = path.parent.resolve().name if path.name == CONFIG_NAME else path.stem
        return name, read(dict[str, Any], path, "the model's configuration")
    stem = _names().get(name_or_path.lower())
    if stem is None:
        if name_or_path.endswith(".json") or name_or_path.startswith((".", "/", "~")):
            raise ConfigError(f"there is no file or directory {name_or_path}; give a model's {CONFIG_NAME}")
        raise ConfigError(_unknown(name_or_path))
    return stem, packaged_configs()[stem]


def config_path(name_or_path: str) -> Path | None:
    """Return the file of a model's configuration; None where it comes with the package, or is not known.

    Raises
    ------
    ConfigError : a directory without one.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        path = path / CONFIG_NAME
        if not path.is_file():
            raise ConfigError(
                f"{name_or_path} holds no {CONFIG_NAME}; give a model's directory or its {CONFIG_NAME}"
            )
    return path if path.is_file() else None


def _unknown(name: str) -> str:
    near = likely_meant(name.lower().rpartition("/")[2], _names())
    hint = f"did you mean {near}? " if near else ""
    return (
        f"unknown model {name!r}: {hint}"
        f"Known: {', '.join(packaged_configs())}; or give the path of a config.json or of its directory"
    )
