"""Embeddings equal transformers' pooled hidden states: chunked, beside chats and preempted, too."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from onbeat.core.errors import ModelLoadError, NeedsVllm
from onbeat.core.request import FinishReason, Pooling, Request, SamplingParams
from onbeat.engine.core import EngineCore
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.pooling import choose_pooling
from onbeat.engine.sampler import Sampler
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.cpu.engine.engines import TinyEngine, in_parts, is_in_part
from tests.cpu.engine.forwards import MakeForward, on_torch
from tests.cpu.engine.tiny_models import FAMILIES, hf_tiny_model, random_prompt, tiny_model
from tests.cpu.golden.engine_run import PredictedTime
from tests.fake_step_time import LinearStepTime
from tests.many_cases import each_case

pytestmark = pytest.mark.golden

LENGTHS = (1, 40, 2, 256, 17, 16, 129, 33)
"""One fills the context."""
CHATS = (30, 31, 28, 61)
CHUNKED = tuple(name for name, policy in POLICIES.items() if not policy.whole_prompts)


@dataclass
class Served:
    embeddings: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_hits: int = 0
    num_preempted: int = 0
    """Embeddings whose requests were preempted on the way."""


def serve(make_forward: MakeForward, requests: list[Request], **limits) -> Served:
    limits = {"num_blocks": 400, "max_model_len": 256, "max_num_seqs": 8, **limits}
    limits.setdefault("max_num_batched_tokens", 256)
    config = SchedulerConfig(**limits)
    forward = make_forward(num_blocks=config.num_blocks, block_size=config.block_size)
    runner = ModelRunner(config, forward, Sampler(forward.config.vocab_size))
    scheduler = Scheduler(config, LinearStepTime())
    executor = PredictedTime(runner, scheduler)
    num_ahead = 2 if runner.overlaps else 1
    core = EngineCore(scheduler, executor, clock=lambda: executor.now, max_in_flight_steps=num_ahead)
    served = Served()
    for request in requests:
        core.add(request)
    while core.has_work:
        message = core.step()
        if message is None:
            continue
        for output in message.outputs:
            assert output.error is None, output.error
            if output.embedding is None:
                served.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                continue
            assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.STOP)
            assert output.request_id not in served.embeddings
            served.num_preempted += output.num_preemptions > 0
            served.embeddings[output.request_id] = np.frombuffer(output.embedding, "<f4")
    served.num_hits = scheduler.table.num_prefix_hits
    scheduler.check_invariants()
    assert scheduler.kv.pool.num_used_blocks == 0
    core.shutdown()
    return served


def to_embed(prompt: list[int], pooling: Pooling, name: str) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=1),
        pooling=pooling,
    )


def chat(prompt: list[int], name: str, max_tokens: int = 12) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


@functools.cache
def hidden_states(name: str, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        hidden_TD: torch.Tensor = tiny_model(name).hf_model.model(torch.tensor([prompt])).last_hidden_state[0]
    return hidden_TD


def reference(name: str, prompt: list[int], pooling: Pooling) -> np.ndarray:
    hidden_TD = hidden_states(name, tuple(prompt))
    vector: np.ndarray = (hidden_TD[-1] if pooling == "last" else hidden_TD.mean(dim=0)).numpy()
    return vector


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def check(served: Served, name: str, pooling: Pooling, prompts: list[list[int]]) -> None:
    assert len(served.embeddings) == len(prompts)
    for index, prompt in enumerate(prompts):
        expected, found = reference(name, prompt, pooling), served.embeddings[f"e{index}"]
        assert found.shape == expected.shape
        assert cosine(found.astype(np.float64), expected) >= 0.9999
        assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(expected), rel=1e-3)


@in_parts(2)
@each_case(("number", "name"), enumerate(FAMILIES))
@each_case("budget", [256, 8])
def test_equals_the_reference(engine: TinyEngine, number: int, name: str, budget: int, part: tuple[int, int]):
    """What is made of hidden states depends on no family: they take turns."""
    if not is_in_part(engine, number // 2 + (budget == 8), part):
        return
    pooling: Pooling = "last" if (number + (budget == 8)) % 2 else "mean"
    prompts = [random_prompt(length) for length in LENGTHS]
    requests = [to_embed(prompt, pooling, f"e{index}") for index, prompt in enumerate(prompts)]
    served = serve(engine.make_forward(name), requests, policy="sarathi", max_num_batched_tokens=budget)
    check(served, name, pooling, prompts)


@each_case("pooling", ["last", "mean"])
@each_case("policy", POLICIES)
def test_beside_chats_under_each_policy(engine: TinyEngine, policy: str, pooling: Pooling):
    prompts = [random_prompt(length) for length in LENGTHS]
    requests = [to_embed(prompt, pooling, f"e{index}") for index, prompt in enumerate(prompts)]
    chats = [chat(random_prompt(length), f"c{length}") for length in CHATS]
    mixed = [each for pair in zip(requests[:4], chats, strict=True) for each in pair] + requests[4:]
    budget = 40 if policy in CHUNKED else 256
    served = serve(engine.make_forward("qwen3"), mixed, policy=policy, max_num_batched_tokens=budget)
    check(served, "qwen3", pooling, prompts)
    for length in CHATS:
        tokens = served.tokens[f"c{length}"]
        engine.check(tokens, *tiny_model("qwen3").reference(tuple(random_prompt(length)), 12, tokens))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_preempted_requests_are_computed_again(engine: TinyEngine, pooling: Pooling):
    prompts = [random_prompt(length) for length in (120, 100, 60, 90)]
    chats = [chat(random_prompt(length), f"c{length}", max_tokens=60) for length in CHATS[:3]]
    requests = [to_embed(prompt, pooling, f"e{index}") for index, prompt in enumerate(prompts)]
    served = serve(
        engine.make_forward("llama3"),
        [*chats, *requests],
        policy="sarathi",
        num_blocks=18,
        max_num_batched_tokens=6,
        max_num_seqs=6,
    )
    assert served.num_preempted > 0
    check(served, "llama3", pooling, prompts)


def test_a_prompt_as_long_as_the_context(engine: TinyEngine):
    prompt = random_prompt(256)
    served = serve(
        engine.make_forward("qwen3"), [to_embed(prompt, "last", "e0")], policy="slo", num_blocks=16
    )
    check(served, "qwen3", "last", [prompt])


@pytest.mark.parametrize(("pooling", "hits"), [("last", 64), ("mean", 0)])
def test_last_reads_the_prefix_cache_and_neither_writes_it(engine: TinyEngine, pooling: Pooling, hits: int):
    prompt = random_prompt(70)
    embeds = [to_embed(prompt, pooling, "e0"), to_embed(prompt, pooling, "e1")]
    forward = engine.make_forward("qwen3")
    served = serve(forward, [embeds[0], embeds[1]], policy="sarathi", max_num_seqs=1)
    assert served.num_hits == 0
    served = serve(forward, [chat(prompt, "c"), *embeds[:1]], policy="sarathi", max_num_seqs=1)
    assert served.num_hits == hits
    check(served, "qwen3", pooling, [prompt])


def saved(path: Path, **pooling: object) -> ModelFiles:
    """Write a model without its head, as embedding models are saved, and how it pools."""
    hf_tiny_model("qwen3", torch.float64).model.save_pretrained(path)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": 0, "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return ModelFiles(kind="hf", path=path, name="tiny")


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_a_checkpoint_saved_without_its_head(tmp_path: Path, architecture: str):
    files = saved(tmp_path, pooling_mode_mean_tokens=True, pooling_mode_lasttoken=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    checkpoint = open_checkpoint(files)
    assert not checkpoint.config.has_head
    assert choose_pooling("auto", checkpoint.config) == "mean"
    assert choose_pooling("last", checkpoint.config) == "last"
    model = load_weights(checkpoint, dtype=torch.float64, device=torch.device("cpu"))
    prompts = [random_prompt(length) for length in (5, 40)]
    requests = [to_embed(prompt, "mean", f"e{index}") for index, prompt in enumerate(prompts)]
    check(serve(on_torch(model), requests, policy="sarathi"), "qwen3", "mean", prompts)


def test_pooling_that_is_not_supported_is_refused(tmp_path: Path):
    checkpoint = open_checkpoint(saved(tmp_path, pooling_mode_cls_token=True))
    with pytest.raises(NeedsVllm, match=r"'cls'.*--pooling"):
        choose_pooling("auto", checkpoint.config)
    modules = [{"type": "sentence_transformers.models.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match="'Dense'"):
        open_checkpoint(ModelFiles(kind="hf", path=tmp_path, name="tiny"))
