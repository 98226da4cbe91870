"""In float32, greedy tokens of SmolLM2-135M equal transformers' under every policy.

The rule of exactness: a token may differ only where the reference's two largest logits are closer than 1e-4
(what float32 allows when sums run in another order); such places are counted, at most 1 in 10,000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.text.tokenizer import load_tokenizer
from tests.cpu.engine.forwards import MakeForward, on_native, on_torch
from tests.cpu.engine.tiny_models import Reference
from tests.cpu.gguf_reading import read_once
from tests.cpu.golden.engine_run import Outcome, Setting, run_engine
from tests.cpu.golden.test_policies_tiny import MIXING

pytestmark = pytest.mark.golden

MAX_TOKENS = 16
MAX_MODEL_LEN = 1536
ALL_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 50, 64, 100, 128, 200, 257, 333, 512, 640, 900, 1200, 1500)
FAST_LENGTHS = (1, 16, 50, 130)
TIE_GAP = 1e-4
TEXT = Path(__file__).parents[3] / "LICENSE"


class Answers:
    """transformers' greedy continuation of slices of a text, and how near the second choice was."""

    def __init__(self, gguf: Path) -> None:
        self.model = Reference(read_hf_model(gguf))
        self.token_ids = load_tokenizer(gguf).encode(TEXT.read_text(encoding="utf-8"))

    def prompt(self, length: int) -> list[int]:
        start = 11 * length % 300
        return self.token_ids[start : start + length]

    def answer(self, length: int, guess: Sequence[int]) -> tuple[list[int], list[float]]:
        """Return tokens and gaps."""
        token_ids, logits = self.model.reference(self.prompt(length), MAX_TOKENS, guess)
        top_two = logits.topk(2).values
        return token_ids, (top_two[:, 0] - top_two[:, 1]).tolist()


def read_hf_model(gguf: Path) -> Any:
    """Build transformers' model from its own reading of the file."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with read_once() as patch:
        for name in ("normal_", "uniform_"):  # random weights, which the file's take the place of
            patch.setattr(torch.Tensor, name, lambda tensor, *_, **__: tensor)
        config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Answers:
    return Answers(smollm2_gguf)


@pytest.fixture(scope="module", params=["torch", "native"])
def make_forward(request: pytest.FixtureRequest, smollm2_gguf: Path) -> MakeForward:
    checkpoint = open_checkpoint(ModelFiles(kind="gguf", path=smollm2_gguf, name="smollm2"))
    if request.param == "torch":
        return on_torch(load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu")))
    return on_native(request.getfixturevalue("native_library"), checkpoint)


def check(
    reference: Answers, make_forward: MakeForward, lengths: tuple[int, ...], setting: Setting
) -> Outcome:
    prompts = [reference.prompt(length) for length in lengths]
    outcome = run_engine(make_forward, prompts, MAX_TOKENS, setting, max_model_len=MAX_MODEL_LEN)
    num_ties = 0
    for length, tokens in zip(lengths * setting.repeats, outcome.tokens, strict=True):
        expected, gaps = reference.answer(length, tokens)
        if tokens != expected:
            first = next(i for i in range(MAX_TOKENS) if tokens[i] != expected[i])
            assert gaps[first] < TIE_GAP, f"prompt of {length} tokens differs at token {first}"
            num_ties += 1
    assert num_ties <= max(1, len(outcome.tokens) * MAX_TOKENS // 10_000)
    return outcome


WHOLE_PROMPTS = Setting(policy="static")
CHUNKS = Setting(policy="sarathi", budget=64, arrivals=2, depth=2)
OBJECTIVES = Setting(policy="slo", arrivals=2, depth=2)


@pytest.mark.parametrize("make_forward", ["native"], indirect=True)
@pytest.mark.parametrize(
    "setting",
    [
        WHOLE_PROMPTS,
        Setting(policy="orca", arrivals=2),
        Setting(policy="prefill-first", arrivals=2),
        CHUNKS,
        OBJECTIVES,
    ],
    ids=str,
)
def test_some_prompts(reference: Answers, make_forward: MakeForward, setting: Setting):
    check(reference, make_forward, FAST_LENGTHS, setting)


@pytest.mark.parametrize("make_forward", ["torch"], indirect=True)
@pytest.mark.parametrize(
    "setting",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (WHOLE_PROMPTS, OBJECTIVES)), CHUNKS],
    ids=str,
)
def test_some_prompts_with_torch(reference: Answers, make_forward: MakeForward, setting: Setting):
    """Steps of chunks, of decodes and of both: all policies run with the tiny models."""
    check(reference, make_forward, FAST_LENGTHS, setting)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting(policy="static", num_blocks=800),
        Setting(policy="orca", arrivals=1, num_blocks=800),
        Setting(policy="prefill-first", arrivals=1, num_blocks=800),
        Setting(policy="sarathi", budget=64, arrivals=2, num_blocks=800),
        Setting(policy="sarathi", budget=512, arrivals=1, num_blocks=800, max_num_seqs=20),
        Setting(policy="sarathi", budget=512, arrivals=1, num_blocks=800, depth=2),
        Setting(policy="slo", arrivals=1, num_blocks=800),
        Setting(policy="slo", arrivals=1, num_blocks=800, max_num_seqs=20, depth=2),
        Setting(policy="edf", budget=64, arrivals=2, num_blocks=800),
    ],
    ids=str,
)
def test_all_prompts(reference: Answers, make_forward: MakeForward, setting: Setting):
    outcome = check(reference, make_forward, ALL_LENGTHS, setting)
    if setting.policy in MIXING:
        assert outcome.num_mixed_steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_all_prompts_with_prefix_hits(reference: Answers, make_forward: MakeForward, policy: str):
    budget = 512 if policy == "sarathi" else None
    setting = Setting(policy=policy, budget=budget, num_blocks=1000, repeats=2)
    outcome = check(reference, make_forward, ALL_LENGTHS, setting)
    assert outcome.num_prefix_hits > 4000


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["prefill-first", "sarathi", "slo"])
def test_all_prompts_with_forced_preemption(reference: Answers, make_forward: MakeForward, policy: str):
    budget = 64 if policy == "sarathi" else None
    setting = Setting(policy=policy, budget=budget, num_blocks=97, max_num_seqs=20)
    outcome = check(reference, make_forward, ALL_LENGTHS, setting)
    assert outcome.num_preemptions > 0
