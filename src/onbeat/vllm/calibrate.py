"""Where step times inside vLLM come from: a profile, or a guess that the first steps correct."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.fitted import MIN_DISTINCT_SHAPES
from onbeat.perfmodel.nnls import NNLSForm
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.profile import MeasuredStep
from onbeat.perfmodel.profile_file import read_profile
from onbeat.perfmodel.residual import ResidualModel
from onbeat.perfmodel.shape_range import ShapeRange
from onbeat.perfmodel.shapes import shape_matrix
from onbeat.vllm.plugin_config import PluginConfig

logger = logging.getLogger("onbeat.vllm")

_GUESSED_SPREAD = 0.1
"""Standard deviation of the log of measured / predicted, before anything was measured."""


def step_times(config: PluginConfig) -> Predictor:
    """Return what predicts steps, and learns from each one.

    Raises
    ------
    ConfigError : the profile cannot be read or has too few steps, or a calibration is asked for.
    """
    if config.calibrate == "always":
        raise ConfigError(
            "calibrate is 'always', but steps are not yet measured at the start inside vLLM; leave it out "
            "and name a profile (`onbeat profile --from` makes one of a running server's steps)"
        )
    if config.profile is None:
        logger.warning(
            "step times: guessed, and corrected by the first steps that run. Objectives may be missed until "
            "then; `onbeat profile --from` makes a profile, which additional_config's onbeat.profile names"
        )
        return Predictor(guessed_seconds, ResidualModel.log_normal(_GUESSED_SPREAD)).with_learning()
    logger.info("step times: from the profile %s, corrected by the steps that run", config.profile)
    return fitted_to(read_profile(config.profile).steps, config.profile)


def fitted_to(steps: Sequence[MeasuredStep], path: Path) -> Predictor:
    """Return a model of measured steps that needs to know neither model nor device.

    Raises
    ------
    ConfigError : too few steps that differ.
    """
    shapes = [step.shape for step in steps]
    matrix, seconds = shape_matrix(shapes), np.array([step.seconds for step in steps])
    if not steps or len(np.unique(matrix, axis=0)) < MIN_DISTINCT_SHAPES:
        raise ConfigError(
            f"the profile {path} has fewer than {MIN_DISTINCT_SHAPES} steps that differ; measure more of them"
        )
    form = NNLSForm()
    parameters = form.fit(matrix, seconds)
    ratios = (seconds / form.predict(matrix, parameters)).tolist()
    return Predictor(form.closure(parameters), ResidualModel(ratios), ShapeRange.of(shapes)).with_learning()


def guessed_seconds(shape: BatchShape) -> float:
    """Return the step time of no machine in particular: `OnlineCorrection` finds the pace of the real one."""
    pairs = shape.query_key_pairs + shape.decode_context_tokens
    return 0.01 + 1e-4 * shape.num_new_tokens + 1e-8 * pairs
