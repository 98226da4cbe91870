"""Drafts by the first layers: they change no token, and are those of a model that has these layers alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from onbeat.core.request import Request
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.forward import ForwardPass
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.models.registry import build_model
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.early_exit import EarlyExitProposer
from onbeat.engine.speculation.proposer import DraftRow, Proposer
from onbeat.scheduler.config import SchedulerConfig
from tests.cpu.engine.engines import NativeEngine, TinyEngine
from tests.cpu.engine.forwards import MakeForward, on_native, on_torch
from tests.cpu.engine.tiny_models import FAMILIES, StateCheckpoint, hf_tiny_model, random_prompt
from tests.cpu.speculation.drafting import GREEDY, MakeProposer, Setting, make_near, prompts, serve
from tests.cpu.speculation.test_draft_model import (
    LENGTHS,
    PENALISED,
    SAMPLED_REQUESTS,
    SETTINGS,
    SHORT_OF_MEMORY,
)


def by_first_layers(num_layers: int) -> MakeProposer:
    def make(forward: ForwardPass, limits: SchedulerConfig) -> Proposer:
        return EarlyExitProposer(forward, num_layers)  # type: ignore[arg-type]

    return make


def make_first_layers(engine: TinyEngine, name: str, num_layers: int) -> MakeForward:
    """Return what makes forward passes of a model that has only the first layers of a tiny one."""
    checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float32))
    config = checkpoint.config
    checkpoint.config = replace(
        config, num_layers=num_layers, sliding_layers=config.sliding_layers[:num_layers]
    )
    if isinstance(engine, NativeEngine):
        return on_native(engine.library, checkpoint, dtype=torch.float32)
    return on_torch(build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu")))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_greedy_tokens_are_those_without_drafts(engine: TinyEngine, setting: Setting) -> None:
    requests = prompts(SHORT_OF_MEMORY if setting.num_blocks < 100 else LENGTHS)
    target = make_near(engine, "llama3")
    plain = serve(target, None, requests, setting)
    drafted = serve(target, by_first_layers(1), requests, setting)
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.acceptance < 1
    assert drafted.num_mixed_steps > 0
    assert (drafted.num_preemptions > 0) == (setting.num_blocks < 100)
    assert (drafted.num_prefix_hits > 150) == (setting.repeats > 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_drafts_for_itself(engine: TinyEngine, name: str) -> None:
    requests = prompts(LENGTHS[:4])
    target = make_near(engine, name)
    plain = serve(target, None, requests, Setting(num_drafts=7, depth=2))
    drafted = serve(target, by_first_layers(1), requests, Setting(num_drafts=7, depth=2))
    assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("requests", [SAMPLED_REQUESTS, PENALISED], ids=["plain", "penalised"])
def test_sampled_tokens_are_those_without_drafts(engine: TinyEngine, requests) -> None:
    target = make_near(engine, "llama3")
    plain = serve(target, None, requests, Setting())
    drafted = serve(target, by_first_layers(1), requests, Setting(depth=2))
    assert drafted.tokens == plain.tokens
    assert drafted.num_accepted > 0


@pytest.mark.parametrize("setting", [Setting(), Setting(num_drafts=7, depth=2, repeats=2)], ids=str)
@pytest.mark.parametrize("requests", [prompts(LENGTHS), SAMPLED_REQUESTS], ids=["greedy", "sampled"])
def test_all_layers_agree_with_the_model_on_every_token(
    engine: TinyEngine, setting: Setting, requests
) -> None:
    outcome = serve(make_near(engine, "llama3"), by_first_layers(2), requests, setting)
    assert outcome.num_accepted == outcome.num_drafted > 50


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_layers_are_a_model_of_their_own(engine: TinyEngine, name: str) -> None:
    """After a prompt that the whole model ran, they say what a model without the other layers says."""
    prompt = random_prompt(37)
    whole, first = make_near(engine, name), make_first_layers(engine, name, 1)
    layered, layered_logits = _run_prompt(whole(num_blocks=8, block_size=16), prompt)
    alone, expected = _run_prompt(first(num_blocks=8, block_size=16), prompt)
    assert (layered_logits - expected).norm() > 0.1 * expected.norm()
    row = DraftRow(0, len(prompt), 4)
    drafts = EarlyExitProposer(layered.forward, 1).propose(layered.batch, [row])  # type: ignore[arg-type]
    assert drafts == EarlyExitProposer(alone.forward, 1).propose(alone.batch, [row])  # type: ignore[arg-type]
    assert len(drafts[0]) == 4


def _run_prompt(forward: ForwardPass, prompt: list[int]) -> tuple[ModelRunner, torch.Tensor]:
    """Run a prompt in slot 0; return the runner, and the logits behind the prompt."""
    sampler = _KeepingSampler(forward.config.vocab_size, forward.device)
    runner = ModelRunner(
        forward=forward, num_blocks=8, block_size=16, max_num_seqs=1, max_model_len=64, sampler=sampler
    )
    request = Request(request_id="a", prompt_token_ids=tuple(prompt), sampling=GREEDY)
    runner.execute(
        SchedulerOutput(
            0,
            (ScheduledRequest("a", 0, len(prompt), (), samples=True),),
            (AdmittedRequest(request, (), (3, 1, 2)),),
            (),
            BatchShape(),
        )
    )
    return runner, sampler.logits


class _KeepingSampler(Sampler):
    logits: torch.Tensor

    def needs_logits(self, rows) -> bool:
        return True

    def sample(self, logits_RV, rows, best=None):
        self.logits = logits_RV.clone()
        return super().sample(logits_RV, rows, best)


def test_rejected_drafts_leave_nothing_behind(engine: TinyEngine) -> None:
    """The model goes on as if there had been none."""
    prompt = random_prompt(20)
    logits = []
    for num_drafts in (0, 6):
        runner, _ = _run_prompt(make_near(engine, "llama3")(num_blocks=8, block_size=16), prompt)
        if num_drafts:
            proposer = EarlyExitProposer(runner.forward, 1)  # type: ignore[arg-type]
            proposer.propose(runner.batch, [DraftRow(0, 21, num_drafts)])
        runner.execute(
            SchedulerOutput(1, (ScheduledRequest("a", 20, 1, (), samples=True),), (), (), BatchShape())
        )
        assert isinstance(runner.sampler, _KeepingSampler)
        logits.append(runner.sampler.logits.numpy())
    np.testing.assert_array_equal(logits[0], logits[1])
