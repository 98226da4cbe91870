"""What a step costs in another engine: terms of whole engines around the roofline of their operators.

A data sheet knows nothing of an engine: what its host does for each row, the gaps between its kernels, how
fast its kernels are and how its devices talk to each other. Each of these is a number of an engine from a
version on, fitted to published measurements (`data/engines.yaml` says which,
docs/maintainers/calibration.md how well they hold).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import log2
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from msgspec import Meta

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.files import packaged, read
from onbeat.perfmodel.device_spec import CPU, is_spec_file
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.roofline import RooflineParameters, default_parameters, make_roofline
from onbeat.perfmodel.runs import StepSeconds
from onbeat.typed import Number, Table, Text

ENGINES = ("vllm", "tensorrt-llm", "sglang")
NO_ENGINE = "none"
ENGINE_FORM = "NAME|NAME@VERSION|FILE.yaml"

PER_DOUBLING = 0.5
"""What each doubling of the devices beyond two adds to an all-reduce's start, as a share of that of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """One engine from a version on. A ratio is a time over that of the architecture's kernels alone."""

    row_seconds: Number
    """Host time of a step for each of its rows, where the device waits for it."""
    layer_ratio: Number
    """Of starts and gaps of the kernels of one layer."""
    expert_seconds: Number
    """Of each expert of a layer that has some, read or not: routing, gathering, scattering."""
    all_reduce_seconds: Number
    """Start of one all-reduce between two devices."""
    link_efficiency: Number
    """Of the links' bandwidth in one direction."""
    gemm_ratio: Number
    """Of 16-bit arithmetic, in matrix products."""
    narrow_gemm_ratio: Number
    """Of narrower arithmetic, likewise; scaling to and from its format included."""
    narrow_weight_ratio: Number
    """Of reading weights for narrower arithmetic."""
    kv_ratio: Number
    """Of reading KV."""
    steps_ahead: Annotated[int, Meta(ge=0, le=1)] = 0
    """Steps that are planned before the results of the step under way are there."""
    request_seconds: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """See `profile.ServerTerms`."""
    version: str = ""
    """From which on they hold; empty where nobody said."""
    through: str = ""
    """The newest version that was measured; empty where nobody said."""
    sources: Mapping[str, Text] = field(default_factory=dict)
    """Where the numbers are from, by their names."""

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise ConfigError(f"{name} of an engine is {value:g}; it must be in [{low:g}, {high:g}]")


BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "row_seconds": (0.0, 3e-4),
        "layer_ratio": (0.1, 5.0),
        "expert_seconds": (0.0, 2e-6),
        "all_reduce_seconds": (0.0, 6e-5),
        "link_efficiency": (0.1, 0.95),
        "gemm_ratio": (0.5, 2.0),
        "narrow_gemm_ratio": (0.5, 2.0),
        "narrow_weight_ratio": (0.8, 1.5),
        "kv_ratio": (0.9, 3.0),
    }
)
"""What a term can be: kernels of an engine hardly beat those that were measured alone."""


def find_engine(name: str) -> EngineTerms:
    """Return the terms of an engine.

    Parameters
    ----------
    name : one of `ENGINES`, for the newest terms; with a version behind it (`vllm@0.12`), for the terms of
        that version, which are those of the newest version that is not newer; or the path of a YAML file with
        the fields of an entry of `data/engines.yaml`.

    Raises
    ------
    ConfigError : an unknown engine or version, those that are known are named; or a file that is not there or
        says something wrong.
    """
    if is_spec_file(name):
        return read(EngineTerms, Path(name), "the engine in")
    engine, at, version = name.partition("@")
    known = _table().get(engine)
    if known is None:
        raise ConfigError(
            f"unknown engine {engine!r}; known are {', '.join(ENGINES)}, or a file of terms, FILE.yaml"
        )
    if not at:
        return known[-1]
    if re.fullmatch(r"[0-9]+(\.[0-9]+)*", version):
        terms = [each for each in known if _order(each.version) <= _order(version)]
        if terms:
            return terms[-1]
    versions = " and ".join(each.version for each in known)
    raise ConfigError(
        f"no terms of {engine} {version!r} are known; there are some from version {versions} on, such as "
        f"{engine}@{known[0].version}"
    )


def described_terms(name: str) -> str:
    """Return which versions' terms a name takes, and whether the version that it names is beyond them.

    Raises
    ------
    ConfigError : see `find_engine`.
    """
    terms, asked = find_engine(name), "" if is_spec_file(name) else name.partition("@")[2]
    if not terms.version:
        return name
    measured = f", measured up to {terms.through}" if terms.through else ""
    beyond = asked and measured and _order(asked)[:2] > _order(terms.through)
    guess = f": for {asked} they are a guess" if beyond else ""
    return f"{name} (terms from version {terms.version} on{measured}{guess})"


def require_engine(name: str) -> str:
    """Return the name of an engine, or `none`, as it is.

    Raises
    ------
    ConfigError : see `find_engine`.
    """
    if name != NO_ENGINE:
        find_engine(name)
    return name


def engine_parameters(engine: EngineTerms, target: FitTarget) -> RooflineParameters:
    """Return the roofline's parameters for an engine.

    Raises
    ------
    ConfigError : a CPU, of which the terms know nothing.
    """
    if target.device.architecture == CPU:
        raise ConfigError(
            "the terms of --engine were fitted to GPUs, not to CPUs; leave --engine out, or give "
            "another --device"
        )
    model, tensor = target.model, target.parallelism.tensor
    experts = engine.expert_seconds * model.num_experts * model.num_moe_layers / model.num_layers
    reached = default_parameters(target.device, target.precision)
    gemm, weights = engine.gemm_ratio, 1.0
    if target.precision.is_narrow:
        gemm, weights = engine.narrow_gemm_ratio, engine.narrow_weight_ratio
    return replace(
        reached,
        gemm_efficiency=reached.gemm_efficiency / gemm,
        weight_bandwidth_efficiency=reached.weight_bandwidth_efficiency / weights,
        kv_bandwidth_efficiency=reached.kv_bandwidth_efficiency / engine.kv_ratio,
        layer_seconds=reached.layer_seconds * engine.layer_ratio + experts,
        link_latency=engine.all_reduce_seconds
        * (1 + PER_DOUBLING * (log2(tensor) - 1) if tensor > 1 else 1.0),
        link_efficiency=engine.link_efficiency,
    )


def make_engine_roofline(engine: EngineTerms, target: FitTarget) -> StepSeconds:
    """Return a function from a batch's sums to seconds of an engine's step; an empty batch takes none.

    Raises
    ------
    ConfigError : see `engine_parameters` and `make_roofline`.
    """
    roofline = make_roofline(target, engine_parameters(engine, target))
    row_seconds = engine.row_seconds

    def seconds(shape: BatchShape) -> float:
        return roofline.of_one(shape) + row_seconds * shape.num_sequences

    def of_run(shape: BatchShape, contexts: Sequence[int]) -> list[float]:
        rows = row_seconds * shape.num_sequences
        return [each + rows for each in roofline.of_run(shape, contexts)]

    return StepSeconds(seconds, of_run)


class _File(Table):
    engines: dict[str, tuple[EngineTerms, ...]]


@cache
def _table() -> Mapping[str, tuple[EngineTerms, ...]]:
    """Return the terms in the package by engine, those of older versions first."""
    engines = packaged(_File, "onbeat.perfmodel", "engines.yaml").engines
    return {
        name: tuple(sorted(terms, key=lambda each: _order(each.version))) for name, terms in engines.items()
    }


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
