"""From the JSON of a profile file to a `Profile`, with an error for everything that is not as it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.files import check_numbers
from onbeat.perfmodel.fit_errors import FitErrors
from onbeat.perfmodel.fitted import FIT_METHODS, FittedModel
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.product_rates import ProductRates
from onbeat.perfmodel.profile import REMEDY, MachineLimits, MeasuredStep, Profile, ProfileKey, ServerTerms
from onbeat.perfmodel.shape_range import ShapeRange
from onbeat.perfmodel.shapes import FIELDS

_T = TypeVar("_T")

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


def parse_profile(content: object, path: Path) -> Profile:
    """Return the profile that a file's JSON describes.

    Raises
    ------
    ConfigError : another schema version, or a value that is missing or wrong; names file, place and value.
    """
    top = _Object(content, path, "")
    version = top.value("schema_version", int)
    if version not in _READABLE:
        raise ConfigError(
            f"the profile {path} has schema version {version}, but this onbeat reads versions "
            f"{' and '.join(map(str, _READABLE))}. {REMEDY}"
        )
    limits, engine = top.raw("limits"), top.object("engine")
    return Profile(
        key=_key(top.object("key"), engine if version == 2 else top.object("key")),
        onbeat_version=top.value("onbeat_version", str),
        created=top.value("created", str),
        steps=_steps(top),
        fitted=_fitted(top.object("fit")),
        server=_server(top.object("server")) if "server" in top.items else ServerTerms(),
        limits=None if limits is None else _limits(top.object("limits")),
        engine=dict(engine.items),
    )


class _Object:
    """A JSON object that knows where in the file it stands."""

    def __init__(self, items: object, path: Path, place: str) -> None:
        self._path = path
        self._place = place
        if not isinstance(items, dict):
            raise self.error("", items, "an object")
        self.items: Mapping[str, Any] = items

    def error(self, name: str, found: object, wanted: str) -> ConfigError:
        place = ".".join(part for part in (self._place, name) if part) or "the file"
        shown = repr(found) if len(repr(found)) < 80 else repr(found)[:77] + "..."
        return ConfigError(f"profile {self._path}: {place} is {shown}; it must be {wanted}. {REMEDY}")

    def raw(self, name: str) -> Any:
        if name not in self.items:
            raise self.error(name, None, "there")
        return self.items[name]

    def object(self, name: str) -> _Object:
        return _Object(self.raw(name), self._path, f"{self._place}.{name}" if self._place else name)

    def value(self, name: str, kind: type[_T]) -> _T:
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise self.error(name, value, f"of type {kind.__name__}")
        return value

    def positive(self, name: str) -> float:
        value = self.raw(name)
        if not (_is_number(value) and value > 0):
            raise self.error(name, value, "a number above 0")
        return float(value)

    def numbers(self) -> dict[str, float]:
        for name, value in self.items.items():
            if not _is_number(value):
                raise self.error(name, value, "a finite number")
        return {name: float(value) for name, value in self.items.items()}


def _is_number(value: object) -> bool:
    # an int may be beyond any float
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _key(key: _Object, instruction_set: _Object) -> ProfileKey:
    precision, parallelism = key.object("precision"), key.object("parallelism")
    return ProfileKey(
        model=key.value("model", str),
        device=key.value("device", str),
        device_name=key.value("device_name", str),
        precision=Precision(
            weights=precision.value("weights", str),
            kv=precision.value("kv", str),
            compute=precision.value("compute", str),
            embedding=precision.value("embedding", str) if "embedding" in precision.items else None,
            group=precision.value("group", int) if "group" in precision.items else None,
        ),
        parallelism=Parallelism(
            tensor=parallelism.value("tensor", int), pipeline=parallelism.value("pipeline", int)
        ),
        threads=key.value("threads", int),
        backend=key.value("backend", str),
        instruction_set=(
            instruction_set.value("instruction_set", str)
            if "instruction_set" in instruction_set.items
            else None
        ),
        engine_version=key.value("engine_version", str) if "engine_version" in key.items else None,
    )


def _server(server: _Object) -> ServerTerms:
    seconds = server.raw("request_seconds")
    if not _is_number(seconds) or seconds < 0:
        raise server.error("request_seconds", seconds, "a finite time of at least 0")
    ahead = server.value("steps_ahead", int)
    if ahead not in (0, 1):
        raise server.error("steps_ahead", ahead, "0 or 1")
    return ServerTerms(steps_ahead=ahead, request_seconds=float(seconds))


def _limits(limits: _Object) -> MachineLimits:
    rates = limits.object("peak_flops")
    return MachineLimits(
        memory_bandwidth=limits.positive("memory_bandwidth"),
        peak_flops={name: rates.positive(name) for name in rates.items},
        product_rates=_product_rates(limits),
    )


def _product_rates(limits: _Object) -> ProductRates:
    rates = limits.items.get("product_rates", [])
    try:
        found = tuple((num_rows, float(rate)) for num_rows, rate in rates)
        rows = [num_rows for num_rows, _ in found]
        is_well_formed = rows == sorted(set(rows)) and all(
            isinstance(num_rows, int) and num_rows > 0 and math.isfinite(rate) and rate > 0
            for num_rows, rate in found
        )
    except (TypeError, ValueError):
        is_well_formed = False
    if not is_well_formed:
        wanted = "a list of [rows, operations per second], all above 0, rows ascending"
        raise limits.error("product_rates", rates, wanted)
    return found


def _fitted(fit: _Object) -> FittedModel:
    method = fit.value("method", str)
    if method not in FIT_METHODS:
        raise fit.error("method", method, f"one of {', '.join(FIT_METHODS)}")
    ratios = fit.raw("ratios")
    if not (isinstance(ratios, list) and ratios and all(_is_number(ratio) and ratio > 0 for ratio in ratios)):
        raise fit.error("ratios", ratios, "a list of numbers above 0")
    errors = fit.object("errors").numbers()
    check_numbers(fit.raw("parameters"), "the profile's fit")
    shape_range = fit.object("shape_range")
    try:
        return FittedModel(
            method=method,
            parameters=fit.object("parameters").numbers(),
            errors=FitErrors(**{**errors, "num_points": int(errors["num_points"])}),  # type: ignore[arg-type]
            ratios=tuple(ratios),
            shape_range=ShapeRange(**{name: shape_range.value(name, int) for name in shape_range.items}),
        )
    except (KeyError, TypeError) as error:
        raise fit.error("", dict(fit.items), f"whole ({error})") from error


def _steps(top: _Object) -> tuple[MeasuredStep, ...]:
    columns = top.value("columns", list)
    names = [name for name in FIELDS if name not in _LATER_COLUMNS or name in columns]
    if columns != [*names, "seconds"]:
        raise top.error("columns", columns, f"{[*FIELDS, 'seconds']}")
    rows = top.raw("steps")
    if not (isinstance(rows, list) and rows):
        raise top.error("steps", rows, "a list of at least one measured step")
    return tuple(_step(top, names, index, row) for index, row in enumerate(rows))


def _step(top: _Object, names: list[str], index: int, row: object) -> MeasuredStep:
    if not (isinstance(row, list) and len(row) == len(names) + 1 and all(map(_is_number, row))):
        raise top.error(f"steps[{index}]", row, f"{len(names) + 1} finite numbers")
    *sums, seconds = row
    if min(sums) < 0 or seconds <= 0:
        raise top.error(f"steps[{index}]", row, "counts of at least 0 and a time above 0")
    shape = BatchShape(**{name: int(value) for name, value in zip(names, sums, strict=True)})
    return MeasuredStep(shape, float(seconds))
