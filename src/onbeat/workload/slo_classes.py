"""Which objectives the requests of a load carry: one for all, or classes by share, from a YAML file.

The file lists classes; a class with the name of a built-in one and no objectives of its own takes those. The
weight (1 unless given) says how much a request of the class is worth beside one of another; the tenant, which
several classes may have, for whom its requests are; the trace, told from the folder of the file, how long
they are::

    classes:
      - {name: interactive, share: 0.7, weight: 2}
      - {name: report, share: 0.3, ttft_ms: 5000, e2e_ms: 60000, tenant: finance, trace: reports.csv.gz}
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta

from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.core.slo import SLO, SLO_CLASSES
from onbeat.files import read
from onbeat.typed import Number, Table, Text

SHARE_TOLERANCE = 1e-6

_NAME_OF_TENANT = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")
"""What a server takes in its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOClass:
    """A group of requests with the same objectives.

    Raises
    ------
    ConfigError : no name, a share outside (0, 1], a weight that is not above 0, or a tenant that no header
        can name.
    """

    name: str
    slo: SLO
    share: float = 1.0
    """Of all requests, in (0, 1]."""
    weight: float = 1.0
    """Worth of keeping the promise of one of its requests beside one of another class, above 0."""
    tenant: str | None = None
    """For whom its requests are; None is nobody in particular."""
    trace: Path | None = None
    """A recorded workload that its requests have the lengths of; None: they have those of the load."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a class of objectives needs a name")
        if not 0 < self.share <= 1:
            raise ConfigError(f"the share of class {self.name!r} is {self.share:g}; it must lie in (0, 1]")
        if not (isfinite(self.weight) and self.weight > 0):
            raise ConfigError(
                f"the weight of class {self.name!r} is {self.weight:g}; it must be a finite number above 0"
            )
        if self.tenant is not None and not _NAME_OF_TENANT.fullmatch(self.tenant):
            raise ConfigError(
                f"the tenant of class {self.name!r} is {self.tenant!r}; it must have 1 to 128 printable "
                "ASCII characters, and no space at either end"
            )


def check_classes(classes: Sequence[SLOClass]) -> None:
    """Refuse classes of one name, or shares that do not make up the whole.

    Raises
    ------
    ConfigError : which names or shares are wrong.
    """
    names = Counter(each.name for each in classes)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise ConfigError(f"class {twice[0]!r} is given more than once; give each class one name")
    total = sum(each.share for each in classes)
    if classes and abs(total - 1) > SHARE_TOLERANCE:
        shares = ", ".join(f"{each.name} {each.share:g}" for each in classes)
        raise ConfigError(f"the shares of the classes must add up to 1, got {total:g} ({shares})")


T = TypeVar("T")


class Objectives(Table):
    """Objectives as files state them; a load, a server and vLLM's plug-in share this."""

    ttft_ms: Number | None = None
    tbt_ms: Number | None = None
    e2e_ms: Number | None = None

    def slo(self) -> SLO:
        """Return the objectives that are given.

        Raises
        ------
        ConfigError : one is out of range.
        """
        given = {"ttft": self.ttft_ms, "tbt": self.tbt_ms, "e2e": self.e2e_ms}
        return SLO(**{name: value / 1e3 for name, value in given.items() if value is not None})


class ClassEntry(Objectives, kw_only=True):
    """A class of objectives as files state it."""

    name: Text

    def class_slo(self) -> SLO:
        """Return the objectives of the class: its own or, where it gives none, those built in for its name.

        Raises
        ------
        ConfigError : an objective is out of range, or there are none.
        """
        own = self.slo()
        return built_in_slo(self.name) if own.is_empty else own


class _Class(ClassEntry, kw_only=True):
    share: Number | None = None
    weight: Number = 1.0
    tenant: str | None = None
    trace: str | None = None


class _File(Table):
    classes: Annotated[tuple[_Class, ...], Meta(min_length=1)]


def read_classes(kind: type[T], path: Path) -> T:
    """Return the content of a file with classes.

    Raises
    ------
    ConfigError : as `files.read`; where a built-in class was probably meant, the message says so.
    """
    near = likely_meant(str(path), SLO_CLASSES)
    return read(kind, path, hint=f"; did you mean the built-in class {near}?" if near else "")


def built_in_slo(name: str) -> SLO:
    """Return the objectives of a built-in class.

    Raises
    ------
    ConfigError : there is none of that name.
    """
    if name not in SLO_CLASSES:
        raise ConfigError(
            f"class {name!r} has no objectives, and none are built in for it (only for "
            f"{', '.join(SLO_CLASSES)}): give ttft_ms, tbt_ms, e2e_ms"
        )
    return SLO_CLASSES[name]


def read_slo_config(path: Path) -> tuple[SLOClass, ...]:
    """Return the classes of a file.

    Raises
    ------
    ConfigError : the file cannot be read, or a class is wrong; the message names it.
    """
    entries = read_classes(_File, path).classes
    try:
        classes = tuple(_slo_class(entry, path.parent, is_only=len(entries) == 1) for entry in entries)
        check_classes(classes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return classes


def _slo_class(entry: _Class, folder: Path, *, is_only: bool) -> SLOClass:
    if entry.share is None and not is_only:
        raise ConfigError(
            f"class {entry.name!r} has no share; give each of several classes one, adding up to 1"
        )
    return SLOClass(
        name=entry.name,
        slo=entry.class_slo(),
        share=1.0 if entry.share is None else entry.share,
        weight=entry.weight,
        tenant=entry.tenant,
        trace=None if entry.trace is None else folder / entry.trace,
    )
