"""Early exit: the first layers of a model and its LM head, as a draft model of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.fitted import FittedModel
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.nnls import scale_layers
from onbeat.perfmodel.precision import Precision


def early_exit_spec(model: ModelSpec, num_layers: int) -> ModelSpec:
    """Return a model of the first layers, with the same embedding and LM head.

    Layers with experts and with windows are taken to be spread evenly.

    Raises
    ------
    ConfigError : no layers, or not fewer than the model has.
    """
    if not 1 <= num_layers < model.num_layers:
        raise ConfigError(
            f"an early exit after {num_layers} layers: {model.name} has {model.num_layers}; choose from 1 to "
            f"{model.num_layers - 1}"
        )
    share = num_layers / model.num_layers
    return replace(
        model,
        name=f"{model.name}, {num_layers} of {model.num_layers} layers",
        num_layers=num_layers,
        num_moe_layers=round(model.num_moe_layers * share),
        num_sliding_layers=round(model.num_sliding_layers * share),
    )


def early_exit_fit(
    fitted: FittedModel, model: ModelSpec, num_layers: int, precision: Precision
) -> FittedModel:
    """Return what was fitted to a whole model as the fit of its first layers.

    The roofline's parameters hold for any number of layers. Of a linear fit, all but the LM head shrinks with
    the layers, and the fixed time as the weights that a step reads.
    """
    if fitted.method != "nnls":
        return fitted
    exit_model = early_exit_spec(model, num_layers)
    parameters: Mapping[str, float] = scale_layers(
        fitted.parameters,
        layers=num_layers / model.num_layers,
        fixed=_read_by_a_step(exit_model, precision) / _read_by_a_step(model, precision),
    )
    return replace(fitted, parameters=parameters)


def _read_by_a_step(model: ModelSpec, precision: Precision) -> float:
    """Return the bytes of all layers and of the LM head."""
    return (
        model.layer_parameters * precision.weight_bytes
        + model.embedding_parameters * precision.embedding_bytes
    )
