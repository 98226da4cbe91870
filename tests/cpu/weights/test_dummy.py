from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from onbeat.core.errors import ModelLoadError
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.engine.weights.parameters import parameter_shapes
from onbeat.engine.weights.quantized import Settings, decoded
from tests.cpu.weights.tiny_models import FAMILIES, parameters, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_has_the_parameters_of_the_real_model(family: str) -> None:
    model = tiny_model(family)
    config = model_config_from_hf(model.config.to_dict())
    shapes = parameter_shapes(config)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in parameters(model).items()}
    checkpoint = DummyCheckpoint(config, seed=1)
    for name in checkpoint.names():
        values = checkpoint.get(name, FLOAT32)
        assert values.shape == shapes[name]
        assert np.isfinite(values).all()
        assert values.std() > 0


def test_same_seed_same_weights_in_any_order() -> None:
    config = model_config_from_hf(FAMILIES["llama"]().to_dict())
    first, second, other = (DummyCheckpoint(config, seed=seed) for seed in (3, 3, 4))
    names = list(first.names())
    weights = {name: first.get(name, FLOAT32) for name in names}
    for name in reversed(names):
        assert np.array_equal(second.get(name, FLOAT32), weights[name])
        assert not np.array_equal(other.get(name, FLOAT32), weights[name])
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    assert not np.array_equal(weights[q], weights[k])


def test_making_a_large_parameter_takes_little_more_than_its_size() -> None:
    config = model_config_from_hf(FAMILIES["llama"]().to_dict())
    name = "model.embed_tokens.weight"
    checkpoint = DummyCheckpoint(replace(config, vocab_size=1 << 16))
    tracemalloc.start()
    values = checkpoint.get(name, BFLOAT16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * values.nbytes
    np.testing.assert_array_equal(values, checkpoint.get(name, FLOAT32).astype(BFLOAT16))


def test_activations_keep_their_size() -> None:
    checkpoint = DummyCheckpoint(model_config_from_hf(FAMILIES["gemma3"]().to_dict()))
    down = checkpoint.get("model.layers.0.mlp.down_proj.weight", FLOAT32)
    assert abs(down.mean()) < 0.01 / np.sqrt(128)
    assert down.std() == pytest.approx(1 / np.sqrt(128), rel=0.02)
    norm = checkpoint.get("model.norm.weight", FLOAT32)
    assert np.abs(norm).max() < 0.1  # Gemma multiplies by one more


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        (Settings(quant_method="awq"), "Q4_1"),
        (Settings(quant_method="gptq", bits=8), "Q8_0"),
        (Settings(quant_method="modelopt", quant_algo="NVFP4"), "E2M1_16"),
        (Settings(quant_method="mxfp4"), "MXFP4"),
    ],
)
def test_layers_of_a_quantized_model_are_blocks(settings: Settings, form: str) -> None:
    config = model_config_from_hf(FAMILIES["mixtral"]().to_dict())
    assert settings.usual_form == form
    checkpoint = DummyCheckpoint(config, form=form)
    for name, shape in parameter_shapes(config).items():
        rows = checkpoint.quantized_rows(name)
        quantizes = "_proj." in name and (form != "MXFP4" or ".experts." in name)
        assert (rows is not None) == quantizes, name
        if rows is None:
            continue
        assert rows.type_name == form
        values = checkpoint.get(name, FLOAT32)
        np.testing.assert_array_equal(values, decoded(form, rows.read(slice(None))).reshape(shape))
        # a power of two may be 1.41 times too large or too small
        assert values.std() == pytest.approx(shape[1] ** -0.5, rel=0.42 if form == "MXFP4" else 0.05)


def test_layers_in_fp8_are_plain_numbers() -> None:
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}
    assert Settings(quant_method="compressed-tensors", config_groups=groups).usual_form is None
    assert Settings(quant_method="fp8").usual_form is None


def test_unknown_name() -> None:
    config = model_config_from_hf(FAMILIES["llama"]().to_dict())
    with pytest.raises(ModelLoadError, match="no parameter 'lm_tail'"):
        DummyCheckpoint(config).get("lm_tail", FLOAT32)
