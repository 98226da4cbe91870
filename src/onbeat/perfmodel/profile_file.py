"""Profiles as files: one JSON object each, named after what it holds for."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from onbeat.files import read_json
from onbeat.perfmodel.profile import REMEDY, Profile, ProfileKey, check_profile
from onbeat.perfmodel.profile_parser import SCHEMA_VERSION, parse_profile
from onbeat.perfmodel.shapes import FIELDS


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
    profile = parse_profile(read_json(path, "the profile", hint=f". {REMEDY}"), path)
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
