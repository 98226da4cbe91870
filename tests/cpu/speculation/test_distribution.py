"""Drafts leave the distribution of sampled tokens as it is: a Markov chain, whose distribution is known."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from scipy.stats import binomtest, chi2_contingency, chisquare

from onbeat.engine.device import CPU
from onbeat.engine.draw import Floats
from onbeat.engine.forward import ForwardPass, StepLogits
from onbeat.engine.input_batch import IntArray, StepInputs
from onbeat.engine.model_config.architecture import ModelConfig, RopeConfig
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.proposer import Proposer
from tests.cpu.speculation.runs import Run, ScriptedProposer, fixed, make_request, ngram, run

VOCAB = 6

NUM_REQUESTS = 1500
NUM_TOKENS = 5
PROMPT = (1, 2, 0, 1, 2, 3, 1)


class MarkovForward(ForwardPass):
    """A model whose logits depend on the last token alone."""

    device = CPU
    settings: Mapping[str, str] = {}
    config = ModelConfig(  # with as many logits; nobody asks a Markov chain for layers
        family="llama",
        architecture="markov",
        vocab_size=VOCAB,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
    )

    def __init__(self) -> None:
        generator = np.random.default_rng(3)
        self.logits_VV = generator.normal(0.0, 1.0, (VOCAB, VOCAB)).astype(np.float32)

    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        if not len(inputs.sampling_tokens):
            return StepLogits(None)
        return StepLogits(self.logits_VV[inputs.token_ids_T[inputs.sampling_tokens]])

    def scrub(self, block_ids: IntArray) -> None: ...

    def transitions(self, temperature: float) -> Floats:
        weights_VV: Floats = np.exp(self.logits_VV.astype(np.float64) / temperature)
        weights_VV /= weights_VV.sum(axis=-1, keepdims=True)
        return weights_VV


def sample(
    temperature: float, *, first_seed: int, num_drafts: int = 0, proposer: Proposer | None = None
) -> Run:
    """Generate for the same prompt with many seeds."""
    requests = [
        make_request(str(seed), PROMPT, NUM_TOKENS, seed=seed, temperature=temperature)
        for seed in range(first_seed, first_seed + NUM_REQUESTS)
    ]
    return run(
        lambda *, num_blocks, block_size: MarkovForward(),
        requests,
        speculation=fixed(num_drafts) if num_drafts else None,
        proposer=proposer,
        sampler=Sampler(VOCAB),
        max_num_seqs=64,
        max_num_batched_tokens=1024,
    )


@functools.cache
def plain(temperature: float) -> Run:
    return sample(temperature, first_seed=20_000)


def likely_chain() -> list[int]:
    """Return the tokens that follow the prompt if each is the most likely one."""
    best = MarkovForward().logits_VV.argmax(axis=-1).tolist()
    chain = [PROMPT[-1]]
    for _ in range(20):
        chain.append(best[chain[-1]])
    return chain[1:]


def proposers(num_drafts: int) -> dict[str, Proposer]:
    chain = likely_chain()
    return {
        "ngram": ngram(num_drafts),
        "likely": ScriptedProposer(lambda row: chain),
        "one-token": ScriptedProposer(lambda row: [4] * 20),
    }


def counts(outputs: Run, start: int) -> list[int]:
    """Count pairs of tokens at an output position and the next."""
    pairs = Counter(tuple(ids[start : start + 2]) for ids in outputs.token_ids.values())
    return [pairs[first, second] for first in range(VOCAB) for second in range(VOCAB)]


@pytest.mark.parametrize("name", ["ngram", "likely", "one-token"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_tokens_have_the_distribution_of_the_model(name: str, temperature: float) -> None:
    speculated = sample(temperature, first_seed=10_000, num_drafts=3, proposer=proposers(3)[name])
    assert speculated.num_drafted > NUM_REQUESTS
    transitions = MarkovForward().transitions(temperature)
    reached = transitions[PROMPT[-1]]
    for start in range(NUM_TOKENS - 1):
        expected = (reached[:, None] * transitions).reshape(-1) * NUM_REQUESTS
        reached = reached @ transitions
        seen = expected > 3  # rarer pairs are counted together: chi-square is an approximation for many
        for outputs in (speculated, plain(temperature)):
            observed = np.array(counts(outputs, start))
            grouped = [np.append(part[seen], part[~seen].sum()) for part in (observed, expected)]
            assert chisquare(*grouped).pvalue > 1e-3
        table = np.array([counts(speculated, start), counts(plain(temperature), start)])
        assert chi2_contingency(table[:, table.sum(axis=0) > 8]).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_draft_is_accepted_as_often_as_the_model_would_sample_it(temperature: float) -> None:
    speculated = sample(temperature, first_seed=0, num_drafts=1, proposer=proposers(1)["one-token"])
    # Every step is a trial: token 4 is drafted, and accepted with the probability that the model gives it.
    probability = MarkovForward().transitions(temperature)
    trials: list[tuple[float, bool]] = []
    for ids in speculated.token_ids.values():
        position = 0
        while position + 2 < NUM_TOKENS:  # the last token of a request is never drafted
            trials.append((probability[ids[position], 4], ids[position + 1] == 4))
            position += 1 + (ids[position + 1] == 4)
    num_accepted = sum(accepted for _, accepted in trials)
    assert speculated.num_accepted == num_accepted
    assert speculated.num_drafted == len(trials)
    mean = sum(p for p, _ in trials) / len(trials)
    assert binomtest(num_accepted, len(trials), mean).pvalue > 1e-3


def test_outputs_are_equal_with_equal_seeds() -> None:
    for name, proposer in proposers(4).items():
        speculated = sample(1.0, first_seed=20_000, num_drafts=4, proposer=proposer)
        assert speculated.token_ids == plain(1.0).token_ids, name
