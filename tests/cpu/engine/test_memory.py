"""What a model needs beside what there is."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from onbeat.core.errors import ConfigError
from onbeat.engine.backends import base
from onbeat.engine.backends.native import NativeBackend
from onbeat.engine.container import FreeMemory
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.memory import Footprint, KVCacheSpec, most_tokens, short_memory_in_words
from onbeat.engine.model_config.architecture import KVHeads
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.native.library import NativeLibrary, load_library
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.hub.files import ModelFiles
from onbeat.perfmodel.model_spec import packaged_configs
from onbeat.scheduler.replica.token_budget import settle
from onbeat.scheduler.scheduler_config import SchedulerConfig, SchedulerLimits

MIB = 2**20
SPEC = KVCacheSpec(heads=(KVHeads(4, 64),) * 4, dtype=FLOAT32, block_size=16)
FOOTPRINT = Footprint(
    kv_cache=SPEC,
    draft_block_bytes=0,
    weight_bytes=100 * MIB,
    load_bytes=20 * MIB,
    token_bytes=MIB // 4,
    row_bytes=MIB // 8,
)


def free(num_mib: int) -> FreeMemory:
    return FreeMemory(num_mib * MIB, "the sandbox")


def test_weights_need_room_to_be_loaded() -> None:
    FOOTPRINT.check_weights(free(300))
    with pytest.raises(ConfigError, match=r"100.*MiB.*120"):
        FOOTPRINT.check_weights(free(120))


def test_weights_that_do_not_fit_name_the_flag_with_which_they_would() -> None:
    savings = [("--quantization int8", 10 * MIB), ("--quantization int4", 50 * MIB)]
    with pytest.raises(ConfigError, match="with --quantization int4 they take 50 MiB, which fits"):
        FOOTPRINT.check_weights(free(220), savings=savings)
    with pytest.raises(
        ConfigError, match=r"even with --quantization int4 they take 50 MiB: .*--backend vllm"
    ):
        FOOTPRINT.check_weights(free(180), savings=savings)


IN_TRANSFORMERS = {
    "Qwen3-Next-80B-A3B": transformers.Qwen3NextConfig,
    "Phi-3.5-MoE": transformers.PhimoeConfig,
}
"""Classes whose defaults are the sizes of a model."""


@pytest.mark.parametrize(
    ("name", "architecture", "form", "published", "says"),
    [
        ("gpt-oss-20b", "GptOssForCausalLM", "MXFP4", 13.4, None),
        ("gpt-oss-120b", "GptOssForCausalLM", "MXFP4", 64.0, "even with .*int4 .*--backend vllm"),
        ("Mistral-Small-24B-Base-2501", "MistralForCausalLM", None, 43.9, "with .*int4 .* 14.3 GiB"),
        ("Qwen3-30B-A3B", "Qwen3MoeForCausalLM", None, 56.9, "with .*int4 .* 18.0 GiB, which"),
        ("Qwen3.6-35B-A3B", "Qwen3_5MoeForCausalLM", None, 64.6, "with .*int4 .* 20.6 GiB, which"),
        ("Qwen3-Next-80B-A3B", "Qwen3NextForCausalLM", None, 148.4, "even with .*int4 .* 46.7 GiB"),
        ("Phi-3.5-MoE", "PhiMoEForCausalLM", None, 78.0, "even with .*int4 .* 24.5 GiB"),
        ("gemma-4-26B-A4B", "Gemma4ForCausalLM", None, 47.0, "with .*int4 .* 15.0 GiB, which"),
        ("gemma-4-31B", "Gemma4ForCausalLM", None, 57.4, "with .*int4 .* 18.5 GiB, which"),
        ("Qwen3-32B", "Qwen3ForCausalLM", None, 61.0, "with .*int4 .* 19.7 GiB, which"),
    ],
)
def test_large_models_in_24_gib(
    name: str, architecture: str, form: str | None, published: float, says: str | None, tmp_path: Path
) -> None:
    """Each fits as published, or the refusal names what would; 22.5 GiB are left."""
    known = IN_TRANSFORMERS[name]().to_dict() if name in IN_TRANSFORMERS else packaged_configs()[name]
    model = model_config_from_hf({**known, "architectures": [architecture]}, served_len=4096)
    library = load_library()
    assert isinstance(library, NativeLibrary)
    files = ModelFiles(kind="hf", path=tmp_path, name=name)
    backend = NativeBackend(
        library,
        DummyCheckpoint(model, form=form),
        DeviceConfig(CPU, BFLOAT16, 2),
        EngineConfig(model=files, load_format="dummy"),
    )
    footprint = backend.needs(16)
    assert footprint.weight_bytes / 2**30 == pytest.approx(published, abs=0.06)
    memory = FreeMemory(int(22.5 * 2**30), "the sandbox")
    if says is None:
        footprint.check_weights(memory, savings=backend.savings())
        return
    with pytest.raises(ConfigError, match=says):
        footprint.check_weights(memory, savings=backend.savings())


@pytest.mark.parametrize(
    ("name", "architecture", "usual", "asked", "fits"),
    [
        ("gemma-3-27b-pt", "Gemma3ForCausalLM", 19_488, 131_072, False),
        ("gemma-4-26B-A4B", "Gemma4ForCausalLM", 67_648, 131_072, True),
        ("gemma-4-31B", "Gemma4ForCausalLM", 19_520, 32_768, False),
        ("Qwen3-32B", "Qwen3ForCausalLM", 4096, 32_768, False),
    ],
)
def test_a_large_model_serves_the_usual_length_by_default(
    name: str,
    architecture: str,
    usual: int,
    asked: int,
    fits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a quarter of what the weights leave would not hold it, nor all of it beside the largest steps.

    Windows hold the tokens of a step, too, and leave more with small ones. What is asked for is refused only
    where smaller steps do not help.
    """
    monkeypatch.setattr(base, "free_for", lambda *_: FreeMemory(int(22.5 * 2**30), "the sandbox"))
    model = model_config_from_hf({**packaged_configs()[name], "architectures": [architecture]})
    library = load_library()
    assert isinstance(library, NativeLibrary)
    config = EngineConfig(
        model=ModelFiles(kind="hf", path=tmp_path, name=name),
        limits=SchedulerLimits(max_num_seqs=32),
        quantization="int4",
    )
    backend = NativeBackend(library, DummyCheckpoint(model), DeviceConfig(CPU, BFLOAT16, 2), config)
    limits = backend.bounded(config)

    def fitted(limits: SchedulerLimits) -> SchedulerConfig:
        is_open = replace(limits, max_num_batched_tokens=None)
        settled = partial(
            settle, is_open, model_len=model.max_position_embeddings, most_tokens=most_tokens(limits)
        )
        return backend.fit(
            replace(config, limits=limits), lambda num, **more: settled(num_blocks=num, **more)
        )

    assert 0 <= fitted(limits).max_model_len - usual <= 64
    longer = replace(config, limits=replace(config.limits, max_model_len=asked))
    with nullcontext() if fits else pytest.raises(ConfigError, match=str(asked)):
        assert fitted(backend.bounded(longer)).max_model_len == asked


def test_what_is_too_much_names_need_limit_and_what_fits() -> None:
    def check(num_blocks: int) -> None:
        FOOTPRINT.check_fits(free(1024), num_blocks=num_blocks, num_tokens=1024, num_rows=32)

    with pytest.raises(ConfigError) as caught:
        check(40_000)
    message = str(caught.value)
    assert re.search(r"4\.9 GiB .*\(100 MiB\).* 5\.2 GiB.* 1\.0 GiB", message)
    found = re.search(r"--kv-cache-memory-bytes (\d+)M, with a --max-model-len of at most (\d+)$", message)
    assert found is not None
    check(FOOTPRINT.num_blocks_in(int(found[1]) * MIB))
    assert 0 <= int(found[2]) - FOOTPRINT.num_blocks_in(int(found[1]) * MIB) * 16 <= 32


def test_large_steps_may_leave_no_room_at_all() -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        FOOTPRINT.check_fits(free(400), num_blocks=512, num_tokens=8192, num_rows=32)
    FOOTPRINT.check_fits(free(400), num_blocks=16, num_tokens=8192, num_rows=32)  # no step is that large


def test_memory_that_runs_out_is_said_in_words() -> None:
    with pytest.raises(ConfigError, match="memory ran out"), _in_words():
        torch.empty(2**50)
    with (
        pytest.raises(ConfigError, match="--kv-cache-memory-bytes"),
        _in_words(),
    ):
        raise MemoryError
    with pytest.raises(RuntimeError, match="something else"), _in_words():
        raise RuntimeError("something else")


def _in_words():
    return short_memory_in_words(CPU)


def test_shares_say_how_many_would_fit() -> None:
    share = FreeMemory(256 * MIB, "this machine, shared by 4 replicas,", 4)
    with pytest.raises(ConfigError, match=r"4.*256.*MiB.*2"):
        FOOTPRINT.check_fits(share, num_blocks=128, num_tokens=1024, num_rows=32)
    with pytest.raises(ConfigError, match=r"4.*1.*--replicas"):
        FOOTPRINT.check_weights(FreeMemory(90 * MIB, "this machine, shared by 4 replicas,", 4))
