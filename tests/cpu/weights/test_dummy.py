from __future__ import annotations

import pytest
import torch

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config import model_config_from_hf
from onbeat.engine.weights import DummyCheckpoint, parameter_shapes
from tests.cpu.weights.tiny_models import FAMILIES, parameters, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_has_the_parameters_of_the_real_model(family: str) -> None:
    model = tiny_model(family)
    config = model_config_from_hf(model.config.to_dict())
    shapes = parameter_shapes(config)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in parameters(model).items()}
    checkpoint = DummyCheckpoint(config, seed=1)
    for name in checkpoint.names():
        tensor = checkpoint.get(name, torch.float32)
        assert tuple(tensor.shape) == shapes[name]
        assert tensor.isfinite().all()
        assert tensor.std() > 0


def test_same_seed_same_weights_in_any_order() -> None:
    config = model_config_from_hf(FAMILIES["llama"]().to_dict())
    first, second, other = (DummyCheckpoint(config, seed=seed) for seed in (3, 3, 4))
    names = list(first.names())
    weights = {name: first.get(name, torch.float32) for name in names}
    for name in reversed(names):
        assert torch.equal(second.get(name, torch.float32), weights[name])
        assert not torch.equal(other.get(name, torch.float32), weights[name])
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(weights[q], weights[k])


def test_unknown_name() -> None:
    config = model_config_from_hf(FAMILIES["llama"]().to_dict())
    with pytest.raises(ModelLoadError, match="no parameter 'lm_tail'"):
        DummyCheckpoint(config).get("lm_tail", torch.float32)
