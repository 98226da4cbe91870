"""Classes of objectives from a YAML file.

The file lists classes; a class with the name of a built-in one and no objectives of its own takes those::

    classes:
      - {name: interactive, share: 0.7}
      - {name: report, share: 0.3, ttft_ms: 5000, e2e_ms: 60000}
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLO_CLASSES
from onbeat.workload.slo_classes import SLOClass, check_classes

_OBJECTIVES = {"ttft_ms": "ttft", "tbt_ms": "tbt", "e2e_ms": "e2e"}
_KEYS = ("name", "share", *_OBJECTIVES)


def read_slo_config(path: Path) -> tuple[SLOClass, ...]:
    """Return the classes of a file.

    Raises
    ------
    ConfigError : the file cannot be read, or a class is wrong; the message names it.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        near = get_close_matches(str(path), SLO_CLASSES, n=1)
        hint = f"; did you mean the built-in class {near[0]}?" if near else ""
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}{hint}") from error
    entries = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or content.keys() != {"classes"}:
        raise ConfigError(f"{path} must be 'classes:' and a list of {{{', '.join(_KEYS)}}}")
    try:
        classes = tuple(_read_class(entry, is_only=len(entries) == 1) for entry in entries)
        check_classes(classes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return classes


def _read_class(entry: Any, *, is_only: bool) -> SLOClass:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"a class is a mapping with a name, got {entry!r}")
    name = entry["name"]
    if unknown := sorted(map(str, entry.keys() - set(_KEYS))):
        raise ConfigError(f"class {name!r} has an unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    if "share" not in entry and not is_only:
        raise ConfigError(f"class {name!r} has no share; give each of several classes one, adding up to 1")
    return SLOClass(name=name, slo=_objectives(name, entry), share=_number(name, "share", entry, default=1.0))


def _objectives(name: str, entry: Mapping[str, Any]) -> SLO:
    given = {
        field: _number(name, key, entry) / 1e3
        for key, field in _OBJECTIVES.items()
        if entry.get(key) is not None
    }
    if given:
        return SLO(**given)
    return built_in_slo(name)


def built_in_slo(name: str) -> SLO:
    """Return the objectives of a built-in class.

    Raises
    ------
    ConfigError : there is none of that name.
    """
    if name not in SLO_CLASSES:
        raise ConfigError(
            f"class {name!r} has no objectives, and none are built in for it (only for "
            f"{', '.join(SLO_CLASSES)}): give {', '.join(_OBJECTIVES)}"
        )
    return SLO_CLASSES[name]


def _number(name: str, key: str, entry: Mapping[str, Any], *, default: float | None = None) -> float:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} of class {name!r} must be a number, got {value!r}")
    return float(value)
