"""The floor of a step, and what is made of measured steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.check.cpu_step.floor import Case, Floor, MachineRates, WeightBytes, floor_of
from benchmarks.check.cpu_step.host import SKIPPED_STEPS, host_share
from benchmarks.check.cpu_step.numbers import Subject, case_result, neighbour_result
from onbeat.core.step import BatchShape, StepStats
from onbeat.perfmodel.model_sizes import ModelSpec

MODEL = ModelSpec(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=512,
    max_position_embeddings=4096,
    ties_embeddings=True,
)
WEIGHTS = WeightBytes(layers=2 * MODEL.active_layer_parameters, head=2 * MODEL.embedding_parameters)
SUBJECT = Subject(model=MODEL, weights=WEIGHTS, kv_bytes=2)
ENDLESS = 1e30


def floor(case: Case, *, read: float = ENDLESS, multiply: float = ENDLESS) -> Floor:
    return floor_of(case, MODEL, WEIGHTS, 2, MachineRates(read=read, multiply=multiply))


class TestFloor:
    def test_a_slow_memory_makes_it_bytes(self) -> None:
        kv_token_bytes = 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, width, bytes

        found = floor(Case.decode(8, 100), read=1.0)

        assert found.layers == WEIGHTS.layers
        assert found.head == WEIGHTS.head
        assert found.attention == 8 * 100 * kv_token_bytes

    def test_slow_arithmetic_makes_it_operations(self) -> None:
        found = floor(Case.decode(8, 100), multiply=1.0)

        assert found.layers == 2 * MODEL.active_layer_parameters * 8
        assert found.head == 2 * MODEL.embedding_parameters * 8
        assert found.attention == 2 * 4 * 4 * 16 * 8 * 100

    def test_a_prefill_needs_logits_of_its_last_token_alone(self) -> None:
        assert floor(Case.prefill(512), multiply=1.0).head == 2 * MODEL.embedding_parameters

    @given(st.integers(1, 32), st.integers(1, 1000), st.floats(0.1, 1e3), st.floats(0.1, 1e3))
    def test_a_better_machine_has_a_lower_floor(
        self, batch: int, context: int, read: float, multiply: float
    ) -> None:
        case = Case.decode(batch, context)

        slow = floor(case, read=read, multiply=multiply).total
        fast = floor(case, read=2 * read, multiply=2 * multiply).total

        assert fast == pytest.approx(slow / 2)

    @given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 80))
    def test_pairs_are_what_counting_them_gives(self, new: int, cached: int, window: int) -> None:
        case = Case(batch=3, new_tokens=new, context=cached + new)
        seen = range(cached + 1, cached + new + 1)

        assert case.pairs(window) == 3 * sum(min(tokens, window) for tokens in seen)
        assert case.pairs() == 3 * sum(seen)

    def test_a_window_bounds_what_is_read(self) -> None:
        assert Case.decode(2, 1000).kv_tokens(64) == 2 * 64
        assert Case.prefill(1000).kv_tokens(64) == 1000


class TestCaseResult:
    def test_ratios_are_taken_within_a_round_by_the_limits_beside_the_case(self) -> None:
        case = Case.decode(1, 10)
        memory_floor = floor(case, read=1.0).total

        def made(read: float, seconds: list[float]) -> dict[str, Any]:
            limits = [{"read": read, "multiply": ENDLESS}, {"read": read / 2, "multiply": ENDLESS}]
            return {
                "limits": {case.name: limits},
                "steps": {case.name: {"whole": seconds, "forward": seconds}},
            }

        # The machine was twice as fast in the second round, and so was the step.
        rounds = [made(1.0, [2 * memory_floor] * 3), made(2.0, [memory_floor] * 3)]

        result = case_result(case, rounds, SUBJECT)

        # The mean floor of limits that fell by half is 1.5 times that of the higher ones.
        assert result.ratios == pytest.approx([2 / 1.5, 2 / 1.5])
        assert result.best_ratio == pytest.approx(2.0)
        assert result.host_shares == pytest.approx([0.0, 0.0])

    def test_the_share_outside_the_forward_pass_is_of_the_whole(self) -> None:
        case = Case.decode(1, 10)
        limits = [{"read": 1.0, "multiply": 1.0}]
        steps = {case.name: {"whole": [4.0, 4.0], "forward": [3.0, 3.0]}}

        (share,) = case_result(case, [{"limits": {case.name: limits}, "steps": steps}], SUBJECT).host_shares

        assert share == pytest.approx(0.25)


def test_a_neighbour_is_judged_round_by_round() -> None:
    def made(quiet: list[float], busy: list[float]) -> dict[str, Any]:
        return {"quiet": {"b1": {"whole": quiet}}, "busy": {"b1": {"whole": busy}}}

    result = neighbour_result("b1", [made([1.0, 1.0], [2.0, 2.0]), made([2.0, 2.0], [4.0, 40.0])])

    assert result.ratios == pytest.approx([2.0, 11.0])
    assert result.longest_busy == 40.0


class TestHostShare:
    def test_only_decodes_of_the_whole_batch_count(self) -> None:
        num_decodes = 2 * SKIPPED_STEPS + 5
        prefill = stats(end=10.0, decodes=0, chunks=2)
        decodes = [stats(end=11.0 + index, decodes=2) for index in range(num_decodes)]
        last = stats(end=99.0, decodes=1)
        forward = [9.0] + [0.75] * num_decodes + [0.1]

        found = host_share([prefill, *decodes, last], forward, batch=2)

        assert found.num_steps == 4
        assert found.step == pytest.approx(1.0)
        assert found.share == pytest.approx(0.25)

    def test_too_few_steps_are_refused(self) -> None:
        with pytest.raises(ValueError, match="only 0 steps decode all 4 requests"):
            host_share([stats(end=1.0, decodes=1)], [0.5], batch=4)


def stats(*, end: float, decodes: int, chunks: int = 0) -> StepStats:
    return StepStats(
        step_id=0,
        start=end - 1,
        end=end,
        shape=BatchShape(num_decodes=decodes, num_chunks=chunks),
        num_running=0,
        num_waiting=0,
        num_blocks=0,
        num_used_blocks=0,
        num_preemptions=0,
        num_prefix_queries=0,
        num_prefix_hits=0,
        schedule_seconds=0.0,
        update_seconds=0.0,
    )
