"""Read published coefficients of linear step-time models.

Two file formats, both in milliseconds: DistServe's profiler JSON (LLMServe/DistServe, Zhong et al., OSDI
2024: model -> tensor-parallel degree -> coefficients) and a CSV of TurboSpec's regression (Liu et al.,
arXiv 2406.14066: one row a configuration).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.files import read_csv, read_json

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


@dataclass(frozen=True, slots=True)
class TurboSpecCoefficients:
    """The target model's row; seconds for each unit."""

    per_context_token: float
    per_new_token: float
    per_sequence: float
    when_speculating: float
    fixed: float


@dataclass(frozen=True, slots=True)
class TurboSpecDrafts:
    """What making drafts takes on top of the target's step: a linear form, or a share of the target's time.

    Seconds for each unit; a method has one or the other, and zeros for the rest.
    """

    per_context_token: float
    per_new_token: float
    per_sequence: float
    per_draft: float
    """For each draft of a row, however many rows there are."""
    fixed: float
    target_share: float
    """Of the target's time: for drafting, where it has no form of its own, and for all around it."""


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


def read_turbospec_coefficients(path: Path, *, model: str, tensor: int) -> TurboSpecCoefficients:
    """Read the target model's row of a TurboSpec coefficient CSV.

    Parameters
    ----------
    path : the file; columns `config`, `tp`, `role` and the coefficients in milliseconds.
    model : name in column `config`.
    tensor : tensor-parallel degree, column `tp`.

    Raises
    ------
    ConfigError : no such file, column, model or degree, or a coefficient that is not a finite number.
    """
    rows = [row for row in _read_csv(path) if row.get("role") == "target"]
    if not rows:
        raise ConfigError(f"{path} has no row with role 'target'; is it a TurboSpec coefficient file?")
    name = _match_model(model, [row.get("config", "") for row in rows], path)
    row_of_degree = {row.get("tp"): row for row in rows if row.get("config") == name}
    if str(tensor) not in row_of_degree:
        known = ", ".join(str(degree) for degree in row_of_degree)
        raise ConfigError(f"{path} has no coefficients of {model!r} for TP {tensor}; it has TP {known}")
    row = row_of_degree[str(tensor)]

    def seconds(column: str) -> float:
        return _number(row.get(column), f"{path}, {name} TP {tensor}, {column}") * _SECONDS_PER_MS

    return TurboSpecCoefficients(
        per_context_token=seconds("c_kv_ms_per_ctx_token"),
        per_new_token=seconds("c_compute_ms_per_batched_token"),
        per_sequence=seconds("c_batch_ms_per_seq"),
        when_speculating=seconds("c_enable_spec_ms"),
        fixed=seconds("c_fixed_ms"),
    )


def read_turbospec_drafts(path: Path, *, model: str, tensor: int, method: str) -> TurboSpecDrafts:
    """Read what drafting takes from a TurboSpec coefficient CSV.

    Parameters
    ----------
    path, model, tensor : as in `read_turbospec_coefficients`.
    method : of drafting, column `method` (`ngram`, `eagle`).

    Raises
    ------
    ConfigError : no such file, column, model, degree or method, or a coefficient that is not a finite number.
    """
    rows = _read_csv(path)
    name = _match_model(model, [row.get("config", "") for row in rows], path)
    own = [row for row in rows if row.get("config") == name and row.get("tp") == str(tensor)]
    methods = {row.get("method", ""): row for row in own if row.get("role") == "draft"}
    if method not in methods:
        known = ", ".join(methods) or "none"
        raise ConfigError(
            f"{path} has no coefficients of drafting by {method!r} for {name} TP {tensor}; it has {known}"
        )
    row = methods[method]

    def number(cells: Mapping[str, str], column: str, unit: float) -> float:
        if not cells.get(column):  # what a method does not cost is left out
            return 0.0
        return _number(cells[column], f"{path}, {name} TP {tensor}, {method}, {column}") * unit

    around = [other for other in own if other.get("role") == "overhead"]
    return TurboSpecDrafts(
        per_context_token=number(row, "c_kv_ms_per_ctx_token", _SECONDS_PER_MS),
        per_new_token=number(row, "c_compute_ms_per_batched_token", _SECONDS_PER_MS),
        per_sequence=number(row, "c_batch_ms_per_seq", _SECONDS_PER_MS),
        per_draft=number(row, "c_num_spec_ms_per_draft_token", _SECONDS_PER_MS),
        fixed=number(row, "c_fixed_ms", _SECONDS_PER_MS),
        target_share=sum(number(cells, "fraction_of_target_time", 1.0) for cells in (row, *around)),
    )


def _read_csv(path: Path) -> list[dict[str, str]]:
    return [cells for _, cells in read_csv(path, "the coefficients in", rows="coefficients")]


def _load_object(path: Path) -> dict[str, Any]:
    return read_json(path, "the coefficients in")


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
