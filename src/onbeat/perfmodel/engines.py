"""What a step costs in another engine: terms of whole engines around the roofline of their operators.

A data sheet knows nothing of an engine: what its host does for each row, the gaps between its kernels, how
fast its kernels are and how its devices talk to each other. Each of these is a number an engine, fitted to
published measurements (`data/engines.yaml` says which, and docs/calibration.md how well they hold).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from math import log2
from types import MappingProxyType

import numpy as np
import yaml
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import CPU, DeviceSpec
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import SIXTEEN_BIT, Precision
from onbeat.perfmodel.roofline import (
    RooflineParameters,
    make_roofline,
    roofline_seconds,
)
from onbeat.perfmodel.runs import StepSeconds
from onbeat.perfmodel.shapes import NEW_TOKENS, SEQUENCES

ENGINES = ("vllm", "tensorrt-llm", "sglang")

PER_DOUBLING = 0.5
"""What each doubling of the devices beyond two adds to an all-reduce's start, as a share of that of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """One engine. Times are seconds, efficiencies shares of the data sheet's peak."""

    row_seconds: float
    """Host time of a step for each of its rows, where the device waits for it."""
    layer_seconds: float
    """Launches and gaps between the kernels of one layer."""
    expert_layer_seconds: float
    """The same, of what a layer with experts has beyond others: routing, gathering, scattering."""
    all_reduce_seconds: float
    """Start of one all-reduce between two devices."""
    link_efficiency: float
    """Of the links' bandwidth in one direction."""
    gemm_efficiency: float
    """Of 16-bit arithmetic, in matrix products."""
    narrow_gemm_efficiency: float
    """Of 8-bit arithmetic, likewise; scaling to and from 8 bits included."""
    kv_bandwidth_efficiency: float
    """Of memory bandwidth, reading KV."""
    steps_ahead: int = 0
    """Steps that are planned before the results of the step under way are there."""

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise ConfigError(f"{name} of an engine is {value:g}; it must be in [{low:g}, {high:g}]")
        if self.steps_ahead not in (0, 1):
            raise ConfigError(f"steps_ahead of an engine is {self.steps_ahead}; it must be 0 or 1")


BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "row_seconds": (0.0, 3e-4),
        "layer_seconds": (0.0, 2e-4),
        "expert_layer_seconds": (0.0, 2e-4),
        "all_reduce_seconds": (0.0, 6e-5),
        "link_efficiency": (0.1, 0.95),
        "gemm_efficiency": (0.2, 0.95),
        "narrow_gemm_efficiency": (0.2, 0.95),
        "kv_bandwidth_efficiency": (0.2, 0.95),
    }
)
"""What a term can be: no device does more than its data sheet says."""


def find_engine(name: str) -> EngineTerms:
    """Return the terms of an engine of `ENGINES`.

    Raises
    ------
    ConfigError : an unknown engine.
    """
    try:
        return _table()[name]
    except KeyError:
        raise ConfigError(f"unknown engine {name!r}; known are {', '.join(ENGINES)}") from None


def engine_parameters(
    engine: EngineTerms,
    model: ModelSpec,
    device: DeviceSpec,
    *,
    parallelism: Parallelism,
    precision: Precision,
) -> RooflineParameters:
    """Return the roofline's parameters for an engine.

    Raises
    ------
    ConfigError : a CPU, of which the terms know nothing.
    """
    if device.architecture == CPU:
        raise ConfigError(
            "the terms of engines were fitted to GPUs and hold for no CPU; leave --engine out, or name "
            "another --device"
        )
    is_wide = precision.compute in SIXTEEN_BIT or precision.compute == "fp32"
    tensor = parallelism.tensor
    experts = engine.expert_layer_seconds * model.num_moe_layers / model.num_layers
    return replace(
        RooflineParameters.DEFAULTS,
        gemm_efficiency=engine.gemm_efficiency if is_wide else engine.narrow_gemm_efficiency,
        kv_bandwidth_efficiency=engine.kv_bandwidth_efficiency,
        layer_seconds=engine.layer_seconds + experts,
        link_latency=engine.all_reduce_seconds
        * (1 + PER_DOUBLING * (log2(tensor) - 1) if tensor > 1 else 1.0),
        link_efficiency=engine.link_efficiency,
    )


def make_engine_roofline(
    engine: EngineTerms,
    model: ModelSpec,
    device: DeviceSpec,
    *,
    parallelism: Parallelism,
    precision: Precision,
) -> StepSeconds:
    """Return a function from a batch's sums to seconds of an engine's step; an empty batch takes none.

    Raises
    ------
    ConfigError : see `engine_parameters` and `make_roofline`.
    """
    parameters = engine_parameters(engine, model, device, parallelism=parallelism, precision=precision)
    roofline = make_roofline(
        model, device, parallelism=parallelism, precision=precision, parameters=parameters
    )
    row_seconds = engine.row_seconds

    def seconds(shape: BatchShape) -> float:
        return roofline.of_one(shape) + row_seconds * shape.num_sequences

    def of_run(shape: BatchShape, contexts: Sequence[int]) -> list[float]:
        rows = row_seconds * shape.num_sequences
        return [each + rows for each in roofline.of_run(shape, contexts)]

    return StepSeconds(seconds, of_run)


def engine_seconds(
    matrix: NDArray[np.float64],
    engine: EngineTerms,
    model: ModelSpec,
    device: DeviceSpec,
    *,
    parallelism: Parallelism,
    precision: Precision,
) -> NDArray[np.float64]:
    """Return the same as `make_engine_roofline`'s function for many batches at once.

    Parameters
    ----------
    matrix : rows of `shapes.shape_matrix`: [N, F].

    Returns
    -------
    Seconds: [N].

    Raises
    ------
    ConfigError : see `engine_parameters` and `roofline_seconds`.
    """
    parameters = engine_parameters(engine, model, device, parallelism=parallelism, precision=precision)
    steps = roofline_seconds(
        matrix, model, device, parallelism=parallelism, precision=precision, parameters=parameters
    )
    return np.where(matrix[:, NEW_TOKENS] > 0, steps + engine.row_seconds * matrix[:, SEQUENCES], 0.0)


@cache
def _table() -> Mapping[str, EngineTerms]:
    text = files("onbeat.perfmodel").joinpath("data", "engines.yaml").read_text("utf-8")
    names = [field.name for field in fields(EngineTerms)]
    return MappingProxyType(
        {
            engine: EngineTerms(**{name: entry[name] for name in names})
            for engine, entry in yaml.safe_load(text)["engines"].items()
        }
    )
