"""Operator profiles: composition, what lies between and beyond the measurements, and wrong files."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.published.interpolate import PiecewiseLinear, Surface
from onbeat.perfmodel.published.operator_table import (
    VIDUR_OPTIONS,
    OperatorTableOptions,
    operator_table_closure,
)
from tests.pure.perfmodel.operator_profiles import (
    MODEL,
    all_reduce_ms,
    attention_rows,
    chunk_ms,
    decode_ms,
    mlp_rows,
    network_rows,
    operator_ms,
    write_csv,
    write_profile_directory,
)
from tests.pure.perfmodel.shapes import batch, decodes, rows

SINGLE = Parallelism()
LAYERS = MODEL.num_layers
NUM_LAYER_OPERATORS = 10  # the residual twice


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile_directory(tmp_path_factory.mktemp("profile"))


def test_a_chunk_costs_its_operators_in_all_layers(profile: Path) -> None:
    seconds = operator_table_closure(profile, model=MODEL, parallelism=SINGLE, options=VIDUR_OPTIONS)
    expected_ms = LAYERS * (NUM_LAYER_OPERATORS * operator_ms(300) + chunk_ms(300, 500))
    assert seconds(batch([(500, 300)])) == pytest.approx(expected_ms / 1e3, rel=0.02)


def test_decodes_cost_their_mean_context_and_a_tenth_for_running_together(profile: Path) -> None:
    seconds = operator_table_closure(profile, model=MODEL, parallelism=SINGLE, options=VIDUR_OPTIONS)
    together_ms = LAYERS * (NUM_LAYER_OPERATORS * operator_ms(8) + 1.1 * decode_ms(8, 500))
    assert seconds(batch([(400, 1), (600, 1)] * 4)) == pytest.approx(together_ms / 1e3, rel=0.02)
    alone_ms = LAYERS * (NUM_LAYER_OPERATORS * operator_ms(1) + decode_ms(1, 500))
    assert seconds(batch([(500, 1)])) == pytest.approx(alone_ms / 1e3, rel=0.02)


def test_chunks_count_as_one_with_their_query_key_pairs(profile: Path) -> None:
    options = OperatorTableOptions(counts_embedding=False, counts_lm_head=False, chunk_batching_overhead=0.0)
    seconds = operator_table_closure(profile, model=MODEL, parallelism=SINGLE, options=options)
    two = [(100, 128), (700, 256)]
    pairs_ms = 1e-7 * sum(length * (cached + length / 2) for cached, length in two)
    expected_ms = LAYERS * (NUM_LAYER_OPERATORS * operator_ms(384) + 0.03 + pairs_ms)
    assert seconds(batch(two)) == pytest.approx(expected_ms / 1e3, rel=0.02)


def test_embedding_and_lm_head_come_on_top(profile: Path) -> None:
    bare = operator_table_closure(profile, model=MODEL, parallelism=SINGLE, options=VIDUR_OPTIONS)
    whole = operator_table_closure(profile, model=MODEL, parallelism=SINGLE)
    shape = decodes(16, 100)
    # The LM head has as many weights as the measured up-projection: 2048 x 512 against 2 x 1024 x 512.
    assert whole(shape) - bare(shape) == pytest.approx((operator_ms(16) + operator_ms(16)) / 1e3)
    silent = BatchShape()
    silent.add(0, 16, samples=False)
    assert whole(silent) - bare(silent) == pytest.approx(operator_ms(16) / 1e3)


def test_tensor_and_pipeline_parallelism_add_communication(tmp_path: Path) -> None:
    write_profile_directory(tmp_path, tensor=2)
    write_csv(tmp_path / "send_recv.csv", network_rows("send_recv", 2, lambda size: 0.5))
    shape = batch([(0, 256)])
    alone_ms = LAYERS * (NUM_LAYER_OPERATORS * operator_ms(256) + chunk_ms(256, 0))
    reduce_ms = 2 * LAYERS * (all_reduce_ms(256 * 512 * 2) + 0.02)
    tensor = operator_table_closure(
        tmp_path, model=MODEL, parallelism=Parallelism(tensor=2), options=VIDUR_OPTIONS
    )
    assert tensor(shape) == pytest.approx((alone_ms + reduce_ms) / 1e3, rel=0.02)
    stages = operator_table_closure(
        tmp_path, model=MODEL, parallelism=Parallelism(tensor=2, pipeline=3), options=VIDUR_OPTIONS
    )
    assert stages(shape) - tensor(shape) == pytest.approx(2 * 0.5 / 1e3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows.filter(bool), more=st.sampled_from(((0, 1), (100_000, 1), (0, 512), (100_000, 4096))))
def test_any_batch_has_a_time(profile: Path, rows: list[tuple[int, int]], more: tuple[int, int]) -> None:
    seconds = operator_table_closure(profile, model=MODEL, parallelism=SINGLE)(batch([*rows, more]))
    assert 0 < seconds < math.inf


@pytest.mark.parametrize("kind", ["tokens", "decodes", "context", "chunk", "cached"])
def test_beyond_the_measurements_more_work_never_costs_less(profile: Path, kind: str) -> None:
    seconds = operator_table_closure(profile, model=MODEL, parallelism=SINGLE)
    sizes = [2**power for power in range(11, 22)]
    shapes = {
        "tokens": lambda size: batch([(0, 512)] * (size // 512)),
        "decodes": lambda size: decodes(size // 16, 100),
        "context": lambda size: decodes(4, size),
        "chunk": lambda size: batch([(0, size)]),
        "cached": lambda size: batch([(size, 64)]),
    }
    times = [seconds(shapes[kind](size)) for size in sizes]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_a_curve_is_exact_at_its_points_and_grows_beyond_them() -> None:
    curve = PiecewiseLinear([4, 1, 2, 2], [40, 10, 19, 21])
    assert [curve(size) for size in (0.5, 1, 2, 3, 4)] == [10, 10, 20, 30, 40]
    assert curve(8) == 80


@given(
    values=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20),
    beyond=st.tuples(st.floats(0, 1e7), st.floats(0, 1e7)).map(sorted),
)
def test_a_curve_never_falls_beyond_its_points(values: list[float], beyond: list[float]) -> None:
    curve = PiecewiseLinear(range(1, len(values) + 1), values)
    low, high = (curve(len(values) + extra) for extra in beyond)
    assert 0 < low <= high < math.inf


@given(
    values=st.lists(st.floats(1e-6, 1e-2), min_size=12, max_size=12),
    beyond=st.tuples(st.floats(8, 1e6), st.floats(8, 1e6)).map(sorted),
)
def test_a_surface_never_falls_beyond_its_points(values: list[float], beyond: list[float]) -> None:
    places = [(x, y) for x in (1, 2, 8) for y in (0, 1, 4, 8)]
    surface = Surface([x for x, _ in places], [y for _, y in places], values)
    low, high = beyond
    assert 0 < surface(low, 3) <= surface(high, 3) * (1 + 1e-9) < math.inf
    assert 0 < surface(2, low) <= surface(2, high) * (1 + 1e-9) < math.inf
    assert surface(8, 4) == pytest.approx(values[10])


def test_a_surface_of_one_line_of_points_is_a_curve() -> None:
    surface = Surface([1, 2, 4], [0, 0, 0], [1.0, 2.0, 4.0])
    assert surface(2, 0) == pytest.approx(2.0)
    assert surface(2, 100) == pytest.approx(2.0)


def test_gzip_and_a_yaml_file_that_names_the_profiles(tmp_path: Path, profile: Path) -> None:
    for name in ("mlp", "attention"):
        (tmp_path / f"{name}_a.csv.gz").write_bytes(gzip.compress((profile / f"{name}.csv").read_bytes()))
        (tmp_path / f"{name}_b.csv.gz").write_bytes(b"not this one")
    with pytest.raises(ConfigError, match=r"mlp_a\.csv\.gz, mlp_b\.csv\.gz.*YAML"):
        operator_table_closure(tmp_path, model=MODEL, parallelism=SINGLE)
    names = tmp_path / "profile.yaml"
    names.write_text("mlp: mlp_a.csv.gz\nattention: attention_a.csv.gz\n")
    named = operator_table_closure(names, model=MODEL, parallelism=SINGLE)
    plain = operator_table_closure(profile, model=MODEL, parallelism=SINGLE)
    assert named(decodes(3, 70)) == plain(decodes(3, 70))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("mpl: a.csv\n", "unknown key mpl"),
        ("mlp: a.csv\n", "no attention profile"),
        ("- mlp\n", "must map"),
        ("mlp: [\n", "cannot read"),
    ],
)
def test_a_yaml_file_that_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "profile.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        operator_table_closure(tmp_path / "profile.yaml", model=MODEL, parallelism=SINGLE)


def test_a_path_that_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a directory"):
        operator_table_closure(tmp_path / "absent", model=MODEL, parallelism=SINGLE)


@pytest.mark.parametrize("value", ["nan", "-0.5", "0", "", "fast", "inf"])
def test_a_time_that_cannot_be_is_named_with_its_line(tmp_path: Path, value: str) -> None:
    write_profile_directory(tmp_path)
    measured = mlp_rows()
    measured[2]["time_stats.attn_rope.median"] = value
    write_csv(tmp_path / "mlp.csv", measured)
    with pytest.raises(ConfigError, match=rf"mlp\.csv, line 4: time_stats\.attn_rope\.median is '{value}'"):
        operator_table_closure(tmp_path, model=MODEL, parallelism=SINGLE)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    write_profile_directory(tmp_path)
    write_csv(
        tmp_path / "attention.csv",
        [{key: value for key, value in row.items() if key != "kv_cache_size"} for row in attention_rows()],
    )
    with pytest.raises(ConfigError, match=r"attention\.csv lacks the column kv_cache_size; it has"):
        operator_table_closure(tmp_path, model=MODEL, parallelism=SINGLE)


def test_the_order_of_columns_does_not_matter(tmp_path: Path, profile: Path) -> None:
    write_profile_directory(tmp_path)
    write_csv(tmp_path / "mlp.csv", [dict(reversed(row.items())) for row in mlp_rows()])
    shape = decodes(5, 50)
    reordered = operator_table_closure(tmp_path, model=MODEL, parallelism=SINGLE)
    assert reordered(shape) == operator_table_closure(profile, model=MODEL, parallelism=SINGLE)(shape)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mlp.csv", "", "lacks the column"),
        ("mlp.csv", None, "no measurements"),
        ("attention.csv", None, "no measurements"),
        ("mlp.csv", b"\x1f\x8bcut", "cannot read"),
    ],
)
def test_a_file_without_measurements(
    tmp_path: Path, name: str, content: str | bytes | None, message: str
) -> None:
    write_profile_directory(tmp_path)
    header = (tmp_path / name).read_text().splitlines()[0] + "\n"
    raw = header if content is None else content
    (tmp_path / name).write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    with pytest.raises(ConfigError, match=message):
        operator_table_closure(tmp_path, model=MODEL, parallelism=SINGLE)


def test_a_line_cut_short_is_named(tmp_path: Path) -> None:
    write_profile_directory(tmp_path)
    text = (tmp_path / "mlp.csv").read_text()
    (tmp_path / "mlp.csv").write_text(text[: len(text) - 20])
    with pytest.raises(ConfigError, match=r"line 8: .*cut short"):
        operator_table_closure(tmp_path, model=MODEL, parallelism=SINGLE)


def test_profiles_of_something_else_are_refused(tmp_path: Path, profile: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_tensor_parallel_workers 4; it has 1"):
        operator_table_closure(profile, model=MODEL, parallelism=Parallelism(tensor=4))
    write_profile_directory(tmp_path, tensor=2)
    (tmp_path / "all_reduce.csv").unlink()
    with pytest.raises(ConfigError, match="needs a profile of all_reduce with 2 devices"):
        operator_table_closure(tmp_path, model=MODEL, parallelism=Parallelism(tensor=2))
    write_profile_directory(tmp_path)
    write_csv(tmp_path / "attention.csv", [{**row, "n_kv_head": 8} for row in attention_rows()])
    with pytest.raises(ConfigError, match=r"n_kv_head 2; it has 8"):
        operator_table_closure(tmp_path, model=MODEL, parallelism=SINGLE)
    write_csv(tmp_path / "attention.csv", [row for row in attention_rows() if row["is_prefill"]])
    with pytest.raises(ConfigError, match="no rows of attn_decode"):
        operator_table_closure(tmp_path, model=MODEL, parallelism=SINGLE)
