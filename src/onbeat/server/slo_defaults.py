"""What requests are held to that say little or nothing: classes, defaults of API keys, the server's own.

All is the configuration of the server's owner: flags, and a YAML file (`read_classes_file`). What a request
says itself goes before it (`objectives`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from onbeat.core.errors import ConfigError
from onbeat.core.options import check, option
from onbeat.core.slo import OBJECTIVES, SLO, SLO_CLASSES, ShedMode, SLOMode
from onbeat.core.slo_options import shed_option, slo_mode_option
from onbeat.typed import Number, Size, Table
from onbeat.workload.slo_classes import ClassEntry, read_classes

LARGEST_WEIGHT = 1000.0

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_open_requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDefaults:
    """What the requests of a class get that do not state it. None leaves a matter to the server.

    Raises
    ------
    ConfigError : a weight outside (0, 1000].
    """

    slo: SLO
    weight: float | None = None
    shed: ShedMode | None = None

    def __post_init__(self) -> None:
        check_weight(self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """How much the requests of one API key may take. None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers."""
    max_open_requests: int | None = None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDefaults:
    """What the requests of one API key are given unless they say otherwise, and what they may say.

    Raises
    ------
    ConfigError : a weight outside (0, 1000].
    """

    slo_class: str | None = None
    weight: float | None = None
    """Its requests may state no more; None leaves that to their class."""
    names_tenants: bool = False
    """Whether its holder, such as a gateway, says whose each request is; else all are the key's."""
    limits: KeyLimits = NO_LIMITS
    """Of all its requests together."""

    def __post_init__(self) -> None:
        check_weight(self.weight)


def built_in_classes() -> dict[str, ClassDefaults]:
    """Return the classes that every server knows."""
    classes = {name: ClassDefaults(slo=slo) for name, slo in SLO_CLASSES.items()}
    return classes | {"offline": ClassDefaults(slo=SLO(), weight=0.5)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SLODefaults:
    """Where the objectives of requests come from, and how requests are held to them.

    Raises
    ------
    ConfigError : a class that does not exist is named, or an unknown mode.
    """

    classes: Mapping[str, ClassDefaults] = field(default_factory=built_in_classes)
    slo: SLO = field(default_factory=SLO)
    """Objectives of requests whose class nobody named; each yields to what the request says itself."""
    slo_class: str | None = option(
        None,
        group=OBJECTIVES,
        metavar="NAME",
        help="class of requests whose body and API key name none: "
        f"{', '.join(SLO_CLASSES)}, offline (no objectives), or one of --slo-classes",
    )
    shed: ShedMode = shed_option()
    mode: SLOMode = slo_mode_option()
    keys: Mapping[str, KeyDefaults] = field(default_factory=dict)
    """SHA-256 of an API key, hexadecimal -> what its requests get."""

    def __post_init__(self) -> None:
        check(self, SLODefaults)
        named = {self.slo_class, *(key.slo_class for key in self.keys.values())} - {None}
        if unknown := sorted(str(name) for name in named - self.classes.keys()):
            raise ConfigError(
                f"there is no class {unknown[0]!r} of objectives; known are {', '.join(sorted(self.classes))}"
            )

    @property
    def key_limits(self) -> dict[str, KeyLimits]:
        """The limits of the API keys that have any, by the hash of the key."""
        return {key: its.limits for key, its in self.keys.items() if its.limits != NO_LIMITS}

    def objectives_by_class(self) -> dict[str, SLO]:
        """Return the objectives that its owner has configured, by class; those of no class as `default`.

        A class built in counts where a flag or a key names it, or a file changes it.
        """
        own = {} if self.slo.is_empty else {"default": self.slo}
        built_in = built_in_classes()
        named = {self.slo_class, *(key.slo_class for key in self.keys.values())}
        return own | {
            name: its.slo for name, its in self.classes.items() if name in named or its != built_in.get(name)
        }


def check_weight(weight: float | None) -> None:
    """Raise ConfigError unless a weight is in (0, 1000]."""
    if weight is not None and not 0 < weight <= LARGEST_WEIGHT:
        raise ConfigError(f"the weight is {weight:g}; it must be above 0 and at most {LARGEST_WEIGHT:g}")


def key_digest(key: str) -> str:
    """Return the SHA-256 of an API key, hexadecimal: the form in which keys are kept and compared."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_classes_file(path: Path, environment: Mapping[str, str]) -> SLODefaults:
    """Return the classes and keys of a file, the built-in classes included.

    Either list may be left out. The built-in classes stay unless a class of the file has their name; one that
    gives no objectives keeps those built in. A key is named by its hash or by the environment variable that
    holds it, so that the file holds no secret::

        classes:
          - {name: chat, ttft_ms: 800, tbt_ms: 60, weight: 2, shed: true}
          - {name: batch, weight: 0.5}
        api_keys:
          - {key_env: TEAM_A_KEY, class: chat}
          - {key_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08, weight: 3}
          - {key_env: CORPUS_KEY, class: offline, tokens_per_minute: 600000, max_open_requests: 8}

    Parameters
    ----------
    path : the YAML file.
    environment : where `key_env` finds keys.

    Raises
    ------
    ConfigError : the file cannot be read, or an entry is wrong; the message names it.
    """
    file = read_classes(_File, path)
    if file.classes is None and file.api_keys is None:
        raise ConfigError(f"{path} has neither 'classes:' nor 'api_keys:'; give one of them, or both")
    try:
        return SLODefaults(
            classes=built_in_classes() | _classes(file.classes or ()),
            keys=_keys(file.api_keys or (), environment),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class _Class(ClassEntry, kw_only=True):
    weight: Number | None = None
    shed: bool | None = None
    """True refuses requests that would be late, False relegates them."""


_SECRET: Any = {"writeOnly": True}
"""No message repeats what may be a key by mistake."""


class _Key(Table, kw_only=True):
    key_sha256: (
        Annotated[
            str,
            Meta(
                pattern="^[0-9a-fA-F]{64}$",
                description="64 hexadecimal digits in quotes; make it with: printf %s KEY | sha256sum",
                extra_json_schema=_SECRET,
            ),
        ]
        | None
    ) = None
    key_env: Annotated[str, Meta(extra_json_schema=_SECRET)] | None = None
    slo_class: str | None = msgspec.field(name="class", default=None)
    weight: Number | None = None
    tenants: bool = False
    requests_per_minute: Size | None = None
    tokens_per_minute: Size | None = None
    max_open_requests: Size | None = None


class _File(Table):
    classes: Annotated[tuple[_Class, ...], Meta(min_length=1)] | None = None
    api_keys: (
        Annotated[tuple[Annotated[_Key, Meta(extra_json_schema=_SECRET)], ...], Meta(min_length=1)] | None
    ) = None


def shed_mode(*, is_refused: bool | None) -> ShedMode | None:
    """Return what becomes of a request that would be late; None where nothing is said of it."""
    return None if is_refused is None else ShedMode.REJECT if is_refused else ShedMode.RELEGATE


def _classes(entries: Sequence[_Class]) -> dict[str, ClassDefaults]:
    classes: dict[str, ClassDefaults] = {}
    for entry in entries:
        if entry.name in classes:
            raise ConfigError(f"class {entry.name!r} has a name that another has; give each its own")
        shed = shed_mode(is_refused=entry.shed)
        try:
            classes[entry.name] = ClassDefaults(slo=entry.class_slo(), weight=entry.weight, shed=shed)
        except ConfigError as error:
            raise ConfigError(f"class {entry.name!r}: {error}") from error
    return classes


def _keys(entries: Sequence[_Key], environment: Mapping[str, str]) -> dict[str, KeyDefaults]:
    keys: dict[str, KeyDefaults] = {}
    for number, entry in enumerate(entries):
        where = f"api_keys[{number}]"
        if (entry.key_sha256 is None) == (entry.key_env is None):
            raise ConfigError(f"{where} must have either key_sha256 or key_env")
        key = environment.get(entry.key_env or "")
        if entry.key_sha256 is None and not key:
            raise ConfigError(
                f"key_env of {where} names no environment variable that is set; set it to the key"
            )
        digest = (entry.key_sha256 or key_digest(key or "")).lower()
        if digest in keys:
            raise ConfigError(f"{where} is the same API key as an entry before; name each key once")
        limits = KeyLimits(**{name: getattr(entry, name) for name in _LIMITS})
        if entry.slo_class is None and entry.weight is None and not entry.tenants and limits == NO_LIMITS:
            raise ConfigError(
                f"{where} gives its key nothing; give a class, a weight, 'tenants: true', or one of "
                f"{', '.join(_LIMITS)}"
            )
        try:
            keys[digest] = KeyDefaults(
                slo_class=entry.slo_class, weight=entry.weight, names_tenants=entry.tenants, limits=limits
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return keys
