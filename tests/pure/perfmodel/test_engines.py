"""Terms of whole engines around the roofline."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import cpu_device, find_device
from onbeat.perfmodel.engines import (
    ENGINES,
    EngineTerms,
    engine_seconds,
    find_engine,
    make_engine_roofline,
)
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import make_roofline
from onbeat.perfmodel.shapes import shape_matrix
from onbeat.simulator.settings import ReplicaSettings
from tests.pure.perfmodel.shapes import decodes, mixed_batches

MODEL = find_model_spec("Llama-3.1-8B")
EXPERTS = find_model_spec("Qwen3-30B-A3B")
DEVICE = find_device("h100-sxm")
TERMS = find_engine("vllm")
SHAPE = decodes(8, 1000)


def step(terms: EngineTerms, shape: BatchShape = SHAPE, *, tensor: int = 1, spec: object = MODEL) -> float:
    closure = make_engine_roofline(
        terms,
        spec,  # type: ignore[arg-type]
        DEVICE,
        parallelism=Parallelism(tensor),
        precision=Precision(),
    )
    return closure(shape)


def test_every_engine_has_terms_and_a_flag() -> None:
    assert get_args(get_type_hints(ReplicaSettings)["engine"]) == ("none", *ENGINES)
    for name in ENGINES:
        assert find_engine(name).steps_ahead == 1


@pytest.mark.parametrize("spec", [MODEL, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_both_evaluations_agree(spec: object, tensor: int) -> None:
    shapes = [BatchShape(), *mixed_batches(30, seed=5)]
    seconds = engine_seconds(
        shape_matrix(shapes),
        TERMS,
        spec,  # type: ignore[arg-type]
        DEVICE,
        parallelism=Parallelism(tensor),
        precision=Precision(),
    )
    assert seconds.tolist() == pytest.approx([step(TERMS, each, tensor=tensor, spec=spec) for each in shapes])
    assert seconds[0] == 0


def test_a_run_of_steps_takes_what_its_steps_take_to_the_last_digit() -> None:
    what = {"parallelism": Parallelism(4), "precision": Precision()}
    run = make_engine_roofline(TERMS, EXPERTS, DEVICE, **what).of_run  # type: ignore[arg-type]
    contexts = [1000, 1008, 1016]
    one_by_one = [step(TERMS, decodes(8, each // 8), tensor=4, spec=EXPERTS) for each in contexts]
    assert list(run(SHAPE, contexts)) == one_by_one


def test_a_term_costs_what_it_says() -> None:
    free = replace(
        TERMS, row_seconds=0.0, layer_seconds=0.0, expert_layer_seconds=0.0, all_reduce_seconds=0.0
    )
    layers = MODEL.num_layers
    assert step(replace(free, row_seconds=1e-5)) - step(free) == pytest.approx(8e-5)
    assert step(replace(free, layer_seconds=1e-5)) - step(free) == pytest.approx(1e-5 * layers)
    assert step(replace(free, expert_layer_seconds=1e-5)) == step(free)
    more = replace(free, expert_layer_seconds=1e-5)
    assert step(more, spec=EXPERTS) - step(free, spec=EXPERTS) == pytest.approx(1e-5 * EXPERTS.num_moe_layers)
    slow = replace(free, all_reduce_seconds=1e-5)
    starts = [(step(slow, tensor=each) - step(free, tensor=each)) / (2 * layers) for each in (1, 2, 4, 8)]
    assert starts == pytest.approx([0, 1e-5, 1.5e-5, 2e-5], abs=1e-12)


def test_eight_bit_arithmetic_has_an_efficiency_of_its_own() -> None:
    prompt = BatchShape()
    prompt.add(0, 8192, samples=True)
    narrow = replace(TERMS, narrow_gemm_efficiency=TERMS.narrow_gemm_efficiency / 2)
    eight = Precision("fp8", "fp8", "fp8")
    at = {"model": MODEL, "device": DEVICE, "parallelism": Parallelism()}
    fast, slow = (
        make_engine_roofline(terms, precision=eight, **at)(prompt)  # type: ignore[arg-type]
        for terms in (TERMS, narrow)
    )
    assert slow > 1.5 * fast
    assert step(narrow, prompt) == step(TERMS, prompt)


def test_a_step_of_an_engine_takes_longer_than_its_operators() -> None:
    operators = make_roofline(MODEL, DEVICE, parallelism=Parallelism(8))
    for name in ENGINES:
        model = make_step_time_model(
            "roofline", model=MODEL, device=DEVICE, parallelism=Parallelism(8), engine=name
        )
        assert model.step_time(SHAPE) > operators(SHAPE)
        assert model.step_time(SHAPE, 0.9) / model.step_time(SHAPE) < 1.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link_efficiency": 1.2}, "link_efficiency of an engine is 1.2"),
        ({"layer_seconds": -1e-6}, "layer_seconds of an engine is -1e-06"),
        ({"row_seconds": float("nan")}, "row_seconds of an engine is nan"),
        ({"steps_ahead": 2}, "steps_ahead of an engine is 2; it must be 0 or 1"),
    ],
)
def test_terms_no_engine_has_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TERMS, **changes)  # type: ignore[arg-type]


def test_an_unknown_engine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'tgi'; known are vllm, tensorrt-llm, sglang"):
        make_step_time_model("roofline", model=MODEL, device=DEVICE, engine="tgi")


def test_an_engine_on_a_cpu_is_refused() -> None:
    cpu = cpu_device(memory_bandwidth=1e11, peak_flops=1e12)
    with pytest.raises(ConfigError, match="fitted to GPUs and hold for no CPU; leave --engine out"):
        make_step_time_model("roofline", model=MODEL, device=cpu, engine="vllm")


def test_an_engine_beside_measurements_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--engine vllm adds the terms .* the step-time model linear rests on"
    ):
        make_step_time_model("linear", model=MODEL, device=DEVICE, engine="vllm")
