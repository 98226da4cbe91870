"""What requests are promised that say little or nothing: classes, the terms of API keys, the server's own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from onbeat.core.errors import ConfigError
from onbeat.core.options import check, option
from onbeat.core.slo import OBJECTIVES, SLO, SLO_CLASSES, ShedMode, SLOMode, shed_option, slo_mode_option

LARGEST_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTerms:
    """What a class of requests is promised. None leaves a matter to the server.

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
class KeyTerms:
    """What the requests of one API key are given unless they say otherwise.

    Raises
    ------
    ConfigError : a weight outside (0, 1000].
    """

    slo_class: str | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        check_weight(self.weight)


def built_in_classes() -> dict[str, ClassTerms]:
    """Return the classes that every server knows."""
    return {name: ClassTerms(slo=slo) for name, slo in SLO_CLASSES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SLODefaults:
    """Where the objectives of requests come from, and how requests are held to them.

    Raises
    ------
    ConfigError : a class that does not exist is named, or an unknown mode.
    """

    classes: Mapping[str, ClassTerms] = field(default_factory=built_in_classes)
    slo: SLO = field(default_factory=SLO)
    """Objectives of requests whose class nobody named; each yields to what the request says itself."""
    slo_class: str | None = option(
        None,
        group=OBJECTIVES,
        metavar="NAME",
        help="class of requests that name none, and whose API key has none: "
        f"{', '.join(SLO_CLASSES)}, or one of --slo-classes",
    )
    shed: ShedMode = shed_option()
    mode: SLOMode = slo_mode_option()
    keys: Mapping[str, KeyTerms] = field(default_factory=dict)
    """SHA-256 of an API key, hexadecimal -> terms of its requests."""

    def __post_init__(self) -> None:
        check(self, SLODefaults)
        named = {self.slo_class, *(terms.slo_class for terms in self.keys.values())} - {None}
        if unknown := sorted(str(name) for name in named - self.classes.keys()):
            raise ConfigError(
                f"there is no class {unknown[0]!r} of objectives; known are {', '.join(sorted(self.classes))}"
            )

    def promises(self) -> dict[str, SLO]:
        """Return what its owner has this server promise, by class; its own defaults as `default`.

        A class built in counts where a flag or a key names it, or a file changes it.
        """
        own = {} if self.slo.is_empty else {"default": self.slo}
        built_in = built_in_classes()
        named = {self.slo_class, *(terms.slo_class for terms in self.keys.values())}
        return own | {
            name: terms.slo
            for name, terms in self.classes.items()
            if name in named or terms != built_in.get(name)
        }


def check_weight(weight: float | None) -> None:
    """Raise ConfigError unless a weight is in (0, 1000]."""
    if weight is not None and not 0 < weight <= LARGEST_WEIGHT:
        raise ConfigError(f"the weight is {weight:g}; it must be above 0 and at most {LARGEST_WEIGHT:g}")


def key_digest(key: str) -> str:
    """Return the SHA-256 of an API key, hexadecimal: the form in which keys are kept and compared."""
    return hashlib.sha256(key.encode()).hexdigest()
