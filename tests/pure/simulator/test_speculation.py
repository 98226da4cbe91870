"""Drafts in simulated runs: how many are accepted, what they cost, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PoolSizes
from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.core.step import ScheduledRequest
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.scheduler_config import DraftLength, SpeculationConfig
from onbeat.simulator.deliveries import CatchUp
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import KVLink, ReplicaKind
from onbeat.simulator.speculation import Acceptance, Drafts, KnownDrafts
from onbeat.speculative_config import Method, SpeculativeConfig
from onbeat.workload.slo_classes import SLOClass
from tests.examples import examples
from tests.pure.simulator.loads import ShapeTime, StepByStep, linear_time, make_config, make_load, random_load

pytestmark = pytest.mark.usefixtures("comparators")


def drafting(num_drafts: int, draft_length: DraftLength = "fixed", **changes) -> SpeculationConfig:
    return SpeculationConfig(num_speculative_tokens=num_drafts, draft_length=draft_length, **changes)


def speculating(num_drafts: int = 3, *, policy: str = "sarathi", rate: float = 0.7, hit_rate=None, **changes):
    return make_config(
        policy,
        scheduler={"speculation": drafting(num_drafts)} | changes.pop("scheduler", {}),
        acceptance=Acceptance(rate=rate, hit_rate=hit_rate),
        **changes,
    )


def draw(rate: float, num_tokens: int = 20_000, row: int = 0, **changes):
    acceptance = Acceptance(rate=rate, **changes)
    return acceptance.draw(row, num_tokens, request_class=None, seed=3, num_speculative_tokens=4)


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_accepted_drafts_are_geometric(rate: float, num_drafts: int) -> None:
    """The mean of a row is that of the goodput formula, 1 + a + ... + a^k."""
    runs = np.minimum(draw(rate).num_right, num_drafts)
    expected = sum(rate**j for j in range(1, num_drafts + 1))
    assert runs[:-8].mean() == pytest.approx(expected, rel=0.05)


def test_luck_is_the_same_whatever_is_asked_for() -> None:
    assert draw(0.7).num_right == draw(0.7, hit_rate=0.5).num_right
    assert draw(0.7).num_right != draw(0.7, row=1).num_right
    low, high = np.array(draw(0.5).num_right), np.array(draw(0.9).num_right)
    assert (low <= high).all()
    assert (low < high).any()


def test_drafts_are_found_as_often_as_said() -> None:
    available = draw(0.7, hit_rate=0.25).num_available
    assert available is not None
    assert set(available) == {0, 4}
    assert np.mean(available) == pytest.approx(1.0, rel=0.1)


def test_what_is_known_is_not_drawn() -> None:
    known = (KnownDrafts({2: False, 3: True, 4: True, 5: False}, {0: 1, 3: 2}),)
    acceptance = Acceptance(rate=1.0, hit_rate=0.0, known=known)
    drafts = acceptance.draw(0, 8, request_class=None, seed=0, num_speculative_tokens=4)
    assert drafts.num_right == [2, 1, 0, 2, 1, 0, 2, 1]
    assert drafts.num_available == [1, 0, 0, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "changes",
    [{"rate": 1.2}, {"rates": (("chat", -0.1),)}, {"hit_rate": 2.0}],
    ids=lambda change: str(change),
)
def test_a_rate_is_a_share(changes) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Acceptance(**changes)


def test_one_request_by_hand() -> None:
    """A prompt of 20 tokens gives a token; then rows of 1 + 3 give four each, cut at the end."""
    model = ShapeTime(lambda shape: 0.1 if shape.num_chunks else 0.01 + 0.001 * shape.num_draft_tokens)
    result = simulate(make_load([20], [8], [2.0]), speculating(3, rate=1.0), model)
    [record] = result.records
    assert list(record.delivery_sizes) == [1, 4, 3]
    assert list(record.delivery_times) == pytest.approx([2.1, 2.113, 2.125])  # two drafts can still be output
    assert record.num_output_tokens == record.offered_output_tokens == 8
    assert record.tpot == pytest.approx(0.025 / 7)
    assert result.total.drafts is not None
    assert (
        result.total.drafts.num_rows,
        result.total.drafts.num_drafted,
        result.total.drafts.num_accepted,
    ) == (2, 5, 5)
    assert result.total.drafts.tokens_per_row == 3.5


def test_rejected_drafts_cost_time_and_nothing_else() -> None:
    model = ShapeTime(lambda shape: 0.01 * shape.num_new_tokens)
    load = make_load([1], [4], [0.0])
    [record] = simulate(load, speculating(2, rate=0.0), model).records
    assert list(record.delivery_sizes) == [1, 1, 1, 1]
    # Two drafts, then one, then none: as many as the request still has tokens to come, less its own.
    assert list(record.delivery_times) == pytest.approx([0.01, 0.04, 0.06, 0.07])


def test_drafts_that_are_not_found_cost_nothing() -> None:
    load = random_load(30, rate=50, seed=1)
    plain = simulate(load, make_config(), linear_time()).records
    speculative = simulate(load, speculating(4, hit_rate=0.0), linear_time()).records
    assert [list(each.delivery_times) for each in speculative] == [
        list(each.delivery_times) for each in plain
    ]
    assert [list(each.delivery_sizes) for each in speculative] == [
        list(each.delivery_sizes) for each in plain
    ]


def test_classes_have_rates_of_their_own() -> None:
    classes = [SLOClass(name=name, slo=SLO(), share=0.5) for name in ("code", "chat")]
    load = random_load(60, rate=50, seed=2).with_classes(classes, seed=0)
    config = make_config(
        scheduler={"speculation": drafting(3)}, acceptance=Acceptance(rate=0.0, rates=(("code", 1.0),))
    )
    sizes: dict[str | None, set[int]] = {"code": set(), "chat": set()}
    for record in simulate(load, config, linear_time()).records:
        sizes[record.request_class].update(record.delivery_sizes)
    assert sizes == {"code": {1, 2, 3, 4}, "chat": {1}}


@examples(60)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    num_drafts=st.integers(1, 8),
    draft_length=st.sampled_from(["fixed", "adaptive"]),
    rate=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    hit_rate=st.sampled_from([None, 0.4]),
    pipeline=st.sampled_from([1, 1, 2]),
    declared=st.sampled_from([None, 50]),
    num_blocks=st.integers(16, 40),
    num_snapshots=st.sampled_from([None, 3]),
    seed=st.integers(0, 3),
)
def test_every_request_gets_its_tokens(
    policy, num_drafts, draft_length, rate, hit_rate, pipeline, declared, num_blocks, num_snapshots, seed
) -> None:
    load = random_load(25, rate=100, seed=seed)
    config = make_config(
        policy,
        scheduler={
            "num_blocks": num_blocks,
            "speculation": drafting(num_drafts, draft_length),
            "num_micro_batches": pipeline,
            "num_snapshots": num_snapshots,
        },
        acceptance=Acceptance(rate=rate, hit_rate=hit_rate),
        pipeline=pipeline,
        declared_max_tokens=declared,
        seed=seed,
    )
    result = simulate(load, config, linear_time())
    assert [each.num_output_tokens for each in result.records] == load.num_output_tokens.tolist()
    assert all(sum(each.delivery_sizes) == each.num_output_tokens for each in result.records)
    assert all(len(each.delivery_sizes) == len(each.delivery_times) for each in result.records)
    assert result.replicas[0].num_leaked_blocks == 0
    assert result.total.drafts is not None
    assert result.total.drafts.num_accepted <= result.total.drafts.num_drafted


def test_observers_change_nothing() -> None:
    load = random_load(60, rate=100, seed=5)
    config = speculating(3, replicas=2, hit_rate=0.6)
    alone = simulate(load, config, linear_time())
    watched = simulate(load, config, linear_time(), observer=(steps := StepByStep()))
    for one, another in zip(alone.records, watched.records, strict=True):
        assert one.delivery_times == another.delivery_times
        assert list(one.delivery_sizes) == list(another.delivery_sizes)
    assert watched.total.drafts == alone.total.drafts
    assert alone.total.drafts is not None
    assert sum(stats.shape.num_draft_tokens for _, stats in steps.steps) == alone.total.drafts.num_drafted
    drafts = [stats.drafts for _, stats in steps.steps if stats.drafts is not None]
    assert sum(sum(each.accepted_at) for each in drafts) == alone.total.drafts.num_accepted
    chunked = {request_id for _, stats in steps.steps for request_id in stats.chunk_request_ids}
    assert chunked <= {record.request_id for record in alone.records if record.num_prompt_tokens > 1}


def test_pools_draft_where_they_generate() -> None:
    load = random_load(40, rate=60, seed=6)
    limits = make_config().scheduler
    speculating_limits = make_config(scheduler={"speculation": drafting(3)}).scheduler
    config = make_config(
        disaggregate=PoolSizes(prefill=1, decode=1),
        pool_rule="distserve",
        kinds=tuple(
            ReplicaKind(scheduler=each, step_time=linear_time()) for each in (limits, speculating_limits)
        ),
        kv_link=KVLink(bytes_per_token=1e3, bandwidth=1e9, latency=1e-4),
        acceptance=Acceptance(rate=1.0),
    )
    result = simulate(load, config, linear_time())
    for record in result.records:
        assert sum(record.delivery_sizes) == record.num_output_tokens == record.offered_output_tokens
        assert record.delivery_sizes[0] == 1
        # Five tokens are the first one, and a row of four.
        assert len(record.delivery_sizes) == 1 + -(-(record.num_output_tokens - 1) // 4)
    assert result.replicas[0].drafts is None
    assert result.total.drafts == result.replicas[1].drafts


# --- a draft model's own reading --------------------------------------------------------------------------


def asked(request_id: str, num_tokens: int, num_drafts: int) -> ScheduledRequest:
    """Return a decode row with drafts of a request with so many tokens."""
    return ScheduledRequest(request_id, num_tokens - 1, 1 + num_drafts, (), True, num_drafts)


def test_a_draft_model_reads_a_prompt_in_pieces_before_it_proposes() -> None:
    model = CatchUp(256, num_near=16)
    for start, num_tokens in ((0, 256), (256, 256)):
        assert model.propose([asked("long", 600, 3)]) == ([0], [(start, num_tokens)])
    assert model.propose([asked("long", 600, 3)]) == ([3], [(512, 88)])
    model.confirm("long", 3, 1)  # the KV of two of the drafts is there, and one of these became a token
    assert model.propose([asked("long", 602, 3)]) == ([3], [])
    model.forget(["long"])
    assert model.propose([asked("long", 602, 3)]) == ([0], [(0, 256)])


def test_rows_near_their_ends_come_first_and_are_not_held_back() -> None:
    model = CatchUp(256, num_near=16)
    rows = [asked("far", 300, 3), asked("near", 16, 2), asked("middle", 200, 1)]
    assert model.propose(rows) == ([0, 2, 1], [(0, 200), (0, 56)])
    assert model.propose(rows) == ([3, 2, 1], [(56, 244)])


def test_drafts_wait_until_the_prompt_has_been_read() -> None:
    config = make_config(
        scheduler={
            "speculation": drafting(3, runs_model=True, max_catch_up_tokens=256),
            "num_blocks": 100,
            "max_model_len": 1000,
            "max_num_batched_tokens": 1000,
        },
        acceptance=Acceptance(rate=1.0),
    )
    model = ShapeTime(lambda shape: 1.0 + 0.1 * shape.num_draft_passes + 1e-3 * shape.num_catch_up_tokens)
    [record] = simulate(make_load([600], [12], [0.0]), config, model).records
    # The prompt; two steps in which the draft model reads; then four tokens a step, first while it reads on.
    assert list(record.delivery_sizes) == [1, 1, 1, 4, 4, 1]
    times = [1.0, 1.256, 1.256, 1.391, 1.3, 1.0]
    assert list(np.diff([0.0, *record.delivery_times])) == pytest.approx(times)


# --- from what a person says ------------------------------------------------------------------------------


def settings_of(**changes) -> Deployment:
    values = {"model": "meta-llama/Llama-3.1-8B", "device": "h100-sxm"}
    return make(Deployment, **(values | changes))


def drafts_of(**changes) -> SpeculativeConfig:
    method: Method = "draft-model" if "model" in changes else "ngram"
    return SpeculativeConfig(**({"method": method, "num_speculative_tokens": 4} | changes))


def test_a_draft_model_takes_time_and_memory() -> None:
    plain = resolve(settings_of())
    simulation = resolve(settings_of(speculative=drafts_of(model="meta-llama/Llama-3.2-1B")))
    speculation = simulation.config.scheduler.speculation
    assert speculation is not None
    assert speculation.runs_model
    assert simulation.config.scheduler.num_blocks < plain.config.scheduler.num_blocks
    assert simulation.memory is not None
    assert plain.memory is not None
    assert simulation.memory.weight_bytes > plain.memory.weight_bytes + 2e9
    result = simulate(random_load(10, rate=5, seed=0), simulation.config, simulation.step_time)
    assert all(record.is_completed for record in result.records)


@pytest.mark.parametrize("changes", [{}, {"model": "meta-llama/Llama-3.2-1B"}], ids=["ngram", "draft-model"])
def test_models_that_keep_states_draft(changes) -> None:
    simulation = resolve(settings_of(model="Qwen3.5-27B", device="h200", speculative=drafts_of(**changes)))
    model, limits, memory = simulation.target.model, simulation.config.scheduler, simulation.memory
    assert memory is not None
    assert limits.num_snapshots
    states = (limits.max_num_seqs + limits.num_snapshots) * (model.state_bytes + 4 * model.draft_state_bytes)
    assert states <= memory.kv_bytes / 2
    assert 0.99 * memory.kv_bytes < states + memory.num_blocks * memory.block_bytes <= memory.kv_bytes
    result = simulate(random_load(10, rate=5, seed=0), simulation.config, simulation.step_time)
    assert all(record.is_completed for record in result.records)
    assert result.total.drafts is not None
    assert result.total.drafts.num_accepted > 0


def test_a_pool_for_prompts_drafts_nothing() -> None:
    pools = PoolSizes(prefill=1, decode=1)
    simulation = resolve(settings_of(policy="sarathi", disaggregate=pools, speculative=drafts_of()))
    prefill, decode = simulation.config.kinds
    assert prefill.scheduler.speculation is None
    assert decode.scheduler.speculation is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "meta-llama/Llama-3.1-70B"}, "choose a smaller one"),
        ({"model": "meta-llama/Llama-3.1-8B"}, "choose a smaller one"),
        ({"num_speculative_tokens": 17}, "above block_size"),
        ({"num_speculative_tokens": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(settings_of(speculative=drafts_of(**changes)))


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (None, {"draft_hit_rate": 0.5}, "--draft-hit-rate needs"),
        ({"method": "grammar"}, {}, "grammar"),
        ({"method": "eagle", "model": "m"}, {}, "eagle"),
        ({"model": "m"}, {"draft_hit_rate": 0.5}, "--draft-hit-rate"),
        ({}, {"acceptance_rate": ("x",)}, "'x'"),
        ({}, {"acceptance_rate": ("code=1.5",)}, "code is 1.5"),
    ],
)
def test_what_a_person_says_of_drafts_goes_together(config, changes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Drafts(speculative=None if config is None else drafts_of(**config), **changes)


def test_given_rates_replace_those_of_a_record_by_class() -> None:
    found = Acceptance(rate=0.5, rates=(("chat", 0.6), ("code", 0.8)), hit_rate=0.4)
    said = Drafts(speculative=drafts_of(), acceptance_rate=("code=0.9",))
    assert said.acceptance(found) == Acceptance(rate=0.5, rates=(("chat", 0.6), ("code", 0.9)), hit_rate=0.4)
    assert Drafts(speculative=drafts_of(), draft_hit_rate=0.3).acceptance(Acceptance()).hit_rate == 0.3
    assert Drafts(speculative=drafts_of(model="m")).acceptance(found).hit_rate is None
