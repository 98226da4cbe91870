"""Numbers that depend on the tokens alone: `batch_invariant`, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
import transformers

from onbeat.core.errors import ConfigError
from onbeat.core.options import change, make
from onbeat.core.request import Request, SamplingParams
from onbeat.engine.engine_config import ActivationQuantization, EngineConfig
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.start import build_engine, prepare
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.forwards import MakeForward, on_native
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import random_prompt
from tests.cpu.native.quant_kernels import random_rows
from tests.cpu.native.test_forward import checkpoint_of
from tests.cpu.weights import tiny_models as gguf_models

PROMPT = random_prompt(600)
"""So long that a decode's context would be divided among threads, and that attention takes several chunks."""
TYPES = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q5_K", "Q2_K")


def write_quantized(path: Path, kind: str) -> Path:
    """Write a tiny model whose matrices are all of one type."""
    sizes: dict[str, Any] = gguf_models.COMMON | {
        "hidden_size": 256, "intermediate_size": 256, "vocab_size": 211, "max_position_embeddings": 1024,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, head_dim=64)
    auto: Any = transformers.AutoModelForCausalLM
    writer = gguf.GGUFWriter(path, "llama")
    gguf_models.write_metadata(writer, config)
    for name, tensor in gguf_models.parameters(auto.from_config(config)).items():
        short, values = gguf_models.to_gguf(name, tensor.numpy(), config)
        if values.ndim == 1:
            writer.add_tensor(short, values)
        else:
            num_rows, num_inputs = values.shape
            raw = random_rows(kind, num_rows, num_inputs, seed=len(writer.tensors[0]), factor=0.1)
            writer.add_tensor(short, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    gguf_models.finish(writer)
    return path


def open_quantized(path: Path, kind: str) -> Checkpoint:
    return open_checkpoint(
        ModelFiles(kind="gguf", path=write_quantized(path / f"{kind}.gguf", kind), name="t")
    )


class Way(NamedTuple):
    """How a prompt gets to its first tokens."""

    chunks: Sequence[int]
    """Tokens of its steps, again and again."""
    neighbours: Sequence[int] = ()
    """Lengths of prompts that run beside it."""
    num_threads: int = 2


WAYS = (
    Way((600,), num_threads=1),
    Way((600,), num_threads=3),
    Way((1, 15, 16, 17, 31, 32, 33)),
    Way((64, 65, 7), num_threads=3),
    Way((256, 3)),
    Way((40,), (5, 20, 90, 130, 270)),
    Way((600,), (5,) * 20),
)


def logits_of(make_forward: MakeForward, way: Way) -> torch.Tensor:
    """Return those of the first five tokens after the prompt, [5, vocabulary]."""
    driver = StepDriver(make_forward, num_blocks=160, max_model_len=1024, seed=len(way.chunks))
    key = driver.add(PROMPT, 5)
    for index, length in enumerate(way.neighbours):
        driver.add(random_prompt(length + index), 700)
    sizes = cycle(way.chunks)
    while not driver.requests[key].is_finished:
        others = [name for name, live in driver.requests.items() if name != key and not live.is_finished]
        driver.step(dict.fromkeys(others[::2], 25) | {key: next(sizes)} | dict.fromkeys(others[1::2], 25))
    return torch.stack(driver.requests[key].logits)


def all_logits(
    library: NativeLibrary,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    instruction_set: str,
    batch_invariant: bool = True,
    activation_quantization: ActivationQuantization = "auto",
    ways: Sequence[Way] = WAYS,
) -> list[torch.Tensor]:
    return [
        logits_of(
            on_native(
                library,
                checkpoint,
                dtype=dtype,
                quantization="auto",
                activation_quantization=activation_quantization,
                num_threads=way.num_threads,
                instruction_set=instruction_set,
                batch_invariant=batch_invariant,
            ),
            way,
        )
        for way in ways
    ]


def assert_all_equal(found: Sequence[torch.Tensor], what: object) -> None:
    for way, logits in zip(WAYS, found, strict=True):
        assert torch.equal(logits, found[0]), (way, what, float((logits - found[0]).abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama3", "mistral-sliding", "gemma3", "qwen3.5"])
def test_plain_weights(native_library: NativeLibrary, name: str, dtype: torch.dtype) -> None:
    for instruction_set in native_library.instruction_sets:
        found = all_logits(native_library, checkpoint_of(name), dtype=dtype, instruction_set=instruction_set)
        assert_all_equal(found, instruction_set)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_quantized_weights(
    native_library: NativeLibrary, kind: str, dtype: torch.dtype, turn: int, tmp_path: Path
) -> None:
    """The first turn has every two of type, dtype and instruction set together, and both have all three."""
    checkpoint = open_quantized(tmp_path, kind)
    number = TYPES.index(kind) + int(dtype is torch.bfloat16) + turn
    for instruction_set in native_library.instruction_sets[number % 2 :: 2]:
        found = all_logits(native_library, checkpoint, dtype=dtype, instruction_set=instruction_set)
        assert_all_equal(found, instruction_set)


@pytest.mark.parametrize("activations", ["none", "int8"])
def test_either_way_of_activations(
    native_library: NativeLibrary, activations: ActivationQuantization, tmp_path: Path
) -> None:
    checkpoint = open_quantized(tmp_path, "Q4_0")
    for instruction_set in native_library.instruction_sets:
        found = all_logits(
            native_library,
            checkpoint,
            dtype=torch.bfloat16,
            instruction_set=instruction_set,
            activation_quantization=activations,
        )
        assert_all_equal(found, instruction_set)


def test_numbers_depend_on_the_step_without_it(native_library: NativeLibrary) -> None:
    """What the other tests would find."""
    for dtype in (torch.float32, torch.bfloat16):
        found = all_logits(
            native_library,
            checkpoint_of("llama3"),
            dtype=dtype,
            instruction_set=native_library.instruction_sets[0],
            batch_invariant=False,
        )
        assert not all(torch.equal(logits, found[0]) for logits in found)


# ---- The engine ----


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = write_quantized(tmp_path_factory.mktemp("model") / "tiny.gguf", "Q4_0")
    return make(
        EngineConfig,
        model=ModelFiles(kind="gguf", path=path, name="tiny"),
        dtype="bfloat16",
        policy="sarathi",
        step_time_profile="none",
        max_model_len=1024,
        max_num_batched_tokens=96,
        max_num_seqs=16,
        kv_cache_memory_bytes=2**22,
        threads=2,
        batch_invariant=True,
    )


@pytest.mark.parametrize("chance", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7, "top_p": 0.95}])
def test_a_prefix_hit_changes_no_bit(
    native_library: NativeLibrary, config: EngineConfig, chance: dict[str, Any]
) -> None:
    """A prompt alone, again with its blocks at hand, and again beside others: the same log-probabilities."""
    core, _ = build_engine(config, lambda _: None)
    sampling = SamplingParams(max_tokens=8, num_logprobs=3, **chance)
    told: dict[str, list[Any]] = {}
    hits: dict[str, int] = {}
    for names in (["first"], ["again"], ["beside", "other", "third"]):
        for index, name in enumerate(names):
            prompt = PROMPT[index : 500 - 7 * index]
            core.add(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
        while core.has_work:
            message = core.step()
            for output in message.outputs if message else ():
                told.setdefault(output.request_id, []).extend(output.logprobs or ())
                hits[output.request_id] = max(output.num_cached_tokens or 0, hits.get(output.request_id, 0))
    core.shutdown()
    assert hits["first"] == 0
    assert hits["again"] > 400
    assert len(told["first"]) == 8
    assert told["first"] == told["again"] == told["beside"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "torch"}, r"batch_invariant .* --batch-invariant"),
        ({"dtype": "float64"}, r"batch_invariant .* float64"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    native_library: NativeLibrary, config: EngineConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(change(config, **changes))


def test_it_is_said_and_part_of_what_blocks_depend_on(
    native_library: NativeLibrary, config: EngineConfig
) -> None:
    said: list[str] = []
    loaded = prepare(config).load(said.append)
    assert said[0].endswith("batch-invariant)")
    layout = loaded.kv_memory().layout
    assert layout.activations.endswith("batch-invariant")
    other = prepare(change(config, batch_invariant=False)).load(said.append)
    assert other.kv_memory().layout.activations != layout.activations
