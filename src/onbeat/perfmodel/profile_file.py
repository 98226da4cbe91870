"""Profiles as files: one JSON object each, named after what it holds for."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.step import BatchShape
from onbeat.files import read
from onbeat.perfmodel.fitted import FittedModel
from onbeat.perfmodel.profile import (
    REMEDY,
    EngineValue,
    MachineLimits,
    Profile,
    ProfileKey,
    ServerTerms,
    check_profile,
)
from onbeat.perfmodel.shapes import FIELDS, MeasuredStep
from onbeat.typed import NotNegative, Table, convert

SCHEMA_VERSION = 3
"""Changes whenever a reader of the old layout would misread the new one."""
_READABLE = (2, SCHEMA_VERSION)
"""Version 2 has one rate for all matrix products, and the instruction set among the engine's settings. Files
of other versions are refused, not converted: measuring again takes two minutes."""
_LATER_COLUMNS = (
    *("num_draft_tokens", "num_draft_passes", "num_catch_up_tokens", "catch_up_pairs"),
    "num_guided_rows",
)
"""Sums that files of before there were drafts, draft models that read, or grammars lack: they are 0 there."""
_HINT = f". {REMEDY}"


class _File(Table, kw_only=True):
    schema_version: int
    onbeat_version: str
    created: str
    key: ProfileKey
    engine: dict[str, EngineValue]
    server: ServerTerms = ServerTerms()
    limits: MachineLimits | None
    fit: FittedModel
    columns: tuple[str, ...]
    steps: Annotated[tuple[tuple[NotNegative, ...], ...], Meta(min_length=1)]
    """A row for each measured step: values of its columns."""

    def __post_init__(self) -> None:
        names = [name for name in FIELDS if name not in _LATER_COLUMNS or name in self.columns]
        if self.columns != (*names, "seconds"):
            raise ConfigError(f"columns is {quoted(self.columns)}; it must be {', '.join(FIELDS)}, seconds")
        for index, row in enumerate(self.steps):
            if len(row) != len(self.columns) or not row[-1]:
                raise ConfigError(
                    f"steps[{index}] is {quoted(row)}; it must be {len(self.columns)} numbers, the last "
                    "of them a time above 0"
                )

    def measured(self) -> tuple[MeasuredStep, ...]:
        """Return the steps."""
        names = self.columns[:-1]
        return tuple(
            MeasuredStep(BatchShape(**dict(zip(names, map(int, row), strict=False))), row[-1])
            for row in self.steps
        )


def cache_dir() -> Path:
    """Return where everything is that can be had again: `$XDG_CACHE_HOME/onbeat`, or under `~/.cache`."""
    # The XDG specification: a relative path is invalid and must be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "onbeat"


def profiles_dir() -> Path:
    """Return the directory of profiles, in the cache."""
    return cache_dir() / "profiles"


def profile_path(directory: Path, key: ProfileKey) -> Path:
    """Return the file of a profile in a directory: legible, and apart for machines that share a home.

    One engine on one machine has one file, whatever its instruction set: where this has changed since, the
    file is found and refused, not passed over.
    """
    text = json.dumps(_values(replace(key, instruction_set=None)), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = re.sub(r"[^a-z0-9.]+", "-", key.model.lower()).strip("-.")
    return directory / f"{name}_{key.device}_{key.precision.weights}_t{key.threads}_{digest}.json"


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile; whoever reads meanwhile sees the old file or the new one, never half of it."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "onbeat_version": profile.onbeat_version,
        "created": profile.created,
        "key": _values(profile.key),
        "engine": dict(profile.engine),
        "server": asdict(profile.server),
        "limits": None if profile.limits is None else asdict(profile.limits),
        "fit": asdict(profile.fitted),
        "columns": [*FIELDS, "seconds"],
        "steps": [[getattr(step.shape, name) for name in FIELDS] + [step.seconds] for step in profile.steps],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _values(key: ProfileKey) -> dict[str, Any]:
    """Return a key as plain values; what is not given of its formats leaves no trace."""
    values = asdict(key)
    for name in ("instruction_set", "engine_version"):
        if values[name] is None:
            del values[name]
    values["precision"] = {name: value for name, value in values["precision"].items() if value is not None}
    return values


def read_profile(path: Path, expected: ProfileKey | None = None) -> Profile:
    """Read a profile.

    Parameters
    ----------
    path : the file.
    expected : what it must hold for; None takes any.

    Raises
    ------
    ConfigError : the file cannot be read, is of another schema version, has a missing or wrong value, or
        holds for something other than expected.
    """
    content = read(dict[str, Any], path, "the profile", hint=_HINT)
    if (version := content.get("schema_version")) not in _READABLE:
        raise ConfigError(
            f"the profile {path} has schema version {quoted(version)}, but this onbeat reads versions "
            f"{' and '.join(map(str, _READABLE))}{_HINT}"
        )
    engine, key = content.get("engine"), content.get("key")
    if version == 2 and isinstance(engine, dict) and isinstance(key, dict):
        content["key"] = {**key, "instruction_set": engine.get("instruction_set")}
    file = convert(_File, content, f"profile {path}", hint=_HINT)
    profile = Profile(
        key=file.key,
        onbeat_version=file.onbeat_version,
        created=file.created,
        steps=file.measured(),
        fitted=file.fit,
        server=file.server,
        limits=file.limits,
        engine=file.engine,
    )
    if expected is not None:
        check_profile(profile, path, **{name.name: getattr(expected, name.name) for name in fields(expected)})
    return profile


def find_profile(directory: Path, key: ProfileKey) -> Profile | None:
    """Return the profile that holds for a key; None where the directory has none.

    Raises
    ------
    ConfigError : there is one, but it cannot be used. See `read_profile`.
    """
    path = profile_path(directory, key)
    return read_profile(path, key) if path.is_file() else None
