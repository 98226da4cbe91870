"""Logits come to the host for nothing but what the GPU cannot do: with drafts, without, and to make some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from onbeat.core.request import Request, SamplingParams
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import EagerGraphs
from onbeat.engine.forward import StepLogits
from onbeat.engine.input_batch import StepInputs
from tests.cpu.engine.cuda.fake_stream import FakeStream
from tests.cpu.engine.cuda.test_overlap import SERIAL_SETTINGS, SETTINGS, requests_of, weights
from tests.cpu.engine.forwards import MakeForward, on_torch
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.cpu.engine.tiny_models import tiny_model
from tests.cpu.speculation import drafting
from tests.cpu.speculation.runs import Run, ScriptedProposer, answers, assert_same, fixed, run


class CopyingForward(CudaForward):
    """Notes of each step how many rows of logits came to the host, and how many tokens need them there."""

    copied: tuple[tuple[int, int], ...] = ()

    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        owners = np.arange(len(inputs.sampling_rows)) if inputs.waves is None else inputs.waves[1]
        num_needed = sum(not inputs.sampling_rows[row].is_plain for row in owners)
        num_scored = len(inputs.sampling_tokens) - len(owners)
        logits = super().run(inputs, wants_logits=wants_logits)
        num_copied = 0 if logits.values_RV is None else len(logits.values_RV)
        self.copied += ((num_copied, num_needed + num_scored),)
        return logits


class Copying:
    """Makes such forward passes, on a device that does nothing until it is waited for."""

    def __init__(self) -> None:
        self.forwards: list[CopyingForward] = []

    def __call__(self, *, num_blocks: int, block_size: int) -> CudaForward:
        options = CudaOptions(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=10,
            max_model_len=256,
            max_num_batched_tokens=512,
        )
        kernels = ReferenceKernels(kernel_sizes(weights(), options))
        forward = CopyingForward(weights(), kernels, EagerGraphs(), options, stream=FakeStream())
        self.forwards.append(forward)
        return forward

    def counts(self) -> list[tuple[int, int]]:
        return [each for forward in self.forwards for each in forward.copied]


def prompt_logprobs(done: Run) -> dict[str, list[float]]:
    return {
        key: [each.logprob for each in found]
        for _, output in done.steps
        for key, found in (output.prompt_logprobs or {}).items()
    }


def check_drafts(make: MakeForward, requests: Sequence[Request], num_drafts: int) -> tuple[Run, Run]:
    """Serve requests with drafts, some of them wrong, and on the reference without any; compare tokens."""
    expected = run(on_torch(tiny_model("llama3").weights), requests)
    if not num_drafts:
        done = run(make, requests)
    else:
        script = ScriptedProposer(answers(requests, expected), right=lambda position: position % 5 != 0)
        done = run(make, requests, speculation=fixed(num_drafts), proposer=script)
        assert 0 < done.num_accepted < done.num_drafted
    assert_same(done, expected)
    return done, expected


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("num_prompt_logprobs", [None, 2])
@pytest.mark.parametrize("others", [(), SERIAL_SETTINGS])
def test_tokens_are_the_same_and_no_more_logits_are_copied_than_are_needed(
    others: tuple[SamplingParams, ...], num_prompt_logprobs: int | None, drafts: bool
) -> None:
    requests = requests_of(SETTINGS + others, 30)
    requests[1::2] = [replace(each, num_prompt_logprobs=num_prompt_logprobs) for each in requests[1::2]]
    make = Copying()
    done, expected = check_drafts(make, requests, 4 * drafts)
    scored = {key: pytest.approx(values) for key, values in prompt_logprobs(expected).items()}
    assert prompt_logprobs(done) == scored
    counts = make.counts()
    assert [num_copied for num_copied, _ in counts] == [num_needed for _, num_needed in counts]
    assert any(num_copied for num_copied, _ in counts) == bool((others and drafts) or num_prompt_logprobs)


def test_a_draft_model_draws_its_drafts_on_the_gpu() -> None:
    """It is the model itself, and so guesses every token."""
    requests = [(each.prompt_token_ids, each.sampling) for each in requests_of(SETTINGS, 24)]
    expected = drafting.serve(on_torch(tiny_model("llama3").weights), None, requests, drafting.Setting())
    make = Copying()
    done = drafting.serve(make, drafting.by_draft_model(make), requests, drafting.Setting())
    assert done.tokens == expected.tokens
    assert done.acceptance == 1.0
    assert len(make.forwards) == 2
    assert not any(num_copied for num_copied, _ in make.counts())
