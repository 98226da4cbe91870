"""The file of a plan."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.files import read
from onbeat.planner.plan_file import _seal, digest_of, digest_of_classes, read_promise, write_plan
from tests.examples import examples


def write(path: Path, **load: object) -> Path:
    plan = {
        "promise": {"attainment": 0.9, "slo-mode": "stream", "request-rate": 4},
        "fleet": "2 l4",
        "load": {"request-rate": 4, "num-prompts": 100, **load},
        "trace-sha256": digest_of(path.parent / "t.csv") if "trace" in load else None,
    }
    write_plan(path, {"model": "m", "fleet": {"replicas": 2}}, plan)
    return path


def test_a_promise_is_read_as_it_was_written(tmp_path: Path) -> None:
    promise = read_promise(write(tmp_path / "plan.yaml"))
    assert (promise.share, promise.mode, promise.fleet) == (0.9, "stream", "2 l4")
    assert promise.load == {"request-rate": 4, "num-prompts": 100}
    text = (tmp_path / "plan.yaml").read_text()
    assert "plan.yaml" in text


def test_a_trace_is_found_from_the_folder_of_the_plan_and_must_be_the_same(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("a\n")
    path = write(tmp_path / "plan.yaml", trace="t.csv")
    assert read_promise(path).load["trace"] == str(trace)
    trace.write_text("b\n")
    with pytest.raises(ConfigError, match=r"t\.csv.*not"):
        read_promise(path)


def test_classes_and_their_traces_must_be_the_same(tmp_path: Path) -> None:
    trace, classes = tmp_path / "own.csv", tmp_path / "classes.yaml"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n10,5\n")
    classes.write_text("classes: [{name: a, ttft_ms: 500, trace: own.csv}]")
    plan = {
        "promise": {"attainment": 0.9, "slo-mode": "stream", "request-rate": 4},
        "fleet": "2 l4",
        "load": {"slo-config": "classes.yaml"},
        "trace-sha256": None,
        "classes-sha256": digest_of_classes(str(classes)),
    }
    path = tmp_path / "plan.yaml"
    write_plan(path, {"model": "m"}, plan)
    assert read_promise(path).load["slo-config"] == str(classes)
    trace.write_text("num_prefill_tokens,num_decode_tokens\n10,6\n")
    with pytest.raises(ConfigError, match=r"classes\.yaml,.*plan\.yaml"):
        read_promise(path)
    trace.write_text("num_prefill_tokens,num_decode_tokens\n10,5\n")
    classes.write_text("classes: [{name: a, ttft_ms: 900, trace: own.csv}]")
    with pytest.raises(ConfigError, match=r"classes\.yaml,.*plan\.yaml"):
        read_promise(path)


@pytest.mark.parametrize(
    ("old", "new"), [("attainment: 0.9", "attainment: 0.5"), ("replicas: 2", "replicas: 3")]
)
def test_a_promise_that_was_edited_is_none(tmp_path: Path, old: str, new: str) -> None:
    path = write(tmp_path / "plan.yaml")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match="changed"):
        read_promise(path)


def test_a_promise_without_its_seal_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "plan.yaml")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "seal:" not in line))
    with pytest.raises(ConfigError, match="changed"):
        read_promise(path)


def test_flags_of_the_server_may_be_added(tmp_path: Path) -> None:
    path = write(tmp_path / "plan.yaml")
    path.write_text("port: 9000\n" + path.read_text())
    assert read_promise(path).share == 0.9


@pytest.mark.parametrize("text", ["", "- a\n", "model: m\n", "plan: 3\n", "plan: {promise: {}}\n", "a: [\n"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}.*onbeat plan"):
        read_promise(path)


OTHERS: list[Any] = [None, True, -1, 1, 1e308, "", "x", "/dev/zero", "\udcff", [], ["x"], {}, {"x": 1}]


@examples(200)
@given(
    section=st.sampled_from(["promise", "load", "verified", None]),
    name=st.sampled_from(
        [
            *(
                "attainment",
                "slo-mode",
                "trace",
                "dataset-path",
                "slo-config",
                "mean-tpot-ms",
                "request-rate",
            ),
            *("promise", "load", "fleet", "trace-sha256", "classes-sha256", "verified"),
        ]
    ),
    value=st.one_of(st.sampled_from(OTHERS), st.just(Ellipsis)),
)
def test_a_plan_that_was_sealed_anew_is_refused_in_words(
    section: str | None, name: str, value: object
) -> None:
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "plan.yaml")
        plan = read(dict[str, Any], path)["plan"]
        plan.pop("seal")
        holder = plan if section is None else plan.setdefault(section, {})
        if value is Ellipsis:
            holder.pop(name, None)
        else:
            holder[name] = value
        write_plan(path, {"model": "m", "fleet": {"replicas": 2}}, plan)
        try:
            read_promise(path)
        except ConfigError as error:
            assert len(str(error)) < 500  # noqa: PT017 - either is right


def test_a_plan_that_lacks_its_load_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(path, {}, {"promise": {"attainment": 0.9, "slo-mode": "stream"}, "fleet": "2 l4"})
    with pytest.raises(ConfigError, match="lacks load"):
        read_promise(path)


def test_a_seal_is_never_read_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Digest:
        def hexdigest(self) -> str:
            return "1234567890e12345"

    monkeypatch.setattr("onbeat.planner.plan_file.hashlib.sha256", lambda _text: Digest())
    assert _seal({}, None) == "x1234567890e12345"
