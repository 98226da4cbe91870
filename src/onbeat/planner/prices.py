"""What GPUs cost and draw: a table in the package, and a user's file that wins over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from onbeat.core.errors import ConfigError
from onbeat.files import read_yaml
from onbeat.perfmodel.device_spec import CPU, find_device

_FIELDS = ("usd_per_hour", "watts", "date", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Of one device.

    Raises
    ------
    ConfigError : a price or a power that is not a finite number above 0.
    """

    device: str
    usd_per_hour: float
    watts: float
    """What it draws at most, with nothing of its machine."""
    date: str = ""
    """When the price held, such as 2026-11."""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("usd_per_hour", "watts"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ConfigError(f"{name} of {self.device} is {value:g}; it must be a number above 0")

    @property
    def text(self) -> str:
        """With where it is from: `$0.7/h (our contract, 2026-11)`."""
        where = ", ".join(text for text in (self.source, self.date) if text)
        return f"${self.usd_per_hour:g}/h" + (f" ({where})" if where else "")


class Prices:
    """The prices that a plan goes by.

    Parameters
    ----------
    path : of a YAML file: device id -> dollars an hour, or a mapping of usd_per_hour, watts, date, source. It
        wins over the table in the package, device by device.

    Raises
    ------
    ConfigError : the file cannot be read, or names an unknown device or field.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._known = dict(_table()) if path is None else {**_table(), **_read(path)}

    def of(self, device: str) -> Price:
        """Return the price of a device.

        Raises
        ------
        ConfigError : nobody said it.
        """
        try:
            return self._known[device]
        except KeyError:
            raise ConfigError(
                f"no price of {device} is known; write '{device}: DOLLARS_AN_HOUR' into a file and give it "
                f"with --prices. Known are {', '.join(self._known)}"
            ) from None


@cache
def _table() -> Mapping[str, Price]:
    text = files("onbeat.planner").joinpath("data", "prices.yaml").read_text("utf-8")
    return {device: _price(device, entry, "the table") for device, entry in yaml.safe_load(text).items()}


def _read(path: Path) -> Mapping[str, Price]:
    content = read_yaml(path, "the prices in")
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path} must be a mapping of devices to prices, such as 'h100-sxm: 2.49'")
    try:
        return {str(device): _price(str(device), entry, str(path)) for device, entry in content.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _price(device: str, entry: Any, source: str) -> Price:
    if device != CPU:  # which is measured where it is looked up
        find_device(device)
    if isinstance(entry, (int, float)) and not isinstance(entry, bool):
        entry = {"usd_per_hour": entry, "source": source}
    if not isinstance(entry, dict) or "usd_per_hour" not in entry:
        raise ConfigError(f"{device} is {entry!r}; give dollars an hour, or a mapping with usd_per_hour")
    if unknown := [name for name in entry if name not in _FIELDS]:
        raise ConfigError(f"{device} has no {unknown[0]!r}; it takes {', '.join(_FIELDS)}")
    try:
        usd_per_hour = float(entry["usd_per_hour"])
        watts = float(entry["watts"]) if "watts" in entry else _watts(device)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{device} is {entry!r}; usd_per_hour and watts are numbers") from error
    return Price(
        device=device,
        usd_per_hour=usd_per_hour,
        watts=watts,
        date=str(entry.get("date", "")),
        source=str(entry.get("source", source)),
    )


def _watts(device: str) -> float:
    watts = None if device == CPU else find_device(device).tdp_watts
    if watts is None:
        raise ConfigError(f"the power of {device} is not known; give it with its price: watts: 300")
    return watts
