"""Step time as a non-negative combination of a batch's sums: needs no specification of model or device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.extras import require
from onbeat.core.step import BatchShape
from onbeat.perfmodel.shapes import FIELDS, draft_pairs, draft_pairs_of

FEATURES = (
    *("num_new_tokens", "num_sequences", "num_chunks", "query_key_pairs", "chunk_cached_tokens"),
    *("decode_context_tokens", "num_lm_head_rows", "num_verify_rows", "num_draft_tokens"),
)
"""The sums that count, beside a fixed time."""
PAIRS = "draft_pairs"
"""What a row that verifies drafts computes beyond a plain decode: see `shapes.draft_pairs`."""
PASSES = ("has_decodes", "has_chunks", "has_drafts")
"""Whether there are any: attention over decodes, over chunks and over rows with drafts is a pass each, with a
start of its own."""

_COLUMNS = [FIELDS.index(name) for name in FEATURES]
_COUNTS = [FIELDS.index(name) for name in ("num_decodes", "num_chunks", "num_draft_tokens")]
_FIXED, _LOWEST = "fixed", "lowest"
_NAMES = (_FIXED, *FEATURES, PAIRS, *PASSES)
_LOWEST_SHARE = 0.5
_OF_DRAFTS = frozenset(("num_draft_tokens", PAIRS, "has_drafts"))
"""What fits of before there were drafts lack: to them a draft is a new token and a row of the LM head."""


class NNLSForm:
    """The formula as `fitted.Form`."""

    def fit(self, matrix: NDArray[np.float64], seconds: NDArray[np.float64]) -> dict[str, float]:
        """Return `fit_nnls`."""
        return fit_nnls(matrix, seconds)

    def predict(self, matrix: NDArray[np.float64], parameters: Mapping[str, float]) -> NDArray[np.float64]:
        """Return `nnls_seconds`."""
        return nnls_seconds(matrix, _checked(parameters))

    def closure(self, parameters: Mapping[str, float]) -> Callable[[BatchShape], float]:
        """Return `nnls_closure`."""
        return nnls_closure(_checked(parameters))


def _checked(parameters: Mapping[str, float]) -> Mapping[str, float]:
    known = {*_NAMES, _LOWEST}
    if known - parameters.keys() == _OF_DRAFTS:
        parameters = {**dict.fromkeys(_OF_DRAFTS, 0.0), **parameters}
    if parameters.keys() != known:
        unlike = ", ".join(sorted(parameters.keys() ^ known))
        raise ConfigError(
            f"the fitted parameters are not those of this onbeat's nnls method; they differ in {unlike}: run "
            "`onbeat profile MODEL` again"
        )
    return parameters


def fit_nnls(matrix: NDArray[np.float64], seconds: NDArray[np.float64]) -> dict[str, float]:
    """Return the coefficients, seconds a unit, that minimise the squared relative error.

    Parameters
    ----------
    matrix : rows of `shape_matrix`. [N, F]
    seconds : measured, positive. [N]

    Returns
    -------
    By feature, and `fixed`; `lowest` bounds the prediction from below where all of a batch's terms are 0.
    """
    nnls = require("scipy.optimize", extra="plan", purpose="fitting step times").nnls
    features = _features(matrix)
    # Columns of like size: the solver's tolerance is absolute, and pairs are a million times the sequences.
    scale = features.max(axis=0)
    scale[scale == 0] = 1.0
    relative = features / scale / seconds[:, None]
    coefficients, _ = nnls(relative, np.ones(len(matrix)))
    values = coefficients / scale
    fitted = dict(zip(_NAMES, (float(value) for value in values), strict=True))
    return {**fitted, _LOWEST: _LOWEST_SHARE * float(seconds.min())}


def nnls_seconds(matrix: NDArray[np.float64], parameters: Mapping[str, float]) -> NDArray[np.float64]:
    """Return seconds for the rows of a shape matrix, [N]."""
    coefficients = np.array([parameters[name] for name in _NAMES])
    total: NDArray[np.float64] = _features(matrix) @ coefficients
    return np.maximum(total, parameters[_LOWEST])


def _features(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return one column a name of `_NAMES`."""
    return np.column_stack(
        [np.ones(len(matrix)), matrix[:, _COLUMNS], draft_pairs_of(matrix), matrix[:, _COUNTS] > 0]
    )


def nnls_closure(parameters: Mapping[str, float]) -> Callable[[BatchShape], float]:
    """Return the prediction for one batch, in plain floats."""
    fixed, lowest = parameters[_FIXED], parameters[_LOWEST]
    new, sequences, chunks, pairs, cached, context, lm_head, verify, draft = (
        parameters[name] for name in FEATURES
    )
    draft_pair = parameters[PAIRS]
    decode_pass, chunk_pass, draft_pass = (parameters[name] for name in PASSES)

    def seconds(shape: BatchShape) -> float:
        total = (
            fixed
            + new * shape.num_new_tokens
            + sequences * shape.num_sequences
            + chunks * shape.num_chunks
            + pairs * shape.query_key_pairs
            + cached * shape.chunk_cached_tokens
            + context * shape.decode_context_tokens
            + lm_head * shape.num_lm_head_rows
        )
        if shape.num_decodes:
            total += decode_pass
        if shape.num_chunks:
            total += chunk_pass
        if drafts := shape.num_draft_tokens:
            total += draft_pass + verify * shape.num_verify_rows
            total += draft * drafts + draft_pair * draft_pairs(shape)
        return total if total > lowest else lowest

    return seconds
