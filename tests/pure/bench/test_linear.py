"""Linear step-time forms: values worked out by hand, and files that are wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.linear import (
    NO_OVERHEAD,
    STAGE_HOP,
    DistServeCoefficients,
    EngineOverhead,
    distserve_closure,
    linear_closure,
    read_distserve_coefficients,
)
from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape

COEFFICIENTS = DistServeCoefficients(
    prefill=(0.02, 1e-4, 1e-8),
    decode_small=(0.03, 1e-6, 1e-4),
    decode_large=(0.01, 2e-6, 2e-4),
    large_batch=4,
)
PROFILE = {
    "org/tiny-1b": {
        "2": {
            "prefill": [20.0, 0.1, 1e-5],
            "decoding_smallbs": [30.0, 1e-3, 0.1],
            "decoding_largebs": [10.0, 2e-3, 0.2],
            "decoding_large_small_bs_threshold": 4,
        }
    }
}


def shape_of(*rows: tuple[int, int]) -> BatchShape:
    """Rows are (computed tokens, new tokens)."""
    shape = BatchShape()
    for num_computed, num_new in rows:
        shape.add(num_computed, num_new, samples=True)
    return shape


@pytest.fixture
def profile_path(tmp_path):
    path = tmp_path / "profiler.json"
    path.write_text(json.dumps(PROFILE))
    return path


class TestDistServe:
    def test_prompts_cost_their_sum_and_the_sum_of_their_squares(self):
        seconds = distserve_closure(COEFFICIENTS)
        assert seconds(shape_of((0, 100), (0, 300))) == pytest.approx(0.02 + 0.04 + 1e-8 * (100**2 + 300**2))

    def test_decodes_cost_their_context_and_their_number(self):
        seconds = distserve_closure(COEFFICIENTS)
        assert seconds(shape_of((99, 1), (199, 1))) == pytest.approx(0.03 + 300e-6 + 2e-4)

    def test_large_batches_have_their_own_coefficients(self):
        seconds = distserve_closure(COEFFICIENTS)
        assert seconds(shape_of(*[(99, 1)] * 3)) == pytest.approx(0.03 + 300e-6 + 3e-4)
        assert seconds(shape_of(*[(99, 1)] * 4)) == pytest.approx(0.01 + 800e-6 + 8e-4)

    def test_mixed_steps_pay_the_fixed_part_once(self):
        seconds = distserve_closure(COEFFICIENTS)
        growing = 1e-4 * 100 + 1e-8 * 100**2 + 1e-6 * 50 + 1e-4
        assert seconds(shape_of((0, 100), (49, 1))) == pytest.approx(0.03 + growing)

    @given(st.lists(st.integers(2, 500), min_size=1, max_size=6))
    def test_chunks_of_a_prompt_cost_its_square_together(self, chunks):
        seconds = distserve_closure(COEFFICIENTS)
        total, num_computed = 0.0, 0
        for chunk in chunks:
            total += seconds(shape_of((num_computed, chunk)))
            num_computed += chunk
        whole = seconds(shape_of((0, num_computed)))
        assert total == pytest.approx(whole + 0.02 * (len(chunks) - 1))

    def test_overhead_counts_all_context(self):
        seconds = distserve_closure(COEFFICIENTS, overhead=EngineOverhead(2e-3, 1e-7))
        bare = distserve_closure(COEFFICIENTS)
        shape = shape_of((100, 50), (0, 30), (999, 1))
        assert seconds(shape) - bare(shape) == pytest.approx(2e-3 + 1e-7 * 1180)

    def test_stages_add_hops_to_prompts_alone(self):
        seconds, deep = distserve_closure(COEFFICIENTS), distserve_closure(COEFFICIENTS, pipeline=3)
        prompt, decode = shape_of((0, 100)), shape_of((99, 1))
        assert deep(prompt) - seconds(prompt) == pytest.approx(2 * STAGE_HOP)
        assert deep(decode) == seconds(decode)

    def test_an_empty_batch_takes_no_time(self):
        assert distserve_closure(COEFFICIENTS, overhead=EngineOverhead())(BatchShape()) == 0

    def test_negative_squares_never_make_a_step_free(self):
        bent = DistServeCoefficients((0.02, 1e-4, -1e-6), (0.03, 0, 0), (0.01, 0, 0), 4)
        assert distserve_closure(bent)(shape_of((0, 10_000))) > 0


class TestFiles:
    def test_milliseconds_become_seconds(self, profile_path):
        read = read_distserve_coefficients(profile_path, model="tiny-1b", tensor=2)
        assert read.prefill == pytest.approx((0.02, 1e-4, 1e-8))
        assert read.large_batch == 4

    def test_overhead_of_the_engine_comes_with_the_format(self, profile_path):
        shape = shape_of((0, 100))
        plain = linear_closure(profile_path, model="org/tiny-1b", tensor=2, overhead=NO_OVERHEAD)(shape)
        assert linear_closure(profile_path, model="org/tiny-1b", tensor=2)(shape) == pytest.approx(
            plain + 2e-3 + 1e-5
        )

    def test_unknown_model_names_what_there_is(self, profile_path):
        with pytest.raises(ConfigError, match=r"'other'.*org/tiny-1b"):
            linear_closure(profile_path, model="other", tensor=2)

    def test_unknown_degree_names_what_there_is(self, profile_path):
        with pytest.raises(ConfigError, match=r"TP 8; it has TP 2"):
            linear_closure(profile_path, model="org/tiny-1b", tensor=8)

    @pytest.mark.parametrize("value", [[1.0, 2.0], None, [1.0, 2.0, "x"], [1.0, 2.0, float("nan")]])
    def test_bad_coefficients_name_their_place(self, tmp_path, value):
        path = tmp_path / "bad.json"
        broken = PROFILE["org/tiny-1b"]["2"] | {"prefill": value}
        path.write_text(json.dumps({"org/tiny-1b": {"2": broken}}))
        with pytest.raises(ConfigError, match=r"bad\.json.*org/tiny-1b.*2"):
            linear_closure(path, model="org/tiny-1b", tensor=2)

    @pytest.mark.parametrize("content", ["{", "[]"])
    def test_no_profile(self, tmp_path, content):
        path = tmp_path / "bad.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"bad\.json"):
            linear_closure(path, model="m")

    def test_missing_file(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            linear_closure(tmp_path / "none.json", model="m")


@pytest.mark.skipif("ONBEAT_SHARED" not in os.environ, reason="needs the published profiles (ONBEAT_SHARED)")
def test_the_published_file_is_read():
    profiles = Path(os.environ.get("ONBEAT_SHARED", "")) / "data" / "profiles"
    decode = shape_of(*[(499, 1)] * 20)
    path = profiles / "distserve" / "profiler-a100-80g.distserve.json"
    seconds = linear_closure(path, model="facebook/opt-13b", tensor=1)(decode)
    assert seconds == pytest.approx(
        0.01993470 + 0.6269e-6 * 10_000 + 20 * 38.507e-6 + 0.002 + 0.001, rel=1e-3
    )
