"""To sample first and ask the grammar afterwards is to mask first."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import SamplingParams
from onbeat.engine import sampler as sampler_module
from onbeat.engine.draw import Floats, Logits
from onbeat.engine.grammar_port import GrammarPort
from onbeat.engine.guided_draw import GuideOutcome, allowed_masks, begin_guide
from onbeat.engine.sampler import Sampler, token_logprobs
from onbeat.engine.sampling_row import SamplingRow
from onbeat.text.grammar.guide import GrammarTooComplex, ids_in
from onbeat.text.grammar.source import choice_grammar, json_grammar, regex_grammar
from tests.grammars import EOS, VOCAB_SIZE, make_compiler

COMPILER = make_compiler()
GRAMMARS = [
    json_grammar(True),
    json_grammar({"type": "object", "properties": {"ab": {"type": "boolean"}}, "required": ["ab"]}),
    json_grammar({"enum": ["ab", 12, None, "a,b"]}),
    regex_grammar(r"(ab|a{2,4}|12+)*x?"),
    choice_grammar(["abc", "abd", "b", "12"]),
]
NUM_DRAWS = 4000
MOST_SIGMAS = 4.0


def guided_row(compiler, grammar, before: bytes = b"", **params) -> SamplingRow:
    """Return a row whose answer so far is some bytes."""
    row = SamplingRow(SamplingParams(grammar=grammar, stop_token_ids=(EOS,), **params), (), list(before))
    row.guide = compiler.compile(grammar)
    assert row.guide.consume(list(before)) == len(before)
    return row


def allowed_to(row: SamplingRow) -> np.ndarray:
    outcome = GuideOutcome()
    (mask,) = allowed_masks([row], [0], outcome)
    assert not outcome.errors
    return ids_in(mask)


def logits_of(seed: int, num_rows: int = 1) -> Logits:
    row = 2 * np.random.default_rng(seed).standard_normal((1, VOCAB_SIZE), np.float32)
    return np.repeat(row, num_rows, axis=0)


@given(
    grammar=st.sampled_from(GRAMMARS), seed=st.integers(0, 10**6), num_steps=st.integers(0, 6), data=st.data()
)
def test_greedy_is_the_best_allowed_token(grammar, seed, num_steps, data):
    row = guided_row(COMPILER, grammar, temperature=0.0, max_tokens=100)
    for step in range(num_steps):
        if row.guide.is_complete:
            return
        row.output_token_ids.append(int(data.draw(st.sampled_from(row.guide.allowed().tolist()))))
        assert row.guide.accepts(row.output_token_ids[-1]), step
    if row.guide.is_complete:
        return
    allowed = allowed_to(row)
    logits = logits_of(seed)
    expected = int(allowed[logits[0][allowed].argmax()])
    sampled = Sampler(VOCAB_SIZE).sample(logits.copy(), [row])
    assert sampled.token_ids == [expected]
    assert not sampled.errors


def softmax(logits: Logits) -> Floats:
    weights: Floats = np.exp(logits.astype(np.float64) - logits.max())
    weights /= weights.sum()
    return weights


@pytest.mark.parametrize(
    ("grammar", "before"),
    [
        (GRAMMARS[0], b""),
        (GRAMMARS[0], b'{"a'),
        (GRAMMARS[2], b""),
        (GRAMMARS[3], b"ab"),
        (GRAMMARS[4], b"a"),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_random_tokens_have_the_masked_distribution(grammar, before, temperature):
    rows = [
        guided_row(COMPILER, grammar, before, temperature=temperature, seed=seed, max_tokens=100)
        for seed in range(NUM_DRAWS)
    ]
    allowed = allowed_to(rows[0])
    logits = logits_of(7, NUM_DRAWS)
    expected = np.zeros(VOCAB_SIZE)  # as a mask before the draw has it
    expected[allowed] = softmax(logits[0, allowed] / temperature)
    tokens = Sampler(VOCAB_SIZE).sample(logits, rows).token_ids
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    assert set(np.flatnonzero(counts)) <= set(allowed.tolist())
    for token_id in np.flatnonzero(expected > 2e-3):
        mean, share = NUM_DRAWS * expected[token_id], expected[token_id]
        assert abs(counts[token_id] - mean) <= MOST_SIGMAS * math.sqrt(mean * (1 - share)) + 1, token_id


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9}])
def test_truncated_draws_stay_allowed(params):
    rows = [
        guided_row(COMPILER, GRAMMARS[0], b"", temperature=1.0, seed=seed, max_tokens=100, **params)
        for seed in range(300)
    ]
    allowed = set(allowed_to(rows[0]).tolist())
    sampled = Sampler(VOCAB_SIZE).sample(logits_of(3, 300), rows)
    assert set(sampled.token_ids) <= allowed
    assert not sampled.errors


def test_free_rows_keep_their_tokens_beside_guided_ones():
    free = [SamplingRow(SamplingParams(temperature=t, seed=s), (), []) for t in (0.0, 1.0) for s in range(20)]
    sampler = Sampler(VOCAB_SIZE)
    alone = sampler.sample(logits_of(11, len(free)), free).token_ids
    guided = [guided_row(COMPILER, GRAMMARS[2], temperature=1.0, seed=s, max_tokens=9) for s in range(40)]
    mixed = [row for pair in zip(free, guided, strict=True) for row in pair]
    assert sampler.sample(logits_of(11, len(mixed)), mixed).token_ids[::2] == alone


def test_a_row_does_not_depend_on_its_batch():
    def row(seed: int) -> SamplingRow:
        return guided_row(COMPILER, GRAMMARS[0], temperature=1.0, seed=seed, max_tokens=9)

    sampler = Sampler(VOCAB_SIZE)
    together = sampler.sample(logits_of(5, 30), [row(seed) for seed in range(30)]).token_ids
    assert together == [sampler.sample(logits_of(5), [row(seed)]).token_ids[0] for seed in range(30)]


def test_an_end_is_sampled_only_where_the_grammar_may_end():
    logits = np.zeros((1, VOCAB_SIZE), np.float32)
    logits[0, EOS] = 10.0
    sampler = Sampler(VOCAB_SIZE)
    open_row = guided_row(COMPILER, GRAMMARS[3], b"", temperature=0.0)
    assert sampler.sample(logits.copy(), [open_row]).token_ids == [EOS]
    inside = guided_row(COMPILER, GRAMMARS[1], b'{"ab', temperature=0.0)
    assert sampler.sample(logits.copy(), [inside]).token_ids != [EOS]
    held = guided_row(COMPILER, GRAMMARS[3], b"", temperature=0.0, min_tokens=3)
    assert sampler.sample(logits.copy(), [held]).token_ids != [EOS]


def test_log_probabilities_are_those_of_the_model():
    row = guided_row(COMPILER, GRAMMARS[4], temperature=0.0, num_logprobs=2)
    logits = logits_of(2)
    expected = np.log(softmax(logits[0]))
    sampled = Sampler(VOCAB_SIZE).sample(logits.copy(), [row])
    (report,) = sampled.logprobs
    assert report.token_id == sampled.token_ids[0]
    assert report.logprob == pytest.approx(float(expected[report.token_id]), abs=1e-5)
    assert report.top_token_ids[0] == int(expected.argmax())


def test_log_probabilities_are_computed_for_those_who_ask(monkeypatch):
    told = []

    def noted(logits, token_id, *args, **options):
        told.append(token_id)
        return token_logprobs(logits, token_id, *args, **options)

    monkeypatch.setattr(sampler_module, "token_logprobs", noted)
    rows = [guided_row(COMPILER, GRAMMARS[0], temperature=1.0, seed=seed) for seed in range(3)]
    Sampler(VOCAB_SIZE).sample(logits_of(2, 3), rows)
    assert not told
    asking = guided_row(COMPILER, GRAMMARS[0], temperature=1.0, num_logprobs=1)
    sampled = Sampler(VOCAB_SIZE).sample(logits_of(2, 3), [*rows[1:], asking])
    assert told == sampled.token_ids[2:]
    assert [each is None for each in sampled.logprobs] == [True, True, False]


def test_a_dead_end_is_the_fault_of_its_request_alone():
    dead = guided_row(COMPILER, GRAMMARS[4], temperature=0.0, allowed_token_ids=(ord("z"),))
    other = guided_row(COMPILER, GRAMMARS[4], temperature=0.0)
    sampled = Sampler(VOCAB_SIZE).sample(logits_of(1, 2), [dead, other])
    assert sampled.errors == sampled.guides.faults == {0: dead.dead_end}
    assert "grammar with allowed_token_ids" in dead.dead_end
    assert sampled.guides.num_tokens == 2


def test_parameters_that_leave_no_token_are_named_and_at_fault():
    """With a grammar and without one, and no parameter that the request does not have."""
    params = {"allowed_token_ids": (5,), "bad_words": ((5,),)}
    rows = [guided_row(COMPILER, GRAMMARS[4], **params), SamplingRow(SamplingParams(**params), (), [])]
    sampled = Sampler(VOCAB_SIZE).sample(logits_of(1, 3), [*rows, guided_row(COMPILER, GRAMMARS[4])])
    assert sampled.errors == sampled.guides.faults
    named = [sampled.errors[index].partition(" under ")[2].partition(";")[0] for index in range(2)]
    assert named == ["the grammar with allowed_token_ids with bad_words", "allowed_token_ids with bad_words"]


class BrokenGuide:
    """Fails as a library may, in one of its calls."""

    def __init__(self, guide, name: str) -> None:
        self._guide, self._name = guide, name

    def __getattr__(self, name: str):
        if name == self._name:
            raise OSError("it broke")
        return getattr(self._guide, name)


@pytest.mark.parametrize("name", ["accepts", "fill_mask"])
def test_a_guide_that_breaks_fails_its_own_request(name):
    """The other rows of the step have their tokens, and nobody says that the caller is at fault."""
    broken, other = (guided_row(COMPILER, GRAMMARS[0], temperature=0.0) for _ in range(2))
    broken.guide = BrokenGuide(broken.guide, name)
    alone = guided_row(COMPILER, GRAMMARS[0], temperature=0.0)
    sampler = Sampler(VOCAB_SIZE)
    sampled = sampler.sample(logits_of(1, 2), [broken, other])
    assert list(sampled.errors) == [0]
    assert "OSError: it broke" in sampled.errors[0]
    assert not sampled.guides.faults
    assert sampled.token_ids[1] == sampler.sample(logits_of(1), [alone]).token_ids[0]


def test_a_grammar_that_cannot_be_had_fails_its_own_request():
    class NoGuides:
        def guide(self, _grammar):
            raise OSError("the tokenizer is gone")

    row = SamplingRow(SamplingParams(grammar=GRAMMARS[0]), (), [])
    begin_guide(row, NoGuides())
    other = guided_row(COMPILER, GRAMMARS[0])
    sampled = Sampler(VOCAB_SIZE).sample(logits_of(1, 2), [row, other])
    assert list(sampled.errors) == [0]
    assert "the tokenizer is gone" in sampled.errors[0]
    assert not sampled.guides.faults


def test_a_complete_row_is_left_alone():
    row = guided_row(COMPILER, GRAMMARS[4], b"12", temperature=0.0)
    assert row.guide.is_complete
    sampled = Sampler(VOCAB_SIZE).sample(logits_of(4), [row])
    assert not sampled.errors
    assert row.guide.is_complete


@given(grammar=st.sampled_from(GRAMMARS), seed=st.integers(0, 10**6))
def test_what_is_asked_is_what_is_masked(grammar, seed):
    """The library's two answers agree, on which the rule depends."""
    generator = np.random.default_rng(seed)
    guide = COMPILER.compile(grammar)
    for _ in range(int(generator.integers(0, 6))):
        if guide.is_complete:
            return
        assert guide.accepts(int(generator.choice(guide.allowed())))
    if not guide.is_complete:
        asked = [token_id for token_id in range(VOCAB_SIZE - 2) if guide.copy().accepts(token_id)]
        assert asked == guide.allowed().tolist()


def test_a_port_that_is_warmed_up_has_its_compiler():
    loaded = []
    port = GrammarPort(lambda: loaded.append(1) or COMPILER)
    port.warm_up()
    assert port.guide(GRAMMARS[0]).may_end is False
    assert loaded == [1]
    port.close()


def test_masks_of_several_threads_are_those_of_one():
    """Rows of one grammar have lexers by turns, as many as there are threads, once it is asked for again."""
    wide = make_compiler(num_threads=3)
    for _ in range(4):
        wide.compile(GRAMMARS[0])
    rows = [
        [
            guided_row(compiler, grammar, temperature=1.0, seed=seed)
            for seed in range(24)
            for grammar in GRAMMARS
        ]
        for compiler in (COMPILER, wide)
    ]
    assert len({id(row.guide.lane) for row in rows[1] if row.params.grammar is GRAMMARS[0]}) == 3
    for step in range(4):
        one, several = (Sampler(VOCAB_SIZE).sample(logits_of(step, 120), each) for each in rows)
        assert one.token_ids == several.token_ids
        assert one.errors == several.errors == {}
        assert several.guides.row_seconds.keys() == set(range(120))
        for row, token_id in zip(rows[0] + rows[1], one.token_ids * 2, strict=True):
            row.output_token_ids.append(token_id)


def test_a_lexer_at_its_limit_is_not_given_to_others():
    compiler = make_compiler(room=1)
    grammar = json_grammar({"type": "object", "properties": {f"p{number}": {} for number in range(600)}})
    guide, first = compiler.compile(grammar), compiler.cached(grammar)
    with pytest.raises(GrammarTooComplex):
        guide.consume([ord("{")])
    assert first.lane is guide.lane
    assert compiler.cached(grammar) is None
    assert compiler.compile(grammar).lane is not guide.lane
