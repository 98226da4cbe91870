"""What a device chooses for rows of any parameters is what the sampler on the host chooses."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import SamplingParams
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.engine.cuda.choice import Choice
from onbeat.engine.cuda.forward import kernel_sizes
from onbeat.engine.cuda.stream import CpuStream
from onbeat.engine.executor import PendingStep
from onbeat.engine.grammar_port import GrammarPort
from onbeat.engine.guided_draw import begin_guide
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.random_stream import uniform
from onbeat.engine.sampled import BestTokens, SampledTokens
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.torch.kernels import BestBuffers, DrawParams
from onbeat.text.grammar.source import choice_grammar, json_grammar, regex_grammar
from tests.cpu.engine.cuda.fake_stream import FakeStream
from tests.cpu.engine.cuda.test_overlap import (
    VOCAB_SIZE,
    Plan,
    make_runner,
    on_fake_device,
    on_reference,
    weights,
)
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.grammars import TINY_EOS, make_tiny_compiler

GUIDES = GrammarPort(make_tiny_compiler)
GRAMMARS = (
    json_grammar(True),
    json_grammar({"type": "array", "items": {"type": "integer"}}),
    regex_grammar("[a-f]{3,9}(12)*"),
    choice_grammar(["abc", "abd", "b12"]),
)
TOKENS = st.integers(0, VOCAB_SIZE - 1)
CUTS: list[dict[str, Any]] = [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.7}]
PARAMS = st.builds(
    lambda cut, named, **fields: SamplingParams(**cut, **named, **fields),
    cut=st.sampled_from(CUTS),
    named=st.sampled_from(
        [
            {},
            {},
            {"num_logprobs": 0},
            {"num_logprobs": 5},
            {"num_logprobs": 0, "logprob_token_ids": (3, 9, 200)},
        ]
    ),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    seed=st.integers(0, 99),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 1e-30]),
    logit_bias=st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, 3.5])), max_size=3).map(tuple),
    allowed_token_ids=st.one_of(st.just(()), st.lists(TOKENS, max_size=9).map(tuple)),
    bad_words=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 0, 4]),
    stop_token_ids=st.sampled_from([(), (TINY_EOS,), (TINY_EOS, 5)]),
    max_tokens=st.just(30),
    grammar=st.sampled_from([None, None, *GRAMMARS]),
)


@functools.cache
def kernels() -> ReferenceKernels:
    return ReferenceKernels(kernel_sizes(weights(), on_fake_device(CpuStream()).options))


def rows_of(params: Sequence[SamplingParams], outputs: Sequence[Sequence[int]]) -> list[SamplingRow]:
    rows = [SamplingRow(each, (3, 4, 4, 5), [*out]) for each, out in zip(params, outputs, strict=True)]
    for row in rows:
        begin_guide(row, GUIDES)
    return rows


def chosen_on_device(logits: np.ndarray, rows: list[SamplingRow]) -> SampledTokens:
    """Choose as a step does whose rows of logits lie in another order, with one of padding before them."""
    places = np.arange(len(rows), 0, -1)
    logits_NV = torch.from_numpy(np.concatenate([logits[:1], logits[::-1]]))
    best = BestBuffers(torch.zeros(len(places) + 1, dtype=torch.int32), torch.zeros(len(places) + 1))
    settings = np.zeros((5, len(places) + 1))
    settings[2] = 1.0
    for place, row in zip(places.tolist(), rows, strict=True):
        each = row.params
        temperature = 0.0 if row.is_greedy else each.temperature
        number = uniform(each.seed, row.position)
        settings[:, place] = temperature, each.top_k, each.top_p, each.min_p, number
    temperatures, top_ks, top_ps, min_ps, numbers = torch.from_numpy(settings)
    draws = DrawParams(temperatures, top_ks.int(), top_ps, min_ps, numbers)
    before = logits_NV.clone()
    kernels().best(logits_NV, best)
    choice = Choice(rows, places, VOCAB_SIZE, FakeStream())
    choice.queue(kernels(), logits_NV, best, draws if temperatures.any() else None)
    torch.testing.assert_close(logits_NV, before, rtol=0, atol=0, equal_nan=True)
    ids, peaks = best.ids_R.numpy()[places].astype(np.int64), best.peaks_R.numpy()[places]
    return Sampler(VOCAB_SIZE).sample(None, rows, choice.told(BestTokens(ids, peaks)))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@given(
    params=st.lists(PARAMS, min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    broken=st.sampled_from([None, None, None, math.nan, -math.inf]),
    data=st.data(),
)
def test_a_mix_of_rows_gets_what_the_host_gives_each(
    kind: type[np.floating],
    params: list[SamplingParams],
    seed: int,
    broken: float | None,
    data: st.DataObject,
) -> None:
    if kind is np.float32:  # beyond the largest number
        tiny = {1e-30: 1e-300}
        params = [
            replace(each, repetition_penalty=tiny.get(each.repetition_penalty, each.repetition_penalty))
            for each in params
        ]
    outputs = [
        data.draw(st.lists(st.integers(0, 9), max_size=5)) if each.grammar is None else [] for each in params
    ]
    # Rounded, so that there are equals.
    logits = (
        (4 * np.random.default_rng(seed).standard_normal((len(params), VOCAB_SIZE))).round(1).astype(kind)
    )
    if broken is not None:
        logits[0] = broken
    on_host, on_device = rows_of(params, outputs), rows_of(params, outputs)
    expected = Sampler(VOCAB_SIZE).sample(logits.copy(), on_host)
    found = chosen_on_device(logits, on_device)
    assert found.token_ids == expected.token_ids
    if broken == -math.inf:  # said as of NaN: -inf stands for what the parameters leave
        expected.errors = {key: text.replace("-inf", "nan") for key, text in expected.errors.items()}
    assert found.errors == expected.errors
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        if theirs is None or ours is None:
            assert ours is theirs
            continue
        assert (ours.token_id, ours.top_token_ids, ours.rank) == (
            theirs.token_id,
            theirs.top_token_ids,
            theirs.rank,
        )
        assert [ours.logprob, *ours.top_logprobs] == pytest.approx(
            [theirs.logprob, *theirs.top_logprobs], abs=1e-5
        )
    faults = [None if each.guides is None else each.guides.faults for each in (found, expected)]
    assert (faults[0] or {}) == (faults[1] or {})
    if expected.guides is not None and found.guides is not None:
        assert found.guides.num_redrawn == expected.guides.num_redrawn
    stand = [[row.guide.allowed().tolist() for row in rows if row.guide] for rows in (on_host, on_device)]
    assert stand[0] == stand[1]


STOPS = (TINY_EOS,)
STATIC = (
    SamplingParams(temperature=0.0, num_logprobs=3),
    SamplingParams(temperature=0.9, num_logprobs=0, logprob_token_ids=(4, 77), seed=1),
    SamplingParams(temperature=1.1, logit_bias=((9, 4.0), (12, -100.0)), top_p=0.9, seed=2),
    SamplingParams(temperature=0.7, allowed_token_ids=tuple(range(20, 60)), top_k=5, seed=3),
)
"""Nothing of these depends on the tokens so far."""
MIXED = (
    *STATIC,
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=1, seed=4),
    SamplingParams(temperature=1.5, min_tokens=6, stop_token_ids=tuple(range(100)), seed=5),
    SamplingParams(temperature=1.0, bad_words=((7, 9), (30,), (30, 31, 32)), min_p=0.02, seed=6),
    SamplingParams(temperature=0.0, grammar=GRAMMARS[0], stop_token_ids=STOPS),
    SamplingParams(
        temperature=1.2, grammar=GRAMMARS[1], num_logprobs=2, top_p=0.95, seed=7, stop_token_ids=STOPS
    ),
    SamplingParams(temperature=1.0, grammar=GRAMMARS[2], presence_penalty=0.5, seed=8, stop_token_ids=STOPS),
    SamplingParams(temperature=1.0, bad_words=((1,),), allowed_token_ids=(1,), seed=9),  # leaves nothing
)


def outputs_of(runner: ModelRunner, steps: list[SchedulerOutput], depth: int) -> list[ModelRunnerOutput]:
    """Run planned steps, so many under way at once."""
    runner.guides = GUIDES
    outputs, under_way = [], deque[PendingStep]()
    for scheduled in steps:
        if len(under_way) == depth:
            outputs.append(under_way.popleft().result())
        under_way.append(runner.launch(scheduled))
    return outputs + [pending.result() for pending in under_way]


@pytest.mark.parametrize("seed", range(6))
def test_steps_under_way_at_once_choose_what_steps_one_by_one_do(seed: int) -> None:
    steps = Plan(seed, MIXED).steps(60)
    stream = FakeStream()
    found = outputs_of(make_runner(on_fake_device(stream)), steps, 2)
    expected = outputs_of(make_runner(on_reference()), steps, 1)
    assert stream.most_behind >= 3  # a step is computed behind one whose tokens it needs
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.sampled_token_ids == theirs.sampled_token_ids
        assert ours.failed == theirs.failed
        for each in (ours, theirs):
            assert [] in each.sampled_token_ids or each.guided is None or not each.guided.faults
        (ids, values), (their_ids, their_values) = reports_of(ours), reports_of(theirs)
        assert ids == their_ids
        assert values == pytest.approx(their_values, abs=1e-6)
        guided = [each.guided for each in (ours, theirs)]
        assert (guided[0] is None) == (guided[1] is None)
        if guided[0] and guided[1]:
            assert guided[0][:3] == guided[1][:3]


def reports_of(output: ModelRunnerOutput) -> tuple[list[Any], list[float]]:
    """Return which tokens are reported for each row, and their log-probabilities."""
    reports = [report for each in output.logprobs or () for report in each or (None,)]
    told = [report for report in reports if report is not None]
    ids = [None if report is None else (report.token_id, report.top_token_ids) for report in reports]
    return ids, [value for report in told for value in (report.logprob, *report.top_logprobs)]


def test_a_step_whose_rows_need_no_tokens_waits_for_none() -> None:
    """With two steps under way, the device has both before the host waits for the first."""
    stream = FakeStream()
    runner = make_runner(on_fake_device(stream))
    num_done = stream.num_done
    first, second, *_ = [step for step in Plan(3, STATIC).steps(30) if any(row.samples for row in step.rows)]
    runner.launch(first)
    runner.launch(second)
    assert stream.num_done == num_done
