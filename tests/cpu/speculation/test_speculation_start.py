"""From options to drafts: what starts, what it says and takes, and what is refused before it is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onbeat import LLM, SamplingParams
from onbeat.core.errors import ConfigError
from onbeat.core.options import make
from onbeat.engine.backends.base import CheckpointBackend
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.speculation.draft_model import DraftModelProposer
from onbeat.engine.speculation.same_tokenizer import first_difference
from onbeat.engine.start import build_engine, prepare
from onbeat.hub.files import ModelFiles
from onbeat.perfmodel.speculative import SpeculativeStepTime
from onbeat.recording.reader import Recording
from onbeat.speculative_config import read_speculative_config
from onbeat.text.tokenizer import load_tokenizer
from tests.cpu.e2e.tiny_directory import write_tiny_directory

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 2**20,
    "step_time_profile": "none",
    "policy": "sarathi",
}
ADAPTIVE = {"step_time_profile": "roofline"}
"""What adaptive draft lengths need, and takes a second or two to start."""
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a smaller draft model, one with padded vocabulary, and others that do not go with it."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_directory(folder / "target", num_hidden_layers=NUM_LAYERS)
    write_tiny_directory(folder / "draft", num_hidden_layers=1)
    write_tiny_directory(folder / "padded", num_hidden_layers=1, vocab_size=320)
    write_tiny_directory(folder / "short", num_hidden_layers=1, max_position_embeddings=40)
    write_tiny_directory(folder / "larger", num_hidden_layers=NUM_LAYERS, intermediate_size=128)
    path = write_tiny_directory(folder / "other-tokenizer", num_hidden_layers=1) / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    path = write_tiny_directory(folder / "damaged", num_hidden_layers=1) / "config.json"
    path.write_text(path.read_text()[:50])
    return folder


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config_of(
    folder: Path, speculative: dict[str, Any] | None, model: str = "target", **options
) -> EngineConfig:
    return make(
        EngineConfig,
        model=ModelFiles(kind="hf", path=folder / model, name=model),
        speculative=None if speculative is None else read_speculative_config(speculative),
        **{**OPTIONS, **options},
    )


def draft_model(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder / name), "num_speculative_tokens": 3, **options}


METHODS: dict[str, Any] = {
    "ngram": lambda folder: {"method": "ngram", "num_speculative_tokens": 5, "draft_length": "fixed"},
    "draft-model": lambda folder: draft_model(folder, "draft", draft_length="fixed"),
}
PROMPTS = ["abcabcabc", "one two one two", "x"]
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.9, max_tokens=24, seed=5),
)


@pytest.mark.parametrize(
    ("speculative", "options", "message"),
    [
        ("other-tokenizer", {}, r"has another tokenizer than target: token 6\d is b'b' there and b'a' here"),
        ("larger", {}, r"has 0\.\d .* 0\.\d"),
        ("damaged", {}, r"the draft model cannot be loaded: .*config\.json: not valid JSON"),
        ("missing", {}, r"the draft model cannot be loaded: .*missing does not exist"),
        (
            {"method": "ngram", "num_speculative_tokens": 17},
            {},
            r"num_speculative_tokens is 17;",
        ),
        (
            {"method": "eagle", "model": "head"},
            {},
            "'eagle'",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(
    folder: Path, speculative: str | dict[str, Any], options: dict[str, Any], message: str
) -> None:
    if isinstance(speculative, str):
        speculative = draft_model(folder, speculative)
    with pytest.raises(ConfigError, match=message):
        prepare(config_of(folder, speculative, **options))


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("ngram", "what followed the same 2 to 5 tokens before"),
        ("grammar", "what the grammars of answers prescribe"),
    ],
)
def test_the_start_says_what_drafts(folder: Path, method: str, what: str) -> None:
    said: list[str] = []
    prepare(config_of(folder, {"method": method, "num_speculative_tokens": 5})).load(said.append)
    assert any(re.match(rf"speculative .* {what}: .* 5; no weights", line) for line in said)


def test_a_draft_models_memory_is_said_and_counted(folder: Path) -> None:
    said: list[str] = []
    plain = prepare(config_of(folder, None, backend="torch"))
    fixed = draft_model(folder, "draft", draft_length="fixed")
    drafted = prepare(config_of(folder, fixed, backend="torch"))
    # One layer beside four: of the same memory a fifth is the draft model's.
    assert drafted.limits.num_blocks == plain.limits.num_blocks * 4 // 5
    loaded = drafted.load(said.append)
    assert isinstance(loaded.runner, ModelRunner)
    assert isinstance(loaded.runner.proposer, DraftModelProposer)
    (sentence,) = (sentence for sentence in said if sentence.startswith("speculative"))
    assert "(0.0 million parameters, by torch " in sentence
    assert sentence.endswith(": always 3; 0 MiB of weights and 0 MiB of KV cache")
    assert loaded.proposer is not None
    own = loaded.proposer.backend
    assert own is not None
    assert isinstance(drafted.backend, CheckpointBackend)
    assert own.needs(16).block_bytes * 4 == drafted.backend.needs(16).block_bytes
    assert own.needs(16).weight_bytes > 0


def test_memory_that_holds_no_block_of_both_is_refused(folder: Path) -> None:
    backend = prepare(config_of(folder, None)).backend
    assert isinstance(backend, CheckpointBackend)
    block_bytes = backend.needs(16).block_bytes
    options: dict[str, Any] = {"kv_cache_memory_bytes": block_bytes, "max_model_len": 16}
    assert prepare(config_of(folder, None, **options)).limits.num_blocks == 1
    with pytest.raises(ConfigError, match="KV cache"):
        prepare(config_of(folder, draft_model(folder, "draft"), **options))


def generate(folder: Path, speculative: dict[str, Any] | None, **options: Any) -> list[list[int]]:
    """Return the tokens of all prompts, one way of sampling after the other."""
    with LLM(str(folder / "target"), speculative_config=speculative, **{**OPTIONS, **options}) as llm:
        return [
            generation.token_ids
            for sampling in SAMPLINGS
            for generation in llm.generate(PROMPTS, sampling, ignore_eos=True)
        ]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    """Tokens without drafts."""
    return generate(folder, None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"backend": "torch"}, ADAPTIVE], ids=["auto", "torch", "adaptive"])
def test_the_same_tokens_come_out(
    folder: Path, plain: list[list[int]], method: str, options: dict[str, Any]
) -> None:
    speculative = METHODS[method](folder)
    if options is ADAPTIVE:
        speculative |= {"draft_length": "adaptive"}
    assert generate(folder, speculative, **options) == plain


@pytest.mark.parametrize("draft", ["padded", "short"])
def test_drafts_of_another_size_of_vocabulary_or_context(
    folder: Path, plain: list[list[int]], draft: str
) -> None:
    assert generate(folder, draft_model(folder, draft, draft_length="fixed")) == plain


def test_quantized_drafts(folder: Path, native_library: NativeLibrary) -> None:
    speculative = METHODS["draft-model"](folder)
    loader = prepare(config_of(folder, speculative, quantization="int8", backend="native"))
    assert loader.proposer is not None
    assert "int8 weights" in loader.proposer.description
    expected = generate(folder, None, quantization="int8")
    assert generate(folder, speculative, quantization="int8") == expected


@pytest.mark.parametrize("method", METHODS)
def test_the_step_time_model_knows_the_drafts(folder: Path, method: str, tmp_path: Path) -> None:
    """With a model that drafts, each step is predicted with its passes, and measured work counts them."""
    record = tmp_path / "run.gz"
    config = config_of(folder, METHODS[method](folder), record=record, **ADAPTIVE)
    core, info = build_engine(config, lambda _: None)
    assert info.speculation == method
    while (
        core.do_idle_work()
    ):  # an idle engine takes memory ahead, the draft model's too, and comes to an end
        pass
    model = core.scheduler.step_time_model
    assert isinstance(model, SpeculativeStepTime) == (method != "ngram")
    core.shutdown()
    header = Recording(record).header
    assert header.engine["drafts"].startswith({"n": "what", "d": "the draft"}[method[0]])
    assert header.step_time is not None
    assert ("draft" in header.step_time) == (method != "ngram")
    if method == "draft-model":
        assert header.step_time["draft"]["model"]["num_layers"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"step_time_profile": "none"},
            r"profile is 'none'; leave --step-time-profile out, or \"draft_length\"",
        ),
        (
            {"dtype": "float64", "step_time_profile": "auto"},
            r"no step-time model knows float64; choose another --dtype, or \"draft_length\"",
        ),
    ],
)
def test_adaptive_lengths_need_predicted_step_times(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    config = config_of(folder, {"method": "ngram"}, **options)
    with pytest.raises(ConfigError, match=f"draft_length 'adaptive'.*{message}"):
        build_engine(config, lambda _: None)
    fixed = config_of(folder, METHODS["ngram"](folder), **options)
    core, _ = build_engine(fixed, lambda _: None)
    core.shutdown()


def test_tokenizers_are_compared_by_what_their_tokens_stand_for(folder: Path) -> None:
    same, other = (load_tokenizer(folder / name) for name in ("draft", "other-tokenizer"))
    assert first_difference(load_tokenizer(folder / "target"), same) is None
    found = first_difference(same, other)
    assert found is not None
    assert same.token_bytes(found) == b"a"
