"""The fluid bound: right where it can be worked out by hand, and passed by no policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLOMode
from onbeat.core.step import BatchShape
from onbeat.metrics.attainment import good_requests
from onbeat.planner.fluid_bound import BoundQuestion, fluid_bound, sustained_bound, unlimited_prefix_hits
from onbeat.scheduler.config import SchedulerConfig
from onbeat.simulator.config import SimulationConfig
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from tests.examples import examples

FIXED = 0.01
TOKEN = 1e-4


class Machine:
    """A step costs something itself, and each token as much again."""

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        return FIXED + TOKEN * shape.num_new_tokens + 1e-7 * shape.decode_context_tokens

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        raise NotImplementedError

    def observe(self, shape: BatchShape, seconds: float) -> None:
        raise NotImplementedError


def make_load(prompts: list[int], outputs: list[int], *, ttft: float = 1.0, tbt: float = 0.05) -> OfferedLoad:
    load = OfferedLoad(
        name="made",
        num_prompt_tokens=np.array(prompts, dtype=np.int64),
        num_output_tokens=np.array(outputs, dtype=np.int64),
        arrivals=np.arange(1, len(prompts) + 1, dtype=np.float64),
    )
    return load.with_classes([SLOClass(name="all", slo=SLO(ttft=ttft, tbt=tbt))], seed=0)


def question(load: OfferedLoad, share: float, mode: SLOMode = "stream") -> BoundQuestion:
    return BoundQuestion(
        share=share, mode=mode, max_num_seqs=16, hopeless=np.zeros(len(load), dtype=np.bool_)
    )


def test_prompts_alone_are_bound_by_their_tokens() -> None:
    load = make_load([1000] * 2000, [1] * 2000)
    # In steps of twice the TTFT objective, 0.01 of 2 seconds is lost on the step itself.
    expected = (1 - FIXED / 2.0) / (1000 * TOKEN)
    assert sustained_bound(load, Machine(), question(load, 1.0)) == pytest.approx(expected, rel=0.01)
    assert fluid_bound(load, Machine(), question(load, 1.0)) == pytest.approx(expected, rel=0.02)


def test_decodes_are_bound_by_the_rows_of_a_step() -> None:
    load = make_load([1] * 500, [161] * 500, tbt=0.5)
    # 160 decodes in steps of at most 16 rows: ten steps' fixed costs for each request.
    work = 10 * FIXED + (1 + 160) * TOKEN + 1e-7 * sum(range(2, 162))
    assert sustained_bound(load, Machine(), question(load, 1.0)) == pytest.approx(1 / work, rel=0.01)


def test_steps_are_short_while_streams_run() -> None:
    load = make_load([1000] * 300, [400] * 300, tbt=0.02)
    loose = sustained_bound(load, Machine(), replace(question(load, 1.0, "stream"), max_num_seqs=1000))
    tight = sustained_bound(load, Machine(), replace(question(load, 1.0, "gap"), max_num_seqs=1000))
    assert tight < 0.8 * loose


def test_the_costliest_may_be_left_out() -> None:
    load = make_load([100] * 180 + [10_000] * 20, [1] * 200, ttft=2.0)
    all_kept = sustained_bound(load, Machine(), question(load, 1.0))
    without = sustained_bound(load, Machine(), question(load, 0.9))
    assert without == pytest.approx(all_kept * (180 * 100 + 20 * 10_000) / (180 * 100), rel=0.1)


def test_hopeless_requests_cost_nothing() -> None:
    load = make_load([100] * 180 + [50_000] * 20, [1] * 200)
    asked = replace(question(load, 1.0), hopeless=load.num_prompt_tokens > 1000)
    assert sustained_bound(load, Machine(), asked) == pytest.approx(200 / 180 / (100 * TOKEN), rel=0.05)


def test_no_rate_is_kept_where_requests_that_come_at_once_are_too_much() -> None:
    load = make_load([9000] * 10, [1] * 10)
    assert load.arrivals is not None
    together = load.with_arrivals(np.full(10, 5.0))
    assert fluid_bound(together, Machine(), question(together, 1.0)) == 0.0
    assert fluid_bound(load, Machine(), question(load, 1.0)) > 0.5


def test_prefix_hits_of_a_cache_without_limit() -> None:
    load = OfferedLoad(
        name="made",
        num_prompt_tokens=np.array([10, 12, 8, 8]),
        num_output_tokens=np.ones(4, dtype=np.int64),
        block_ids=((1, 2, 3), (1, 2, 4), (5, 1), (1, 2)),
        block_size=4,
    )
    assert unlimited_prefix_hits(load).tolist() == [0, 8, 0, 7]


def test_needs_objectives_and_somebody_to_serve() -> None:
    load = make_load([10], [1])
    with pytest.raises(ConfigError, match="not hopeless"):
        fluid_bound(load, Machine(), replace(question(load, 1.0), hopeless=np.array([True])))
    bare = load.with_classes([SLOClass(name="all", slo=SLO(ttft=1.0))], seed=0)
    with pytest.raises(ConfigError, match="TBT"):
        fluid_bound(bare, Machine(), question(bare, 1.0))


@examples(6)
@given(
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.9, 1.0]),
    mode=st.sampled_from(["gap", "stream"]),
    tbt=st.sampled_from([0.03, 0.1]),
    budget=st.sampled_from([64, 256, 1024]),
)
def test_no_simulated_run_passes_it(seed: int, share: float, mode: SLOMode, tbt: float, budget: int) -> None:
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(1, 3000, 60).tolist(), rng.integers(1, 300, 60).tolist()
    load = make_load(prompts, outputs, tbt=tbt)
    load = load.with_arrivals(np.cumsum(rng.exponential(1.0, 60)))
    bound = fluid_bound(load, Machine(), question(load, share, mode))
    scheduler = SchedulerConfig(
        num_blocks=20_000, max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=budget
    )
    for factor in (1.001, 1.2, 2.0):
        records = simulate(
            load.at_rate(bound * factor), SimulationConfig(scheduler=scheduler), Machine()
        ).records
        assert good_requests(records, mode=mode).mean() < share


def test_what_is_abandoned_in_one_burst_cannot_be_abandoned_in_another() -> None:
    load = make_load([1200] * 40, [1] * 40)
    bursts = np.repeat(np.arange(1.0, 5.0), 10)
    # A second serves eight of the ten: two of each burst are lost however far apart they are, eight in all.
    burdened = load.with_arrivals(bursts)
    assert fluid_bound(burdened, Machine(), question(load, 0.85)) == 0.0
    assert fluid_bound(burdened, Machine(), question(load, 0.75)) > 5.0
