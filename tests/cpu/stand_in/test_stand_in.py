"""A stand-in says the same however it is scheduled, unless a block is wrong, and takes the predicted time."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaLimits
from onbeat.core.request import FinishReason, Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.backends.stand_in import StandInForward, StandInSampler
from onbeat.engine.engine_config import EngineConfig, MemoryShare
from onbeat.engine.llm import LLM
from onbeat.engine.model_config.architecture import ModelConfig, RopeConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.start import build_engine
from onbeat.hub.resolve import find_stand_in
from onbeat.perfmodel.device_spec import find_device
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.scheduler_config import SchedulerLimits
from tests.cpu.engine.tiny_models import random_prompt
from tests.cpu.speculation import runs
from tests.cpu.speculation.runs import Run, make_request
from tests.cpu.speculation.test_lossless import budget
from tests.pure.scheduler.driver import make_config

MODEL = ModelConfig(
    family="llama",
    architecture="stand-in",
    vocab_size=211,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
)


def make_forward(*, num_blocks: int, block_size: int, step_seconds=lambda shape: 0.0) -> StandInForward:
    return StandInForward(
        MODEL,
        ordinary_ids=range(5, 211),
        step_seconds=step_seconds,
        num_blocks=num_blocks,
        block_size=block_size,
        settings={},
    )


def run(requests: list[Request], *, step_seconds: Any = None, **limits: Any) -> Run:
    make = make_forward if step_seconds is None else partial(make_forward, step_seconds=step_seconds)
    return runs.run(make, requests, sampler=StandInSampler(), **limits)


def make_requests() -> list[Request]:
    return [
        make_request(f"r{index}", random_prompt(length), 20 + index, seed=index, temperature=index % 2)
        for index, length in enumerate((5, 130, 40, 41, 17, 60))
    ]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What each request says when it has the engine for itself."""
    return {each.request_id: run([each]).token_ids[each.request_id] for each in make_requests()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlapped", [False, True], ids=["one-step", "overlapped"])
def test_every_policy_says_the_same(alone: dict[str, list[int]], policy: str, overlapped: bool) -> None:
    assert run(make_requests(), policy=policy, overlapped=overlapped, **budget(policy)).token_ids == alone


@pytest.mark.parametrize("max_num_batched_tokens", [8, 17, 64, 500])
def test_chunks_change_nothing(alone: dict[str, list[int]], max_num_batched_tokens: int) -> None:
    assert run(make_requests(), max_num_batched_tokens=max_num_batched_tokens).token_ids == alone


@pytest.mark.parametrize("is_cached", [True, False], ids=["prefix cache", "no prefix cache"])
def test_preemption_changes_nothing(alone: dict[str, list[int]], is_cached: bool) -> None:
    short = run(make_requests(), num_blocks=16, enable_prefix_caching=is_cached)
    assert short.num_preemptions > 0
    assert short.token_ids == alone


def test_prefix_hits_change_nothing(alone: dict[str, list[int]]) -> None:
    again = [replace(each, request_id=f"{each.request_id}-again") for each in make_requests()]
    both = runs.run(make_forward, make_requests(), later=again, sampler=StandInSampler())
    assert both.num_cached_tokens > 200
    for request in again:
        assert both.token_ids[request.request_id] == alone[request.request_id.removesuffix("-again")]


@pytest.mark.parametrize("num_blocks", [12, 400])
def test_windows_that_give_kv_back_change_nothing(alone: dict[str, list[int]], num_blocks: int) -> None:
    def make(**sizes: Any) -> StandInForward:
        return make_forward(**sizes | {"num_blocks": 3 * num_blocks})

    again = [replace(each, request_id=f"{each.request_id}-again") for each in make_requests()]
    windows: dict[str, Any] = {"num_tables": 3, "window_length": 32, "num_blocks": num_blocks}
    both = runs.run(make, make_requests(), later=again, sampler=StandInSampler(), **windows)
    assert both.num_preemptions or num_blocks > 12
    assert both.num_cached_tokens > 200 or num_blocks == 12
    for name, token_ids in both.token_ids.items():
        assert token_ids == alone[name.removesuffix("-again")]


@pytest.mark.parametrize("num_sent", [1, 7, 16, 19])
def test_a_resumed_stream_goes_on(alone: dict[str, list[int]], num_sent: int) -> None:
    cut = [
        replace(each, resumed_token_ids=tuple(alone[each.request_id][:num_sent])) for each in make_requests()
    ]
    assert run(cut).token_ids == {name: tokens[num_sent:] for name, tokens in alone.items()}


def test_sent_tokens_that_count_as_prompt_change_the_answer(alone: dict[str, list[int]]) -> None:
    request = make_requests()[0]
    sent = tuple(alone["r0"][:7])
    longer = replace(request, prompt_token_ids=(*request.prompt_token_ids, *sent))
    assert run([longer]).token_ids["r0"][:13] != alone["r0"][7:]


def test_answers_end_by_their_length_alone() -> None:
    stops = tuple(range(5, 200))
    requests = [make_request(f"r{i}", random_prompt(9 + i), 40, stop_token_ids=stops) for i in range(4)]
    ended = run(requests)
    assert set(ended.finish_reasons.values()) == {FinishReason.LENGTH}
    assert {token for tokens in ended.token_ids.values() for token in tokens} <= set(range(200, 211))


def test_allowed_tokens_and_seeds_count_and_the_chosen_token_is_certain() -> None:
    prompt = random_prompt(20)
    fields: dict[str, dict[str, Any]] = {
        "allowed": {"allowed_token_ids": (3, 4, 9)},
        "greedy-1": {"seed": 1, "num_logprobs": 3},
        "greedy-2": {"seed": 2},
        "seed-1": {"seed": 1, "temperature": 0.7},
        "seed-2": {"seed": 2, "temperature": 0.7},
    }
    ended = run([make_request(name, prompt, 20, **each) for name, each in fields.items()])
    said = ended.token_ids
    assert set(said["allowed"]) == {3, 4, 9}
    assert said["greedy-1"] == said["greedy-2"]
    assert len({tuple(said[name]) for name in ("greedy-1", "seed-1", "seed-2")}) == 3
    logprobs = ended.outcomes["greedy-1"].logprobs
    assert [(each.logprob, each.top_token_ids) for each in logprobs] == [
        (0.0, (token,)) for token in said["greedy-1"]
    ]


class Hand:
    """A model runner that is stepped by hand, with one request of 40 tokens in blocks 4, 2 and 7."""

    def __init__(self) -> None:
        self.forward = make_forward(num_blocks=16, block_size=16)
        self.runner = ModelRunner(make_config(num_blocks=16), self.forward, StandInSampler())
        self.num_computed = 0
        request = Request(request_id="r", prompt_token_ids=tuple(range(40)), sampling=SamplingParams())
        self.admitted: tuple[AdmittedRequest, ...] = (AdmittedRequest(request, (), (4, 2, 7)),)

    def step(self, num_new: int) -> int:
        row = ScheduledRequest("r", self.num_computed, num_new, (), samples=True)
        result = self.runner.execute(SchedulerOutput(0, (row,), self.admitted, (), BatchShape()))
        self.admitted = ()
        self.num_computed += num_new
        ((token_id,),) = result.sampled_token_ids
        return token_id


def lose(entries: Any) -> None:
    entries[4] = 0


def swap(entries: Any) -> None:
    entries[[4, 2]] = entries[[2, 4]]


def double(entries: Any) -> None:
    entries[2] = entries[4]


def change_one(entries: Any) -> None:
    entries[4, 3] ^= np.uint64(1)


@pytest.mark.parametrize("harm", [lose, swap, double, change_one])
def test_a_wrong_block_changes_the_next_token(harm: Any) -> None:
    right, wrong = Hand(), Hand()
    assert right.step(40) == wrong.step(40)
    assert right.step(1) == wrong.step(1)
    harm(wrong.forward.cache.entries_BS)
    assert right.step(1) != wrong.step(1)


def test_its_steps_are_those_that_were_planned() -> None:
    seen: list[BatchShape] = []

    def step_seconds(shape: BatchShape) -> float:
        seen.append(shape)
        return 0.0

    ended = run(make_requests(), step_seconds=step_seconds, num_blocks=20, max_num_batched_tokens=50)
    assert seen == [scheduled.shape for scheduled, _ in ended.steps if scheduled.rows]


@pytest.mark.alone
def test_steps_take_the_predicted_time() -> None:
    """On a machine that is busy with other things many take longer."""
    forward = make_forward(num_blocks=128, block_size=16, step_seconds=lambda shape: 0.004)
    times = []

    class Timed:
        config, device = forward.config, forward.device

        def run(self, inputs: Any, *, wants_logits: bool) -> Any:
            start = time.monotonic()
            logits = forward.run(inputs, wants_logits=wants_logits)
            times.append(time.monotonic() - start)
            return logits

    runs.run(lambda **_: Timed(), [make_request("r", range(30), 100)], sampler=StandInSampler())  # type: ignore[arg-type]
    assert len(times) == 100
    assert mean(times) >= 0.0038
    assert 0.0038 <= sorted(times)[25] <= 0.0045


class TestConfiguration:
    def config(self, path: Path, name: str = "Llama-3.1-8B", **changes: Any) -> EngineConfig:
        values: dict[str, Any] = {"load_format": "stand-in", "device": "h100-sxm", "limits": LIMITS}
        return EngineConfig(model=find_stand_in(name, tokenizer=path), **values | changes)

    def test_an_8b_on_an_h100(self, smollm2_gguf: Path) -> None:
        lines: list[str] = []
        core, info = build_engine(self.config(smollm2_gguf), lines.append)
        assert (info.model_name, info.architecture) == ("Llama-3.1-8B", "stand-in")
        assert info.vocab_size == 49152
        assert info.limits == ReplicaLimits(
            device="h100-sxm",
            max_model_len=2048,
            max_num_seqs=8,
            num_blocks=1024,
            block_size=16,
            moves_streams=True,
        )
        assert "Llama-3.1-8B on h100-sxm" in lines[0]
        assert str(smollm2_gguf) in lines[0]
        model = core.scheduler.step_time_model
        target = FitTarget(model=find_model_spec("Llama-3.1-8B"), device=find_device("h100-sxm"))
        roofline = make_step_time_model("roofline", target)
        assert model is not None
        shape = BatchShape.of_decodes(8, 8000)
        assert model.step_time(shape) == roofline.step_time(shape) > 1e-3
        core.shutdown()

    def test_memory_is_that_of_the_device(self, smollm2_gguf: Path) -> None:
        large = SchedulerLimits(max_num_seqs=256)
        sizes = {}
        for device in ("h100-sxm", "l4"):
            core, info = build_engine(self.config(smollm2_gguf, device=device, limits=large), lambda _: None)
            sizes[device] = info.limits.num_blocks * info.limits.block_size
            core.shutdown()
        assert 350_000 < sizes["h100-sxm"] < 500_000
        assert sizes["l4"] < 50_000

    def test_two_devices_are_faster_than_one(self, smollm2_gguf: Path) -> None:
        times = []
        for tensor in (1, 2):
            core, _ = build_engine(self.config(smollm2_gguf, tensor_parallel_size=tensor), lambda _: None)
            assert core.scheduler.step_time_model is not None
            times.append(core.scheduler.step_time_model.step_time(BatchShape.of_decodes(8, 8000)))
            core.shutdown()
        assert times[1] < 0.7 * times[0]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"device": "auto"}, r"--device, one of .*h100-sxm"),
            ({"device": "h100"}, r"'h100': .* h100"),
            ({"name": "Llama-9"}, r"unknown model 'Llama-9'"),
            ({"dtype": "float64"}, r"no step-time model knows float64"),
            ({"backend": "torch"}, r"but --backend"),
            ({"threads": 2}, r"--threads"),
            ({"quantization": "int8"}, r"--quantization int8"),
            ({"step_time_profile": "calibrate"}, r"choose one of auto, roofline, none"),
            (
                {"device": "l4", "name": "Llama-3.1-70B"},
                r"--tensor-parallel-size 8$",
            ),
            (
                {"device": "l4", "limits": SchedulerLimits(max_model_len=65536)},
                r"needs 24.3 .* 21.6.* .* --tensor-parallel-size 2$",
            ),
            (
                {"device": "l4", "dtype": "float32"},
                r"--tensor-parallel-size 2, or --dtype bfloat16$",
            ),
            ({"kv_cache_memory_bytes": 1000}, r"hold no block"),
            ({"memory_share": MemoryShare(20 << 30, 400)}, r"128 MiB, .* 20480 MiB .* use --replicas 160$"),
        ],
        ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
    )
    def test_what_has_no_meaning_is_refused(
        self, smollm2_gguf: Path, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            build_engine(self.config(smollm2_gguf, **changes), lambda _: None)

    def test_a_directory_with_a_configuration_alone(self, tmp_path: Path, smollm2_gguf: Path) -> None:
        sizes = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
        sizes |= {"intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 512}
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        assert find_stand_in(str(tmp_path)).path == smollm2_gguf
        with LLM(str(tmp_path), load_format="stand-in", device="l4") as llm:
            assert llm.info.limits.max_model_len == 512
            first, second = (llm.generate(["Hello"], SamplingParams(max_tokens=9)) for _ in range(2))
            assert first[0].token_ids == second[0].token_ids
            assert len(first[0].token_ids) == 9
            assert len(first[0].text) > 9


LIMITS = SchedulerLimits(max_model_len=2048, max_num_seqs=8)
