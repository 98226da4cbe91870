"""Which objectives the requests of a load carry: one for all, or classes by share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO

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
