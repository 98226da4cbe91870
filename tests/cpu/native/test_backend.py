"""Which backend is taken, what is said of it, and what is refused."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from onbeat.core.errors import ConfigError
from onbeat.core.options import change
from onbeat.core.request import Request, SamplingParams
from onbeat.engine.backends.base import CheckpointBackend
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.memory import Footprint
from onbeat.engine.native.library import VARIABLE, NativeLibrary
from onbeat.engine.start import ModelLoader, build_engine, prepare
from onbeat.hub.resolve import resolve_model
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.cpu.engine.tiny_config import tiny_config
from tests.cpu.native.test_forward import first_logits, relative_error
from tests.cpu.weights import tiny_models as gguf_models


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(
        write_tiny_directory(tmp_path_factory.mktemp("model") / "tiny"),
        policy="sarathi",
        step_time_profile="none",
        max_model_len=256,
    )


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "libonbeat_native.so"))


@pytest.fixture(autouse=True)
def threads_of_torch() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def needs(config: EngineConfig) -> Footprint:
    backend = prepare(config).backend
    assert isinstance(backend, CheckpointBackend)
    return backend.needs(16)


def start_sentence(loader: ModelLoader) -> str:
    said: list[str] = []
    loader.load(said.append)
    return said[0]


def test_native_is_taken_where_it_can_run(native_library: NativeLibrary, config: EngineConfig) -> None:
    loader = prepare(config)
    sets = native_library.instruction_sets
    said: list[str] = []
    assert loader.load(said.append).runner.forward.settings["instruction_set"] == sets[0]
    assert said[0].endswith("(fp32 weights)")
    assert said[1].startswith(f"instruction set {sets[0]}, ")
    quantized = prepare(change(config, quantization="int8", dtype="bfloat16"))
    assert start_sentence(quantized).endswith("(int8 weights)")
    loaded = quantized.load(lambda _: None)
    assert (loaded.backend.weights_format, loaded.backend.embedding_format) == ("int8", "int8")


def test_torch_is_taken_where_it_is_asked_for(config: EngineConfig) -> None:
    loader = prepare(change(config, backend="torch"))
    assert start_sentence(loader).endswith("torch (as asked for)")
    assert loader.load(lambda _: None).runner.forward.settings["backend"] == "torch"


def test_torch_serves_what_the_native_engine_cannot_and_says_why(
    config: EngineConfig, no_library: None
) -> None:
    sentence = start_sentence(prepare(config))
    assert "by torch" in sentence
    assert "libonbeat_native.so" in sentence
    sentence = start_sentence(prepare(change(config, dtype="float64")))
    assert "by torch" in sentence
    assert sentence.endswith("float64)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "native"}, "the native engine cannot run: its library .* leave --backend out"),
        ({"backend": "native", "dtype": "float64"}, "float64; leave --backend"),
        ({"quantization": "int8"}, r"int8 .* --quantization"),
        ({"quantization": "int8", "backend": "torch"}, r"would run by torch \(as asked for\)"),
        ({"activation_quantization": "int8"}, r".*leave --activation-quantization"),
        ({"instruction_set": "avx2", "backend": "torch"}, r"set avx2 needs .* by torch \(as asked for\)"),
        ({"instruction_set": "avx2"}, r"\(not .* .* --instruction-set"),
    ],
)
def test_what_cannot_be_had_is_refused(
    config: EngineConfig, no_library: None, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(change(config, **changes))


def test_an_instruction_set_that_is_asked_for_computes(
    native_library: NativeLibrary, config: EngineConfig
) -> None:
    loader = prepare(change(config, instruction_set="portable"))
    said: list[str] = []
    loader.load(said.append)
    assert said[0].endswith("portable, fp32 weights)")
    assert not any(line.startswith("instruction set") for line in said)
    assert loader.load(lambda _: None).runner.forward.settings["instruction_set"] == "portable"


def test_an_instruction_set_of_other_processors_is_refused_with_those_of_this_one(
    native_library: NativeLibrary, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = copy(native_library)
    library.instruction_sets = ("avx2", "portable")
    monkeypatch.setattr("onbeat.engine.backends.table.load_library", lambda: library)
    with pytest.raises(ConfigError, match=r"amx.* avx2, portable"):
        prepare(change(config, instruction_set="amx"))


def test_what_the_system_withholds_is_said(
    native_library: NativeLibrary, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = copy(native_library)
    library.instruction_sets = ("portable",)
    library.withheld = "amx (arch_prctl: Operation not permitted)"
    monkeypatch.setattr("onbeat.engine.backends.table.load_library", lambda: library)
    said: list[str] = []
    prepare(config).load(said.append)
    assert "amx (arch_prctl: " in said[1]
    assert "portable" in said[2]
    with pytest.raises(ConfigError, match=r"withheld: amx "):
        prepare(change(config, instruction_set="amx"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "jax"),
        ("quantization", "int3"),
        ("activation_quantization", "w8a8"),
        ("instruction_set", "sse"),
    ],
)
def test_unknown_choices_are_named(config: EngineConfig, field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} '{value}'; .* auto"):
        change(config, **{field: value})


def test_activations_in_8_bits_are_for_quantized_weights(
    native_library: NativeLibrary, config: EngineConfig
) -> None:
    asked_for = change(config, activation_quantization="int8")
    with pytest.raises(ConfigError, match="--quantization int8"):
        prepare(asked_for)
    prepare(change(asked_for, quantization="int8"))


def test_activations_are_quantized_unless_told_otherwise(
    native_library: NativeLibrary, config: EngineConfig
) -> None:
    logits = []
    for way in ("auto", "none"):
        changed = change(config, quantization="int8", activation_quantization=way)
        forward = prepare(changed).load(lambda _: None).runner.forward
        logits.append(first_logits(lambda forward=forward, **_: forward, lengths=(9,)))
    assert 1e-4 < relative_error(*logits) < 0.05


def test_quantized_weights_leave_more_memory(native_library: NativeLibrary, config: EngineConfig) -> None:
    plain, int8, int4 = (
        needs(change(config, quantization=quantization)).weight_bytes
        for quantization in ("none", "int8", "int4")
    )
    assert int8 < 0.4 * plain
    assert int4 < int8
    loader = prepare(change(config, quantization="int4", load_format="dummy"))
    assert start_sentence(loader).endswith("(int4 weights)")
    assert loader.backend.embedding_format == "int8"


def test_narrow_heads_are_counted_with_their_padding(
    native_library: NativeLibrary, config: EngineConfig
) -> None:
    """The model's heads are 8 wide."""
    native, on_torch = (needs(change(config, backend=backend)).block_bytes for backend in ("native", "torch"))
    assert native == 2 * on_torch


def test_both_backends_generate_the_same(native_library: NativeLibrary, config: EngineConfig) -> None:
    tokens = []
    for backend in ("native", "torch"):
        core, _ = build_engine(change(config, backend=backend), lambda _: None)
        core.add(
            Request(
                request_id="r",
                prompt_token_ids=tuple(range(40)),
                sampling=SamplingParams(temperature=0.0, max_tokens=12),
            )
        )
        found: list[int] = []
        while core.has_work:
            message = core.step()
            for output in message.outputs if message else ():
                found += output.new_token_ids
        core.shutdown()
        tokens.append(found)
    assert tokens[0] == tokens[1]


@pytest.mark.usefixtures("native_library")
def test_the_start_says_which_types_are_rounded(config: EngineConfig, tmp_path: Path) -> None:
    model = gguf_models.tiny_model("llama")
    half, eight = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0
    names = [gguf_models.to_gguf(name, value.numpy(), model.config)[0] for name, value in
             gguf_models.parameters(model).items() if value.dim() == 2]  # fmt: skip
    kinds = {name: half if "attn_q" in name else eight for name in names}
    gguf_models.write_gguf(tmp_path / "model.gguf", model, kinds)
    files = resolve_model(str(tmp_path / "model.gguf"))

    def lines(**changes: Any) -> list[str]:
        said: list[str] = []
        prepare(change(config, model=files, load_format="auto", **changes)).load(said.append)
        return [line for line in said if line.startswith("weights of type")]

    (native,) = lines(dtype="bfloat16")
    assert " type F16 " in native  # Q8_0 stays
    (torch_line,) = lines(dtype="bfloat16", backend="torch")
    assert "F16, F32, Q8_0" in torch_line
    assert lines() == lines(backend="torch") == []
