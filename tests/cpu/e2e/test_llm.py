"""`onbeat.LLM`: offline generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import onbeat
from onbeat import LLM, SamplingParams
from onbeat.core.errors import ConfigError, EngineError, InvalidRequest, ModelLoadError, PromptTooLong
from onbeat.core.request import FinishReason
from onbeat.engine.profiling import profiler
from tests.cpu.e2e.program import ServerProgram
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.fakes_engine import BOS, LeadingSpaceTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3, 4,"]
TINY: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "max_model_len": 512}


@pytest.fixture(scope="module", autouse=True)
def hasty_limits() -> Iterator[None]:
    """What the machine reaches is measured in each start; nobody here asks how well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "_ROWS_SECONDS", 0.0)
        patch.setattr(profiler, "_READ_BYTES", 2**22)
        yield


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**27, "threads": 1, "max_num_seqs": 16}
    with LLM(str(smollm2_gguf), dtype="float32", max_model_len=1024, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tiny_directory: Path) -> Iterator[LLM]:
    with LLM(str(tiny_directory), **TINY, kv_cache_memory_bytes=2**22) as llm:
        yield llm


def check_nothing_is_left(llm: LLM) -> None:
    while llm._core.has_work:
        llm._core.step()
    llm._core.scheduler.check_invariants()
    assert llm._core.scheduler.kv.pool.num_used_blocks == 0


def test_the_servers_greedy_tokens_are_the_offline_ones(smollm2: LLM, smollm2_server: ServerProgram) -> None:
    generations = smollm2.generate(PROMPTS, GREEDY)
    assert "Paris" in generations[0].text
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        reply = httpx.post(f"{smollm2_server.url}/v1/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["text"] == generation.text
        assert reply["choices"][0]["finish_reason"] == generation.finish_reason
    chat = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    body = {**chat, "max_tokens": 8, "temperature": 0}
    reply = httpx.post(f"{smollm2_server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert reply["choices"][0]["message"]["content"] == smollm2.chat(chat["messages"], GREEDY).text


def test_what_the_model_recommends_is_the_default_and_can_be_left(tmp_path: Path) -> None:
    """`override_generation_config` and `generation_config` are vLLM's."""
    model = write_tiny_directory(tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 5, "max_new_tokens": 3}')
    options = {**TINY, "kv_cache_memory_bytes": 2**22}
    with LLM(str(model), **options, override_generation_config={"top_k": 7}) as llm:
        found = llm.get_default_sampling_params()
        assert (found.temperature, found.top_k, found.max_tokens, found.top_p) == (0.0, 7, 3, 1.0)
        (silent,) = llm.generate([[1, 2, 3]])
        assert len(silent.token_ids) <= 3
        assert llm.generate([[1, 2, 3]], replace(found, max_tokens=3))[0].token_ids == silent.token_ids
    with LLM(str(model), **options, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_a_format_without_predictions_names_the_policy_that_does_without_them(tiny_directory: Path) -> None:
    options = {**TINY, "dtype": "float64", "kv_cache_memory_bytes": 2**22}
    with pytest.raises(ConfigError, match=r"float64.*policy='sarathi'"):
        LLM(str(tiny_directory), **options)
    with LLM(str(tiny_directory), policy="sarathi", **options) as llm:
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 8


def test_whom_to_leave_behind_is_an_option_of_slo_alone(tiny_directory: Path) -> None:
    options = {**TINY, "kv_cache_memory_bytes": 2**22, "step_time_profile": "roofline"}
    with LLM(str(tiny_directory), shed_order="longest-wait", **options) as llm:
        assert llm._core.scheduler.config.shed_order == "longest-wait"
    with pytest.raises(ConfigError, match="'sarathi'"):
        LLM(str(tiny_directory), policy="sarathi", shed_order="longest-wait", **options)
    with pytest.raises(ConfigError, match=r"'longest'.*longest-wait"):
        LLM(str(tiny_directory), shed_order="longest", **options)


def test_embeddings_are_those_of_the_server(smollm2: LLM, smollm2_server: ServerProgram) -> None:
    body: dict[str, Any] = {"input": PROMPTS, "dimensions": 64}
    reply = httpx.post(f"{smollm2_server.url}/v1/embeddings", json=body, timeout=60).json()
    found = smollm2.embed(PROMPTS, dimensions=64)
    for vector, entry in zip(found, reply["data"], strict=True):
        assert vector.dtype == np.float32
        assert vector @ np.array(entry["embedding"]) == pytest.approx(1, abs=1e-3)
    (alone,) = smollm2.embed(smollm2.tokenizer.encode(PROMPTS[1]), normalize=False)
    assert len(alone) == smollm2.info.embedding_size
    np.testing.assert_allclose(alone[:64] / np.linalg.norm(alone[:64]), found[1], atol=1e-4)
    check_nothing_is_left(smollm2)


def test_what_cannot_be_embedded_is_refused(tiny: LLM) -> None:
    size = tiny.info.embedding_size
    with pytest.raises(InvalidRequest, match=f" 1 to {size} "):
        tiny.embed("a", dimensions=size + 1)
    with pytest.raises(PromptTooLong):
        tiny.embed([[1, 2], [3] * 600])
    with pytest.raises(InvalidRequest, match="vocabulary"):
        tiny.embed([-1])
    check_nothing_is_left(tiny)


def test_text_and_ids_alone_and_in_a_batch(smollm2: LLM) -> None:
    batch = smollm2.generate(PROMPTS, GREEDY)
    ids = [smollm2.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert [g.prompt_token_ids for g in batch] == [tuple(prompt) for prompt in ids]
    by_ids = smollm2.generate(ids, GREEDY)
    (alone,) = smollm2.generate(PROMPTS[1], GREEDY)
    (alone_by_ids,) = smollm2.generate(ids[1], GREEDY)
    assert [g.token_ids for g in by_ids] == [g.token_ids for g in batch]
    assert alone.token_ids == alone_by_ids.token_ids == batch[1].token_ids
    assert alone.text == smollm2.tokenizer.decode(alone.token_ids)
    assert alone.finish_reason is FinishReason.LENGTH
    check_nothing_is_left(smollm2)


def test_no_prompts(tiny: LLM) -> None:
    assert tiny.generate([]) == []


def test_stop_strings_and_tokens(smollm2: LLM) -> None:
    (whole,) = smollm2.generate(PROMPTS[1], GREEDY)
    (cut,) = smollm2.generate(PROMPTS[1], GREEDY, stop=[whole.text[6:9]])
    assert cut.text == whole.text[: whole.text.index(whole.text[6:9])]
    assert cut.finish_reason is FinishReason.STOP
    third = whole.token_ids[2]
    (by_token,) = smollm2.generate(
        PROMPTS[1], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(third,))
    )
    assert by_token.token_ids == whole.token_ids[: whole.token_ids.index(third) + 1]
    assert by_token.finish_reason is FinishReason.STOP
    check_nothing_is_left(smollm2)


def test_logprobs(tiny: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=6, num_logprobs=2)
    (generation,) = tiny.generate("hello", sampling, ignore_eos=True)
    assert generation.logprobs is not None
    assert [entry.token_id for entry in generation.logprobs] == generation.token_ids
    for entry in generation.logprobs:
        assert entry.top_token_ids[0] == entry.token_id
        assert entry.logprob == entry.top_logprobs[0] >= entry.top_logprobs[1]


def test_what_goes_on_keeps_its_leading_space(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "tokenizer", LeadingSpaceTokenizer())
    spaces = SamplingParams(max_tokens=3, allowed_token_ids=(ord(" "),))
    assert tiny.generate("so", spaces)[0].text == "   "
    assert tiny.generate([[BOS]], spaces)[0].text == "  "
    assert tiny.chat([{"role": "user", "content": "hi"}], spaces).text == "  "


def test_seeds(tiny: LLM) -> None:
    def tokens(seed: int) -> list[list[int]]:
        sampling = SamplingParams(seed=seed, max_tokens=20)
        return [g.token_ids for g in tiny.generate(["a", "a"], sampling, ignore_eos=True)]

    first = tokens(3)
    assert tokens(3) == first
    assert first[0] != first[1]  # prompt i uses seed + i
    assert tokens(4)[0] == first[1]


def test_a_rejected_prompt_leaves_nothing_behind(tiny: LLM) -> None:
    with pytest.raises(PromptTooLong, match="512"):
        tiny.generate([[1, 2, 3], [1] * 600], GREEDY)
    check_nothing_is_left(tiny)
    with pytest.raises(InvalidRequest):
        tiny.generate([[]], GREEDY)
    check_nothing_is_left(tiny)
    assert len(tiny.generate("go on", GREEDY, ignore_eos=True)[0].token_ids) == 8


def test_tokens_that_the_model_lacks(tmp_path: Path) -> None:
    """Its tokenizer knows `<|stop|>`, its embedding does not: no text may hold it, no answer ends with it."""
    path = write_tiny_directory(tmp_path / "model", vocab_size=258)
    with LLM(str(path), **TINY, kv_cache_memory_bytes=2**22) as llm:
        with pytest.raises(InvalidRequest, match="token id 258"):
            llm.generate(["good", "a <|stop|> b"], GREEDY)
        with pytest.raises(InvalidRequest, match="token id 258"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        check_nothing_is_left(llm)
        sampling = SamplingParams(temperature=0, max_tokens=8, min_tokens=4)
        assert len(llm.generate("good", sampling)[0].token_ids) == 8


def test_a_failed_step_leaves_nothing_behind(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny._core.executor._runner

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "launch", fail)
        with pytest.raises(EngineError, match="no memory"):
            tiny.generate(["a", "b"], GREEDY)
    check_nothing_is_left(tiny)
    assert len(tiny.generate("go on", GREEDY, ignore_eos=True)[0].token_ids) == 8


def test_chat_needs_a_template(tmp_path: Path) -> None:
    path = write_tiny_directory(tmp_path / "model")
    (path / "tokenizer_config.json").unlink()
    with LLM(str(path), **TINY) as llm, pytest.raises(InvalidRequest, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 16,
            "hidden_act": None,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ],
    ids=lambda changes: changes["model_type"],
)
def test_dummy_weights_of_every_family(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_tiny_directory(tmp_path / "model", **changes)
    tokens = []
    for seed in (0, 0, 1):
        with LLM(str(path), **TINY, seed=seed) as llm:
            (generation,) = llm.generate("hello", GREEDY, ignore_eos=True)
            tokens.append(generation.token_ids)
    assert len(tokens[0]) == 8
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


NATIVE, TORCH = ("native", 8192), ("torch", 4096)
"""Backends, and the bytes of a block."""


@pytest.mark.parametrize(
    ("policy", "backend", "block_bytes"),
    [
        *(("static", *TORCH), ("orca", *NATIVE), ("prefill-first", *NATIVE), ("sarathi", *TORCH)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("static", *NATIVE),
                ("orca", *TORCH),
                ("prefill-first", *TORCH),
                ("sarathi", *NATIVE),
            )
        ),
    ],
)
def test_planning_ahead_gives_the_same_tokens(
    tiny_directory: Path, request: pytest.FixtureRequest, policy: str, backend: str, block_bytes: int
) -> None:
    if backend == "native":
        request.getfixturevalue("native_library")
    prompts = [[(7 * i + k) % 250 for k in range(5 + 23 * i)] for i in range(8)]
    sampling = SamplingParams(temperature=0, max_tokens=40)
    tokens = []
    for is_async in (False, True):
        options = {
            **TINY,
            "backend": backend,
            "policy": policy,
            "async_scheduling": is_async,
            "max_num_seqs": 4,
        }
        # 24 blocks: too few for four long requests, so that some policies preempt.
        with LLM(
            str(tiny_directory), **options | {"max_model_len": 256}, kv_cache_memory_bytes=24 * block_bytes
        ) as llm:
            assert llm.info.limits.num_blocks == 24
            tokens.append([g.token_ids for g in llm.generate(prompts, sampling, ignore_eos=True)])
            check_nothing_is_left(llm)
    assert tokens[0] == tokens[1]
    assert all(len(row) == 40 for row in tokens[0])


def test_what_cannot_be_loaded(tmp_path: Path, tiny_directory: Path) -> None:
    with pytest.raises(ModelLoadError, match="lacks"):
        LLM(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"lacks \*.safetensors"):
        LLM(str(tiny_directory))
    with pytest.raises(ConfigError, match="unknown dtype 'int3'"):
        LLM(str(tiny_directory), load_format="dummy", dtype="int3")
    with pytest.raises(ConfigError, match="policy 'fifo'"):
        LLM(str(tiny_directory), load_format="dummy", policy="fifo")
    assert onbeat.LLM is LLM
