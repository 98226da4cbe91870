"""Terms of whole engines around the roofline."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.check.engine_rows import engine_seconds
from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import Parallelism, cpu_device, find_device
from onbeat.perfmodel.engines import (
    BOUNDS,
    ENGINES,
    EngineTerms,
    described_terms,
    find_engine,
    make_engine_roofline,
)
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import default_parameters
from onbeat.perfmodel.shapes import shape_matrix
from tests.pure.perfmodel.shapes import decodes, mixed_batches
from tests.pure.perfmodel.targets import make_roofline, make_step_time_model

MODEL = find_model_spec("Llama-3.1-8B")
EXPERTS = find_model_spec("Qwen3-30B-A3B")
DEVICE = find_device("h100-sxm")
TERMS = find_engine("vllm")
SHAPE = decodes(8, 1000)


def target_of(spec: ModelSpec, tensor: int = 1, precision: Precision | None = None) -> FitTarget:
    return FitTarget(
        model=spec, device=DEVICE, parallelism=Parallelism(tensor), precision=precision or Precision()
    )


def step(terms: EngineTerms, shape: BatchShape = SHAPE, *, tensor: int = 1, spec: ModelSpec = MODEL) -> float:
    return make_engine_roofline(terms, target_of(spec, tensor))(shape)


OWN = {name: getattr(TERMS, name) for name in BOUNDS}


def written(tmp_path: Path, **fields: object) -> str:
    """Return the path of a file of terms."""
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(fields))
    return str(path)


def test_every_engine_has_terms_from_a_version_on() -> None:
    for name in ENGINES:
        assert find_engine(name).steps_ahead == 1
        assert find_engine(name).version
        assert find_engine(name).sources


def test_an_engine_without_a_version_is_the_newest() -> None:
    assert find_engine("vllm") == find_engine("vllm@0.14")
    assert find_engine("vllm").row_seconds < find_engine("vllm@0.6").row_seconds / 2


@pytest.mark.parametrize(
    ("version", "entry"),
    [
        ("0.6", "0.6"),
        ("0.6.3", "0.6"),
        ("0.13.9", "0.6"),
        ("0.14", "0.14"),
        ("0.14.0", "0.14"),
        ("0.20.1", "0.14"),
        ("1", "0.14"),
    ],
)
def test_a_version_has_the_terms_of_the_newest_that_is_not_newer(version: str, entry: str) -> None:
    assert find_engine(f"vllm@{version}").version == entry


@pytest.mark.parametrize(
    "name", ["vllm", "vllm@0.12", "vllm@0.14.1", "vllm@0.20.7", "tensorrt-llm@1.2", "sglang"]
)
def test_a_version_that_was_measured_is_told_with_its_terms(name: str) -> None:
    told, terms = described_terms(name), find_engine(name)
    assert terms.version in told
    assert terms.through in told
    assert "guess" not in told


@pytest.mark.parametrize("name", ["vllm@99", "vllm@0.21", "tensorrt-llm@1.3.0", "sglang@0.6"])
def test_a_version_beyond_what_was_measured_is_told_to_be_a_guess(name: str) -> None:
    assert f"for {name.partition('@')[2]} they" in described_terms(name)


def test_vllm_plans_no_step_ahead_before_it_did() -> None:
    assert find_engine("vllm@0.12").steps_ahead == 0


@pytest.mark.parametrize("version", ["0.5", "0.5.9", "", "new", "0.6rc1", "-1", "0..6", "٣"])
def test_an_unknown_version_is_refused_with_those_that_are_known(version: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"vllm {version!r}")) as caught:
        find_engine(f"vllm@{version}")
    assert re.search(r"0\.6 and 0\.14 .*vllm@0\.6", str(caught.value))


def test_terms_may_come_from_a_file(tmp_path: Path) -> None:
    name = written(tmp_path, **{**OWN, "row_seconds": 2e-5}, version="9.1", sources={"row_seconds": "me"})
    terms = find_engine(name)
    assert (terms.row_seconds, terms.steps_ahead, terms.version) == (2e-5, 0, "9.1")
    model = make_step_time_model("roofline", model=MODEL, device=DEVICE, engine=name)
    newest = make_step_time_model("roofline", model=MODEL, device=DEVICE, engine="vllm")
    more = 8 * (2e-5 - TERMS.row_seconds)
    assert model.step_time(SHAPE) - newest.step_time(SHAPE) == pytest.approx(more)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"row_second": 1e-5}, r"'row_second': .* row_seconds"),
        ({"row_seconds": "fast"}, "row_seconds is 'fast';"),
        ({"row_seconds": True}, "row_seconds is True;"),
        ({"row_seconds": [1]}, r"row_seconds is \[1\];"),
        ({"gemm_ratio": 3}, r"gemm_ratio .* 3;"),
        ({"steps_ahead": 2}, "steps_ahead is 2;"),
        ({"steps_ahead": True}, "steps_ahead is True"),
        ({"version": 0.2}, "version is 0.2;"),
        ({"sources": "me"}, "sources is 'me';"),
    ],
)
def test_wrong_terms_in_a_file_are_refused(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find_engine(written(tmp_path, **{**OWN, **fields}))
    assert "mine.yaml" in str(caught.value)


def test_a_file_that_lacks_terms_or_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lacks layer_ratio"):
        find_engine(written(tmp_path, row_seconds=1e-5))
    path = tmp_path / "empty.yml"
    path.write_text("")
    with pytest.raises(ConfigError, match="row_seconds"):
        find_engine(str(path))
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        find_engine(str(tmp_path / "none.yaml"))


def test_a_number_without_a_point_is_a_number_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(OWN).replace("row_seconds: 9.66e-06", "row_seconds: 1e-05"))
    assert isinstance(yaml.safe_load(path.read_text())["row_seconds"], str)
    assert find_engine(str(path)).row_seconds == 1e-5


@pytest.mark.parametrize("spec", [MODEL, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_both_evaluations_agree(spec: ModelSpec, tensor: int) -> None:
    shapes = [BatchShape(), *mixed_batches(30, seed=5)]
    seconds = engine_seconds(shape_matrix(shapes), TERMS, target_of(spec, tensor))
    assert seconds.tolist() == pytest.approx([step(TERMS, each, tensor=tensor, spec=spec) for each in shapes])
    assert seconds[0] == 0


def test_a_run_of_steps_takes_what_its_steps_take_to_the_last_digit() -> None:
    run = make_engine_roofline(TERMS, target_of(EXPERTS, 4)).of_run
    contexts = [1000, 1008, 1016]
    one_by_one = [step(TERMS, decodes(8, each // 8), tensor=4, spec=EXPERTS) for each in contexts]
    assert list(run(SHAPE, contexts)) == one_by_one


def test_a_term_costs_what_it_says() -> None:
    free = replace(TERMS, row_seconds=0.0, layer_ratio=1.0, expert_seconds=0.0, all_reduce_seconds=0.0)
    layers = MODEL.num_layers
    kernels = default_parameters(DEVICE, Precision()).layer_seconds
    assert step(replace(free, row_seconds=1e-5)) - step(free) == pytest.approx(8e-5)
    assert step(replace(free, layer_ratio=2.0)) - step(free) == pytest.approx(kernels * layers)
    assert step(replace(free, expert_seconds=1e-7)) == step(free)
    more = replace(free, expert_seconds=1e-7)
    experts = EXPERTS.num_experts * EXPERTS.num_moe_layers
    assert step(more, spec=EXPERTS) - step(free, spec=EXPERTS) == pytest.approx(1e-7 * experts)
    slow = replace(free, all_reduce_seconds=1e-5)
    starts = [(step(slow, tensor=each) - step(free, tensor=each)) / (2 * layers) for each in (1, 2, 4, 8)]
    assert starts == pytest.approx([0, 1e-5, 1.5e-5, 2e-5], abs=1e-12)


def test_eight_bit_arithmetic_has_an_efficiency_of_its_own() -> None:
    prompt = BatchShape()
    prompt.add(0, 8192, samples=True)
    narrow = replace(TERMS, narrow_gemm_ratio=TERMS.narrow_gemm_ratio * 2)
    target = target_of(MODEL, precision=Precision("fp8", "fp8", "fp8"))
    fast, slow = (make_engine_roofline(terms, target)(prompt) for terms in (TERMS, narrow))
    assert slow > 1.5 * fast
    assert step(narrow, prompt) == step(TERMS, prompt)


def test_a_step_of_an_engine_takes_about_what_its_operators_take() -> None:
    operators = make_roofline(MODEL, DEVICE, parallelism=Parallelism(8))
    for name in (*ENGINES, "vllm@0.6"):
        model = make_step_time_model(
            "roofline", model=MODEL, device=DEVICE, parallelism=Parallelism(8), engine=name
        )
        assert 0.75 < model.step_time(SHAPE) / operators(SHAPE) < 1.35
        assert model.step_time(SHAPE, 0.9) / model.step_time(SHAPE) < 1.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link_efficiency": 1.2}, r"link_efficiency .* 1.2"),
        ({"layer_ratio": -1}, r"layer_ratio .* -1"),
        ({"row_seconds": float("nan")}, r"row_seconds .* nan"),
    ],
)
def test_terms_no_engine_has_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TERMS, **changes)  # type: ignore[arg-type]


def test_an_unknown_engine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'tgi'"):
        make_step_time_model("roofline", model=MODEL, device=DEVICE, engine="tgi")


def test_an_engine_on_a_cpu_is_refused() -> None:
    cpu = cpu_device(memory_bandwidth=1e11, peak_flops=1e12)
    with pytest.raises(ConfigError, match="--engine"):
        make_step_time_model("roofline", model=MODEL, device=cpu, engine="vllm")


def test_an_engine_beside_measurements_is_refused() -> None:
    with pytest.raises(ConfigError, match="--engine"):
        make_step_time_model("fitted", model=MODEL, device=DEVICE, engine="vllm")
