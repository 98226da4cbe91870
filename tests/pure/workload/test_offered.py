"""A load as columns, its classes of objectives, and files of classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLO_CLASSES
from onbeat.workload.offered import OfferedLoad, assign_classes
from onbeat.workload.slo_classes import SLOClass, read_slo_config

HALF = tuple(SLOClass(name=name, slo=SLO_CLASSES[name], share=0.5) for name in ("interactive", "batch"))


def load(**columns: object) -> OfferedLoad:
    defaults: dict[str, object] = {
        "name": "test",
        "num_prompt_tokens": np.array([10, 20, 30, 40]),
        "num_output_tokens": np.array([1, 2, 3, 4]),
        "arrivals": np.array([0.0, 1.0, 1.0, 4.0]),
    }
    return OfferedLoad(**(defaults | columns))  # type: ignore[arg-type]


def arrivals_of(offered: OfferedLoad) -> list[float]:
    assert offered.arrivals is not None
    return list(offered.arrivals)


def test_take_keeps_columns_together() -> None:
    taken = load(
        block_ids=((1,), (2,), (3,), (4,)), lines=np.array([2, 3, 4, 5]), tenants=("a", None, "b", "c")
    ).take([1, 3])

    assert taken.num_prompt_tokens.tolist() == [20, 40]
    assert arrivals_of(taken) == [1.0, 4.0]
    assert taken.block_ids == ((2,), (4,))
    assert taken.tenants == (None, "c")
    assert taken.lines is not None
    assert taken.lines.tolist() == [3, 5]


def test_rates() -> None:
    assert load().rate == 1.0
    assert load(arrivals=None).rate is None
    assert load(arrivals=np.zeros(4)).rate == float("inf")
    assert arrivals_of(load().at_rate(4.0)) == [0.0, 0.25, 0.25, 1.0]
    assert load().at_rate(0.3).rate == pytest.approx(0.3)
    assert load().with_arrivals(None).arrivals is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: load().at_rate(float("inf")), "request rate"),
        (lambda: load(arrivals=None).at_rate(1.0), "closed loop"),
        (lambda: load(arrivals=np.zeros(4)).at_rate(1.0), "at once"),
        (lambda: load(arrivals=np.array([0.0, 1.0, 0.5, 2.0])), r"request 2 .* 0.5"),
        (lambda: load(arrivals=np.array([-1.0, 1.0, 1.5, 2.0])), "negative"),
        (lambda: load(arrivals=np.array([0.0, np.nan, 1.5, 2.0])), "request 1 arrives at nan"),
        (lambda: load(arrivals=np.array([0.0])), r"4 .* 1"),
        (lambda: load(tenants=("a", "b")), r"4 .* 2"),
        (lambda: load(num_output_tokens=np.array([1, -1, 1, 1])), "request 1 has -1"),
        (lambda: load(num_prompt_tokens=np.array([], dtype=np.int64)), "no requests"),
        (lambda: load(block_size=0), "block"),
        (lambda: load(classes=HALF), "go together"),
        (lambda: load(classes=HALF, class_ids=np.array([0, 1, 2, 0], dtype=np.int16)), "class id"),
    ],
)
def test_what_makes_no_load_is_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_requests_that_do_not_fit() -> None:
    assert load().check_lengths(44, overlong="error") is not None
    with pytest.raises(ConfigError, match=r"2 of 4 .* request 2: .* 30 \+ .* 3 .*skip"):
        load().check_lengths(32, overlong="error")
    with pytest.raises(ConfigError, match="line 9"):
        load(lines=np.array([7, 8, 9, 10])).check_lengths(32, overlong="error")
    fitted = load().check_lengths(32, overlong="skip")
    assert (fitted.num_prompt_tokens.tolist(), fitted.num_skipped) == ([10, 20], 2)
    with pytest.raises(ConfigError, match="4 of 4") as refusal:
        load().check_lengths(5, overlong="skip")
    assert "skip" not in str(refusal.value)


def test_classes_are_decided_by_the_seed() -> None:
    offered = load().with_classes(HALF, seed=3)

    assert offered.class_ids is not None
    assert sorted(offered.class_ids.tolist()) == [0, 0, 1, 1]
    again = load().with_classes(HALF, seed=3)
    assert [again.slo(i) for i in range(4)] == [offered.slo(i) for i in range(4)]
    assert {offered.slo(i) for i in range(4)} == {SLO_CLASSES["interactive"], SLO_CLASSES["batch"]}
    assert load().slo(0) is None


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 200))
def test_shares_are_kept_to_one_request(weights: list[int], num_requests: int) -> None:
    shares = np.array(weights) / sum(weights)
    classes = [SLOClass(name=str(i), slo=SLO(), share=share) for i, share in enumerate(shares)]
    counts = np.bincount(
        assign_classes(num_requests, classes, np.random.default_rng(0)), minlength=len(classes)
    )

    assert counts.sum() == num_requests
    assert (np.abs(counts - shares * num_requests) < 1 + 1e-9).all()


CONFIG = """
classes:
  - {name: interactive, share: 0.7, weight: 2.5}
  - {name: report, share: 0.3, ttft_ms: 5000, e2e_ms: 60000, tenant: finance}
"""


def test_classes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(CONFIG)

    assert read_slo_config(path) == (
        SLOClass(name="interactive", slo=SLO_CLASSES["interactive"], share=0.7, weight=2.5),
        SLOClass(name="report", slo=SLO(ttft=5.0, e2e=60.0), share=0.3, tenant="finance"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: []", "a list"),
        ("- a", "a mapping"),
        ("classes: [{name: interactive}]\nmode: gap", "field 'mode'"),
        (": :", "cannot read"),
        ("classes: [{share: 1}]", r"classes\[0\] lacks name"),
        ("classes: [{name: chat}]", "built in"),
        ("classes: [{name: chat, ttft: 5}]", "field 'ttft'"),
        ("classes: [{name: chat, ttft_ms: fast}]", "ttft_ms is 'fast';"),
        ("classes: [{name: chat, ttft_ms: 0}]", "1 ms"),
        ("classes: [{name: batch}, {name: standard, share: 0.5}]", "'batch' has no share"),
        ("classes: [{name: batch, share: 0.6}, {name: standard, share: 0.5}]", "to 1, got 1.1"),
        ("classes: [{name: batch, share: 0.5}, {name: batch, share: 0.5}]", "than once"),
        ("classes: [{name: batch, share: 1.5}]", r"must lie in \(0, 1\]"),
        ("classes: [{name: batch, weight: 0}]", "'batch' is 0;"),
        ("classes: [{name: batch, weight: .inf}]", "weight is inf"),
        ("classes: [{name: batch, tenant: 7}]", "tenant is 7;"),
        ("classes: [{name: batch, tenant: ''}]", "1 to 128 printable"),
        ("classes: [{name: batch, tenant: 'Zürich'}]", r"'Zürich'; .* 1 to 128"),
        (f"classes: [{{name: batch, tenant: {'x' * 129}}}]", "1 to 128 printable"),
    ],
)
def test_bad_files_of_classes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_slo_config(path)


def test_a_missing_file_of_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such"):
        read_slo_config(tmp_path / "none.yaml")


TRACE = "num_prefill_tokens,num_decode_tokens\n700,7\n800,8\n"


def test_a_class_with_a_trace_has_requests_as_long_as_that(tmp_path: Path) -> None:
    (tmp_path / "code.csv").write_text(TRACE)
    path = tmp_path / "classes.yaml"
    path.write_text(
        "classes:\n- {name: chat, share: 0.6, ttft_ms: 500}\n"
        "- {name: code, share: 0.4, ttft_ms: 2000, trace: code.csv}\n"
    )
    lengths = np.full(1000, 10)
    base = load(num_prompt_tokens=lengths, num_output_tokens=lengths, arrivals=np.arange(1000.0))
    mixed = base.with_classes(read_slo_config(path), seed=1)
    assert mixed.class_ids is not None
    is_code = np.equal(mixed.class_ids, 1)
    assert is_code.sum() == 400
    assert (mixed.num_prompt_tokens[~is_code] == 10).all()
    assert set(mixed.num_prompt_tokens[is_code].tolist()) == {700, 800}
    assert (mixed.num_output_tokens * 100 == mixed.num_prompt_tokens)[is_code].all()
    assert mixed.arrivals is base.arrivals
    assert mixed.name == "test + code.csv"
    again = base.with_classes(read_slo_config(path), seed=1)
    assert (again.num_prompt_tokens == mixed.num_prompt_tokens).all()
    other = base.with_classes(read_slo_config(path), seed=2)
    assert (other.num_prompt_tokens != mixed.num_prompt_tokens).any()


def test_traces_of_classes_do_not_go_with_prompts_that_share_blocks(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text(TRACE)
    shared = tmp_path / "shared.jsonl"
    shared.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n')
    blocks = load(block_ids=((1,), (1,), (2,), (2,)))
    with pytest.raises(ConfigError, match=r"test load .*blocks"):
        blocks.with_classes([SLOClass(name="a", slo=SLO(ttft=1.0), trace=own)], seed=0)
    with pytest.raises(ConfigError, match=r"class 'a': .*shared\.jsonl .*blocks"):
        load().with_classes([SLOClass(name="a", slo=SLO(ttft=1.0), trace=shared)], seed=0)
    with pytest.raises(ConfigError, match="cannot read"):
        load().with_classes([SLOClass(name="a", slo=SLO(ttft=1.0), trace=tmp_path / "none.csv")], seed=0)
