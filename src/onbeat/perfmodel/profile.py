"""The profile of a machine: measured steps of one model, what was fitted to them, and how good that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.device_spec import DeviceSpec
from onbeat.perfmodel.fitted import FittedModel
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.product_rates import ProductRates
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.typed import Count, NotNegative, Positive

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

    def __post_init__(self) -> None:
        rows = [num_rows for num_rows, _ in self.product_rates]
        if rows != sorted(set(rows)):
            raise ConfigError(f"the rows of product_rates are {rows}; they must ascend")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTerms:
    """What a server does beside its steps.

    Raises
    ------
    ConfigError : a time that is negative or not finite, or another number of steps than 0 or 1.
    """

    steps_ahead: Annotated[int, Meta(ge=0, le=1)] = 0
    """Steps that are planned before the results of the step under way are there."""
    request_seconds: NotNegative = 0.0
    """That each request's first token comes later than its steps say: reading the request, tokenizing."""

    def __post_init__(self) -> None:
        if not 0 <= self.request_seconds < inf:
            raise ConfigError(
                f"request_seconds of a server is {self.request_seconds:g}; it must be a finite time of at "
                "least 0"
            )
        if self.steps_ahead not in (0, 1):
            raise ConfigError(f"steps_ahead of a server is {self.steps_ahead}; it must be 0 or 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that `onbeat profile` found out."""

    key: ProfileKey
    onbeat_version: str
    created: str
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
