"""Step time as a linear form of the batch's sums, with DistServe's published coefficients.

DistServe (Zhong et al., OSDI 2024, appendix A and the released simulator) measures prefill and decode steps
apart: `a + b sum(len) + c sum(len^2)` and `a + b sum(context) + c batch`. They are read from the JSON of its
profiler (LLMServe/DistServe: model -> tensor-parallel degree -> coefficients, milliseconds).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.files import read

StepSeconds = Callable[[BatchShape], float]

_LOWEST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class EngineOverhead:
    """What a step costs beside the model: scheduling and the calls to the workers; seconds.

    The defaults are those of DistServe's simulator: 2 ms and 0.1 us for each token of context in the batch.
    """

    per_step: float = 2e-3
    per_token: float = 1e-7


NO_OVERHEAD = EngineOverhead(0.0, 0.0)
STAGE_HOP = 1e-3
"""Seconds that a prefill step loses between two pipeline stages, as DistServe's simulator has it."""


def linear_closure(
    path: Path, *, model: str, tensor: int = 1, pipeline: int = 1, overhead: EngineOverhead | None = None
) -> StepSeconds:
    """Return the step time of a model with the coefficients of a file.

    Parameters
    ----------
    path : DistServe's profiler JSON.
    model : its name in the file.
    tensor, pipeline : degrees of parallelism.
    overhead : None takes DistServe's own.

    Returns
    -------
    Seconds through all stages for a `BatchShape`.

    Raises
    ------
    ConfigError : see `read_distserve_coefficients`.
    """
    coefficients = read_distserve_coefficients(path, model=model, tensor=tensor)
    return distserve_closure(coefficients, pipeline=pipeline, overhead=overhead or EngineOverhead())


def distserve_closure(
    coefficients: DistServeCoefficients, *, pipeline: int = 1, overhead: EngineOverhead = NO_OVERHEAD
) -> StepSeconds:
    """Return DistServe's form as a function of the batch.

    Parameters
    ----------
    coefficients : of the model and its tensor-parallel degree.
    pipeline : stages; each takes its share of the layers, so only hops between stages come on top.
    overhead : added to every step.

    Notes
    -----
    Chunks: the form knows whole prompts. A chunk of n tokens behind m cached ones counts n^2 + 2 n m in
    place of len^2, so that the chunks of a prompt count len^2 together, and a whole prompt exactly that.

    Mixed steps: the form knows none. Their fixed part (reading the weights, launching kernels) is paid
    once, so it is the larger of the two; the parts that grow with tokens and sequences add up.

    Drafts: the form knows none. One counts as another sequence that brings no context to read.
    """
    prefill_fixed, per_token, per_square = coefficients.prefill
    small, large, large_batch = coefficients.decode_small, coefficients.decode_large, coefficients.large_batch
    per_step, per_context = overhead.per_step, overhead.per_token
    hops = STAGE_HOP * (pipeline - 1)
    lowest = _LOWEST_SHARE * min(prefill_fixed, small[0], large[0])

    def seconds(shape: BatchShape) -> float:
        num_decodes = shape.num_decodes
        fixed = growing = 0.0
        context = shape.decode_context_tokens
        if num_decodes:
            num_tokens = num_decodes + shape.num_draft_tokens
            fixed, per_decode_context, per_sequence = small if num_tokens < large_batch else large
            growing = per_decode_context * context + per_sequence * num_tokens
        if shape.num_chunks:
            num_tokens = shape.num_chunk_tokens
            fixed = max(fixed, prefill_fixed) + hops
            growing += per_token * num_tokens + per_square * (2 * shape.query_key_pairs - num_tokens)
            context += num_tokens + shape.chunk_cached_tokens
        elif not num_decodes:
            return 0.0
        return max(fixed + growing, lowest) + per_step + per_context * context

    return seconds


_SECONDS_PER_MS = 1e-3
_PREFILL, _SMALL, _LARGE = "prefill", "decoding_smallbs", "decoding_largebs"
_THRESHOLD = "decoding_large_small_bs_threshold"


@dataclass(frozen=True, slots=True)
class DistServeCoefficients:
    """One model at one tensor-parallel degree; seconds.

    `prefill` multiplies (1, sum of prompt tokens, sum of their squares), `decode_small` and `decode_large`
    multiply (1, sum of contexts, number of sequences); the large set holds from `large_batch` sequences on.
    """

    prefill: tuple[float, float, float]
    decode_small: tuple[float, float, float]
    decode_large: tuple[float, float, float]
    large_batch: int


def read_distserve_coefficients(path: Path, *, model: str, tensor: int) -> DistServeCoefficients:
    """Read one model's coefficients from DistServe's profiler JSON.

    Parameters
    ----------
    path : the file.
    model : its name there, with or without the organisation (`facebook/opt-13b` or `opt-13b`).
    tensor : tensor-parallel degree.

    Raises
    ------
    ConfigError : the file cannot be read, has no such model or degree (the message lists what it has), or a
        coefficient is not a finite number.
    """
    models = _load_object(path)
    degrees = models[_match_model(model, list(models), path)]
    if not isinstance(degrees, dict) or str(tensor) not in degrees:
        known = ", ".join(sorted(degrees, key=int)) if isinstance(degrees, dict) else "none"
        raise ConfigError(f"{path} has no coefficients of {model!r} for TP {tensor}; it has TP {known}")
    where = f"{path}, {model} TP {tensor}"
    return DistServeCoefficients(
        prefill=_triple(degrees[str(tensor)], _PREFILL, where),
        decode_small=_triple(degrees[str(tensor)], _SMALL, where),
        decode_large=_triple(degrees[str(tensor)], _LARGE, where),
        large_batch=int(_number(degrees[str(tensor)].get(_THRESHOLD), f"{where}, {_THRESHOLD}")),
    )


def _load_object(path: Path) -> dict[str, Any]:
    return read(dict[str, Any], path, "the coefficients in")


def _match_model(model: str, known: list[str], path: Path) -> str:
    """Find a model's name in a file: exactly, or by its part behind the organisation."""
    if model in known:
        return model
    short = model.rpartition("/")[2].lower()
    matches = [name for name in known if name.rpartition("/")[2].lower() == short]
    if len(matches) != 1:
        names = ", ".join(dict.fromkeys(known))
        raise ConfigError(f"{path} has no coefficients of model {model!r}; it has {names}")
    return matches[0]


def _triple(coefficients: Mapping[str, Any], key: str, where: str) -> tuple[float, float, float]:
    values = coefficients.get(key)
    if not isinstance(values, list) or len(values) != 3:
        raise ConfigError(f"{where}: {key} is {values!r}; it must be three numbers (milliseconds)")
    first, second, third = (_number(value, f"{where}, {key}") * _SECONDS_PER_MS for value in values)
    return first, second, third


def _number(value: object, where: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number):
        raise ConfigError(f"{where}: {value!r} is not a finite number")
    return number
