"""What GPUs cost and draw: a table in the package, and a user's file that wins over it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from onbeat.core.errors import ConfigError
from onbeat.files import packaged, read
from onbeat.perfmodel.device_spec import CPU, find_device, known_device
from onbeat.typed import Positive, Table


class Price(Table):
    """Of one device."""

    usd_per_hour: Positive
    watts: Positive = 0.0
    """What it draws at most, with nothing of its machine; the data sheet says what a file leaves out."""
    date: str = ""
    """When the price held, such as 2026-11."""
    source: str = ""

    @property
    def text(self) -> str:
        """With where it is from: `$0.7/h (our contract, 2026-11)`."""
        where = ", ".join(text for text in (self.source, self.date) if text)
        return f"${self.usd_per_hour:g}/h" + (f" ({where})" if where else "")


class Prices:
    """The prices that a plan goes by.

    Parameters
    ----------
    path : of a YAML file: name of a device -> dollars an hour, or a mapping of usd_per_hour, watts, date,
        source. It wins over the table in the package, device by device.

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


_Entries: Any = Annotated[dict[str, Price | Positive], Meta(min_length=1)]


@cache
def _table() -> Mapping[str, Price]:
    entries = packaged(_Entries, "onbeat.planner", "prices.yaml")
    return {device: _price(device, entry, "the table") for device, entry in entries.items()}


def _read(path: Path) -> Mapping[str, Price]:
    entries = read(_Entries, path, "the prices in", hint="; write devices and their prices: 'h100-sxm: 2.49'")
    try:
        return {
            known_device(device) or device: _price(device, entry, str(path))
            for device, entry in entries.items()
        }
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _price(device: str, entry: Price | float, source: str) -> Price:
    price = entry if isinstance(entry, Price) else Price(usd_per_hour=entry)
    sheet = None if device == CPU else find_device(device).tdp_watts  # a CPU is measured to be found
    watts = price.watts or sheet
    if watts is None:
        raise ConfigError(f"the power of {device} is not known; give it with its price: watts: 300")
    return replace(price, watts=watts, source=price.source or source)
