"""A step-time model fitted to measured steps, with its error on steps that the fit has not seen.

The roofline is calibrated in its few parameters, by damped Gauss-Newton on the log of predicted / measured.
A weak prior keeps a parameter at its default where nothing was measured that depends on it. `fit_stream`
fits the steps of a running engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.extras import require
from onbeat.core.step import BatchShape
from onbeat.perfmodel.roofline import (
    ModelOnDevices,
    RooflineParameters,
    default_parameters,
    make_roofline,
    roofline_seconds,
)
from onbeat.perfmodel.shapes import (
    FIELDS,
    MeasuredStep,
    ShapeRange,
    draft_pairs,
    draft_pairs_of,
    shape_matrix,
)
from onbeat.typed import Count, NotNegative, Positive

KINDS = ("decode", "prompt", "mixed")
_NUM_BLOCKS = 50
_HELD_BACK_EVERY = 5
_MOST_OF_A_KIND = 800
"""Steps of a kind that are fitted: further ones would say the same, and take minutes."""
_EXCEPTION = 3.0
"""What takes so many times longer or shorter than usual was something else, too: another program."""


@dataclass(frozen=True, slots=True)
class KindErrors:
    """How far predictions of one kind of step are off."""

    kind: str
    num_steps: int
    p50: float
    """Of the absolute relative errors, as are the next."""
    p90: float
    bias: float
    """Relative error of all predicted times together: above 0, steps are predicted too long."""


@dataclass(frozen=True, slots=True)
class StreamFit:
    """What a fit to recorded steps found."""

    fitted: FittedModel
    steps: Sequence[MeasuredStep]
    """That it was fitted to, and those that it was tested on."""
    errors: Sequence[KindErrors]
    """On steps that were held back."""
    num_exceptions: int
    """Steps that were left out of the fit, since they took far longer or shorter than others like them."""


def fit_stream(target: FitTarget, steps: Sequence[MeasuredStep]) -> StreamFit:
    """Fit a step-time model to the steps of a running engine.

    Every fifth of 50 stretches of the recording is held back: steps that follow one another are alike, so
    single ones would not test much.

    Raises
    ------
    ConfigError : too few steps that differ.
    """
    block = max(1, len(steps) // _NUM_BLOCKS)
    is_held = [index // block % _HELD_BACK_EVERY == _HELD_BACK_EVERY // 2 for index in range(len(steps))]
    held_back = [step for step, is_out in zip(steps, is_held, strict=True) if is_out]
    to_fit = _thinned([step for step, is_out in zip(steps, is_held, strict=True) if not is_out])
    if len({_key(step.shape) for step in to_fit}) < MIN_DISTINCT_SHAPES or not held_back:
        raise ConfigError(
            f"the recording has {len(steps)} steps, too few that differ for a fit; record some minutes of "
            "traffic with prompts and answers of several lengths"
        )
    first = fit_best(target, to_fit)
    ratios = np.array([step.seconds for step in to_fit]) / target.predict(first, to_fit)
    usual = [step for step, ratio in zip(to_fit, ratios, strict=True) if 1 / _EXCEPTION < ratio < _EXCEPTION]
    num_exceptions = len(to_fit) - len(usual)
    if num_exceptions:
        first = fit_best(target, usual)
    measured = np.array([step.seconds for step in held_back])
    predicted = target.predict(first, held_back)
    fitted = replace(
        first,
        errors=FitErrors.of(predicted, measured),
        ratios=tuple(sorted(float(ratio) for ratio in measured / predicted)),
        shape_range=ShapeRange.of([step.shape for step in usual]),
    )
    kept = _thinned(held_back)
    return StreamFit(fitted, (*usual, *kept), errors_by_kind(held_back, predicted.tolist()), num_exceptions)


def errors_by_kind(steps: Sequence[MeasuredStep], predicted: Sequence[float]) -> list[KindErrors]:
    """Compare predictions with measurements, one to one, by kind of step and all together."""
    found = []
    measured, told = np.array([step.seconds for step in steps]), np.array(predicted)
    kinds = np.array([kind_of(step.shape) for step in steps])
    for kind in (*KINDS, "all"):
        of_kind = kinds == kind if kind != "all" else np.ones(len(steps), dtype=bool)
        if not of_kind.any():
            continue
        errors = FitErrors.of(told[of_kind], measured[of_kind])
        bias = float(told[of_kind].sum() / measured[of_kind].sum() - 1)
        found.append(KindErrors(kind, errors.num_points, errors.p50, errors.p90, bias))
    return found


def kind_of(shape: BatchShape) -> str:
    """Return which of `KINDS` a step is."""
    if not shape.num_chunks:
        return "decode"
    return "mixed" if shape.num_decodes else "prompt"


def _thinned(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return at most so many steps of each kind, evenly over the recording."""
    kept = []
    for kind in KINDS:
        of_kind = [step for step in steps if kind_of(step.shape) == kind]
        stride = max(1.0, len(of_kind) / _MOST_OF_A_KIND)
        kept += [of_kind[int(index * stride)] for index in range(min(len(of_kind), _MOST_OF_A_KIND))]
    return kept


def _key(shape: BatchShape) -> tuple[int, ...]:
    return (shape.num_new_tokens, shape.num_decodes, shape.query_key_pairs, shape.decode_context_tokens)


@dataclass(frozen=True, slots=True)
class FitErrors:
    """Absolute relative errors, as fractions of the measured time."""

    mean: NotNegative
    p50: NotNegative
    p90: NotNegative
    p95: NotNegative
    num_points: Count

    @classmethod
    def of(cls, predicted: ArrayLike, measured: ArrayLike) -> FitErrors:
        """Compare predictions with measurements, one to one; at least one."""
        errors = np.abs(np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float) - 1)
        p50, p90, p95 = (float(value) for value in np.percentile(errors, (50, 90, 95)))
        return cls(mean=float(errors.mean()), p50=p50, p90=p90, p95=p95, num_points=int(errors.size))

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.1%}, p50 {self.p50:.1%}, p90 {self.p90:.1%}, p95 {self.p95:.1%} "
            f"on {self.num_points} held-back points"
        )


FEATURES = (
    *("num_new_tokens", "num_sequences", "num_chunks", "query_key_pairs", "chunk_cached_tokens"),
    *("decode_context_tokens", "num_lm_head_rows", "num_verify_rows", "num_draft_tokens"),
)
"""The sums that count, beside a fixed time."""
PAIRS = "draft_pairs"
"""What a row that verifies drafts computes beyond a plain decode: see `shapes.draft_pairs`."""
PASSES = ("has_decodes", "has_chunks", "has_drafts")
"""Whether there are any: attention over decodes, chunks and rows with drafts starts anew for each."""

_COLUMNS = [FIELDS.index(name) for name in FEATURES]
_COUNTS = [FIELDS.index(name) for name in ("num_decodes", "num_chunks", "num_draft_tokens")]
_FIXED, _LOWEST = "fixed", "lowest"
_NAMES = (_FIXED, *FEATURES, PAIRS, *PASSES)
_LOWEST_SHARE = 0.5
"""Of the shortest step that was measured: no prediction of a fit is shorter."""
_OF_DRAFTS = frozenset(("num_draft_tokens", PAIRS, "has_drafts"))
"""What fits of before there were drafts lack: to them a draft is a new token and a row of the LM head."""


class NNLSForm:
    """A sum of terms that are linear in a batch's sums, each with a coefficient of at least 0."""

    def fit(self, matrix: NDArray[np.float64], seconds: NDArray[np.float64]) -> dict[str, float]:
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
        # Columns of like size: the solver's tolerance is absolute, and pairs are a million times sequences.
        scale = features.max(axis=0)
        scale[scale == 0] = 1.0
        relative = features / scale / seconds[:, None]
        coefficients, _ = nnls(relative, np.ones(len(matrix)))
        values = coefficients / scale
        fitted = dict(zip(_NAMES, (float(value) for value in values), strict=True))
        return {**fitted, _LOWEST: _LOWEST_SHARE * float(seconds.min())}

    def predict(self, matrix: NDArray[np.float64], parameters: Mapping[str, float]) -> NDArray[np.float64]:
        """Return seconds for the rows of a shape matrix, [N]."""
        parameters = _checked(parameters)
        coefficients = np.array([parameters[name] for name in _NAMES])
        total: NDArray[np.float64] = _features(matrix) @ coefficients
        return np.maximum(total, parameters[_LOWEST])

    def closure(self, parameters: Mapping[str, float]) -> Callable[[BatchShape], float]:
        """Return the prediction for one batch, in plain floats."""
        parameters = _checked(parameters)
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


def _checked(parameters: Mapping[str, float]) -> Mapping[str, float]:
    known = {*_NAMES, _LOWEST}
    if known - parameters.keys() == _OF_DRAFTS:
        parameters = {**dict.fromkeys(_OF_DRAFTS, 0.0), **parameters}
    _check_names(parameters, known, "nnls method")
    return parameters


def _check_names(parameters: Mapping[str, float], known: set[str], whose: str) -> None:
    if parameters.keys() != known:
        unlike = ", ".join(sorted(parameters.keys() ^ known))
        raise ConfigError(
            f"the fitted parameters are not those of this onbeat's {whose}; they differ in {unlike}: run "
            "`onbeat profile MODEL` again"
        )


def _features(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return one column a name of `_NAMES`."""
    return np.column_stack(
        [np.ones(len(matrix)), matrix[:, _COLUMNS], draft_pairs_of(matrix), matrix[:, _COUNTS] > 0]
    )


PRIOR_WEIGHT = 0.05
"""Cost of a parameter at e times its default, as a relative error of one measured step."""

OUTLIER = 0.1
"""Relative error from which on a step is rather an exception than evidence."""

_LOG_LIMIT = float(np.log(30.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTarget(ModelOnDevices):
    """What is fitted."""

    def predict(self, fitted: FittedModel, steps: Sequence[MeasuredStep]) -> NDArray[np.float64]:
        """Return the predicted seconds of some steps."""
        form = make_form(fitted.method, self)
        return form.predict(shape_matrix(step.shape for step in steps), fitted.parameters)


@dataclass(frozen=True, slots=True)
class RooflineForm:
    """The roofline as `fitted.Form`."""

    target: FitTarget

    def fit(self, matrix: NDArray[np.float64], seconds: NDArray[np.float64]) -> dict[str, float]:
        """Return the calibrated fields of `RooflineParameters`."""
        least_squares = require("scipy.optimize", extra="plan", purpose="fitting step times").least_squares
        defaults = asdict(default_parameters(self.target.device, self.target.precision))
        names = list(defaults)
        start = np.array([defaults[name] for name in names])
        target = np.log(seconds)

        def residuals(log_factors: NDArray[np.float64]) -> NDArray[np.float64]:
            parameters = dict(zip(names, start * np.exp(log_factors), strict=True))
            error = np.log(self.predict(matrix, parameters)) - target
            return np.concatenate([error, PRIOR_WEIGHT * log_factors])

        # Errors beyond OUTLIER count linearly: a machine that does other work now and then stalls a step.
        found = least_squares(
            residuals, np.zeros(len(names)), bounds=(-_LOG_LIMIT, _LOG_LIMIT), loss="soft_l1", f_scale=OUTLIER
        )
        return {name: float(value) for name, value in zip(names, start * np.exp(found.x), strict=True)}

    def predict(self, matrix: NDArray[np.float64], parameters: Mapping[str, float]) -> NDArray[np.float64]:
        """Return seconds for the rows of a shape matrix."""
        return roofline_seconds(matrix, self.target, _parameters(parameters))

    def closure(self, parameters: Mapping[str, float]) -> Callable[[BatchShape], float]:
        """Return the roofline with these parameters."""
        return make_roofline(self.target, _parameters(parameters))


def _parameters(values: Mapping[str, float]) -> RooflineParameters:
    _check_names(values, {each.name for each in fields(RooflineParameters)}, "roofline")
    divisors = ("smoothness", *(name for name in values if name.endswith("efficiency")))
    if zero := [name for name in divisors if not values[name] > 0]:
        raise ConfigError(
            f"the fitted {zero[0]} is 0, so that steps never end: run `onbeat profile MODEL` again"
        )
    return RooflineParameters(**values)


FIT_METHODS = ("roofline", "nnls")
MIN_DISTINCT_SHAPES = 8
"""Fewer cannot both determine the parameters and test them."""

_NUM_FOLDS = 5


Form = RooflineForm | NNLSForm
"""A formula with free parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """What a fit found; enough to predict again without the measurements."""

    method: Annotated[str, Meta(pattern="^(roofline|nnls)$", description="one of roofline, nnls")]
    """One of `FIT_METHODS`."""
    parameters: Mapping[str, NotNegative]
    errors: FitErrors
    """On held-back points: each distinct shape is predicted once by a fit that has not seen it."""
    ratios: Annotated[tuple[Positive, ...], Meta(min_length=1)]
    """Measured / predicted of the held-back points, ascending: what quantiles are made of."""
    shape_range: ShapeRange


def fit(steps: Sequence[MeasuredStep], target: FitTarget | None, method: str) -> FittedModel:
    """Fit a step-time model to measured steps; its errors are of cross-validation.

    Parameters
    ----------
    steps : at least `MIN_DISTINCT_SHAPES` distinct batches; repeats of one are welcome.
    method : `roofline` calibrates the few parameters of the roofline; `nnls` needs no target.

    Raises
    ------
    ConfigError : too few shapes, or an unknown method.
    """
    form = make_form(method, target)
    shapes, times = [step.shape for step in steps], np.array([step.seconds for step in steps])
    matrix = shape_matrix(shapes)
    predicted = _held_back_predictions(form, matrix, times)
    return FittedModel(
        method=method,
        parameters=form.fit(matrix, times),
        errors=FitErrors.of(predicted, times),
        ratios=tuple(sorted(float(ratio) for ratio in times / predicted)),
        shape_range=ShapeRange.of(shapes),
    )


def make_form(method: str, target: FitTarget | None) -> Form:
    """Return the formula of a fit method; `nnls` needs no target.

    Raises
    ------
    ConfigError : an unknown method.
    """
    if method == "roofline" and target is not None:
        return RooflineForm(target)
    if method == "nnls":
        return NNLSForm()
    raise ConfigError(f"unknown fit method {method!r}; choose one of {', '.join(FIT_METHODS)}")


def _held_back_predictions(
    form: Form, matrix: NDArray[np.float64], times: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Predict every step by a fit to the other folds; repeats of one shape stay in one fold."""
    distinct, shape_ids = np.unique(matrix, axis=0, return_inverse=True)
    if len(distinct) < MIN_DISTINCT_SHAPES:
        raise ConfigError(
            f"{len(distinct)} distinct batches are too few for a fit; measure at least {MIN_DISTINCT_SHAPES}"
        )
    # A fixed draw: folds must not follow the order of measurement, which often sweeps one size after another.
    fold_of_shape = np.random.default_rng(0).permutation(len(distinct)) % _NUM_FOLDS
    folds = fold_of_shape[shape_ids.ravel()]
    predicted = np.empty_like(times)
    for fold in range(_NUM_FOLDS):
        held_back = folds == fold
        parameters = form.fit(matrix[~held_back], times[~held_back])
        predicted[held_back] = form.predict(matrix[held_back], parameters)
    return predicted


def fit_best(
    target: FitTarget, steps: Sequence[MeasuredStep], held_back: Sequence[MeasuredStep] = ()
) -> FittedModel:
    """Fit by every method; the least mean error in cross-validation on `steps` decides.

    Parameters
    ----------
    steps : what is fitted.
    held_back : steps that no decision has seen; where there are some, `errors` of the result is of them.

    Raises
    ------
    ConfigError : too few distinct batches.
    """
    best = min((fit(steps, target, method) for method in FIT_METHODS), key=lambda fitted: fitted.errors.mean)
    if not held_back:
        return best
    errors = FitErrors.of(target.predict(best, held_back), [step.seconds for step in held_back])
    return replace(best, errors=errors)
