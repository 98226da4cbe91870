"""The profile of a machine: measured steps of one model, what was fitted to them, and how good that is.

A file of one is a JSON object, named after what it holds for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.step import BatchShape
from onbeat.files import cache_dir, read
from onbeat.perfmodel.device_spec import DeviceSpec, Parallelism, ProductRates
from onbeat.perfmodel.fitted import FittedModel
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.shapes import FIELDS, MeasuredStep
from onbeat.typed import Count, NotNegative, Positive, Table, convert
from onbeat.version import __version__

REMEDY = "Run `onbeat profile MODEL` on this machine again"

EngineValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a profile holds for."""

    model: str
    device: str
    """A device id."""
    device_name: str
    """The device as it names itself: `cpu` alone says nothing."""
    precision: Precision
    parallelism: Parallelism
    threads: Count = 1
    """Threads that a CPU engine computes with; 1 on other devices."""
    backend: str = "torch"
    """What computes a step: the same machine takes another time with another one."""
    instruction_set: str | None = None
    """The one that a native CPU engine computes with; None for other engines."""
    engine_version: str | None = None
    """Of another engine, whose steps were recorded; None of this one's, and where nobody said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Measured limits of the machine, all threads together.

    Raises
    ------
    ConfigError : product rates whose rows do not ascend.
    """

    memory_bandwidth: Positive
    """Bytes per second."""
    peak_flops: Mapping[str, Positive]
    """Number format -> operations per second."""
    product_rates: ProductRates = ()
    """Of matrix products by their rows, in the engine's number format; empty where all reach one rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTerms:
    """What a server does beside its steps."""

    steps_ahead: Annotated[int, Meta(ge=0, le=1)] = 0
    """Steps that are planned before the results of the step under way are there."""
    request_seconds: NotNegative = 0.0
    """That each request's first token comes later than its steps say: reading the request, tokenizing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that `onbeat profile` found out."""

    key: ProfileKey
    onbeat_version: str = __version__
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """Time of day, ISO 8601 with a zone."""
    steps: Sequence[MeasuredStep]
    fitted: FittedModel
    server: ServerTerms = field(default_factory=ServerTerms)
    limits: MachineLimits | None = None
    """Limits that the fit took for the device's; None where it took the data sheet's."""
    engine: Mapping[str, EngineValue] = field(default_factory=dict)
    """Settings of the engine that ran the steps, for the reader of the file."""


def check_profile(profile: Profile, path: Path, **expected: object) -> None:
    """Refuse a profile of something else.

    Parameters
    ----------
    path : the profile's file, for the message.
    expected : fields of `ProfileKey` and the values that they must have. Of a model's name, what precedes
        the last slash and the case do not count.

    Raises
    ------
    ConfigError : names the file, the field and both values.
    """
    for name, wanted in expected.items():
        found = getattr(profile.key, name)
        if found != wanted and not (name == "model" and _short(found) == _short(str(wanted))):
            raise ConfigError(
                f"the profile {path} is of {name.replace('_', ' ')} {str(found)!r}, not {str(wanted)!r}. "
                f"{REMEDY}, or name a profile that matches"
            )


def limited_device(device: DeviceSpec, limits: MachineLimits | None) -> DeviceSpec:
    """Return a device with measured limits in place of its own."""
    if limits is None:
        return device
    return replace(
        device,
        memory_bandwidth=limits.memory_bandwidth,
        peak_flops={**device.peak_flops, **limits.peak_flops},
        product_rates=limits.product_rates,
    )


def _short(model: str) -> str:
    return model.rpartition("/")[2].lower()


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
