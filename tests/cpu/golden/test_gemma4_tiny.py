"""Gemma 4 with prefix hits, drafts and moves gives the tokens that it gives without, on torch and native."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cpu.engine.engines import NativeEngine, TinyEngine, TorchEngine
from tests.cpu.engine.forwards import on_native
from tests.cpu.engine.gemma4_models import GEMMA4
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, random_prompt
from tests.cpu.golden.engine_run import Setting, run_and_check
from tests.cpu.golden.test_moved_streams import check_moves
from tests.cpu.speculation.runs import ScriptedProposer, answers, assert_same, fixed, make_requests, run
from tests.many_cases import each_case

pytestmark = pytest.mark.golden
every_size = each_case("name", GEMMA4)
LENGTHS = (70, 31, 128, 61, 29, 15, 16, 44)


@pytest.fixture(params=["torch", "native"])
def engine(request: pytest.FixtureRequest) -> TinyEngine:
    if request.param == "native":
        return NativeEngine(request.getfixturevalue("native_library"))
    return TorchEngine()


@pytest.mark.parametrize(("policy", "num_blocks"), [("slo", 400), ("sarathi", 17)])
@every_size
def test_prefix_hits_and_preemptions(engine: TinyEngine, name: str, policy: str, num_blocks: int) -> None:
    shared = random_prompt(90)
    prompts = [random_prompt(length) for length in LENGTHS]
    prompts += [[*shared, *random_prompt(length)] for length in (30, 31, 32)]
    setting = Setting(policy=policy, budget=24, num_blocks=num_blocks, arrivals=2, repeats=2)
    outcome = run_and_check(engine, name, prompts, 24, setting, max_model_len=192)
    assert outcome.num_prefix_hits > 600 or num_blocks < 400
    assert outcome.num_preemptions or num_blocks == 400


@every_size
def test_drafts(engine: TinyEngine, name: str) -> None:
    forward, requests = engine.make_forward(name, torch.float32), make_requests()
    expected = run(forward, requests)
    script = ScriptedProposer(answers(requests, expected), right=lambda p: p % 5 != 0 and p % 7 != 0)
    speculated = run(forward, requests, speculation=fixed(4), proposer=script)
    assert_same(speculated, expected)
    assert 0 < speculated.num_accepted < speculated.num_drafted


@every_size
def test_moves(engine: TinyEngine, name: str) -> None:
    make: Any = engine.make_forward(name)
    if isinstance(engine, NativeEngine):
        checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float64))
        make = on_native(engine.library, checkpoint, dtype=torch.bfloat16, batch_invariant=True)
    check_moves(make, make_requests(temperature=0.8, repetition_penalty=1.1))
