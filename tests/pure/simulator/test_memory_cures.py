"""What a refusal for want of memory names was tried, works, and is the least that does."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.cli.args import INFEASIBLE
from onbeat.cli.main import main
from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.options import change, make
from onbeat.perfmodel.device_spec import device_ids
from onbeat.perfmodel.memory import Choices
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import BYTES
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve, resolve_for
from onbeat.simulator.speculation import Drafts
from onbeat.speculative_config import SpeculativeConfig
from tests.examples import examples
from tests.pure.planner.test_units import load_of

MODELS = (
    "opt-13b",
    "opt-30b",
    "Llama-3.1-8B",
    "Llama-3.1-70B",
    "Qwen2.5-14B",
    "Mixtral-8x7B-v0.1",
    "falcon-180B",
)
GPUS = tuple(device for device in device_ids() if device != "cpu")
FLAGS = {"--tp": "tensor_parallel", "--pp": "pipeline_parallel", "--dtype": "dtype"}


def settings_of(model: str = "Llama-3.1-8B", device: str = "l4", **values: Any) -> Deployment:
    return make(Deployment, model=model, device=device, **values)


def cures_of(message: str) -> list[dict[str, Any]]:
    """Return the changes that a refusal names, as settings."""
    found = re.search(r"What fits: (.*)$", message)
    if found is None:
        return []
    named = []
    for text in found[1].split(", or "):
        words = text.split()
        assert len(words) % 2 == 0, text
        pairs = zip(words[::2], words[1::2], strict=True)
        named.append({FLAGS[flag]: int(word) if word.isdecimal() else word for flag, word in pairs})
    return named


def fits(settings: Deployment, **changes: Any) -> bool:
    try:
        resolve(change(settings, **changes))
    except ConfigError:
        return False
    return True


@examples(80)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(GPUS),
    st.sampled_from([None, 512, 1.0, 0.5]),
    st.sampled_from(["fp32", "fp16", "int8"]),
    st.sampled_from([1, 2]),
)
def test_every_cure_works_and_a_smaller_one_does_not_exist(
    model: str, device: str, length: float | None, dtype: str, tensor: int
) -> None:
    spec = find_model_spec(model)
    longest = round(spec.max_position_embeddings * length) if isinstance(length, float) else length
    settings = settings_of(model, device, max_model_len=longest, dtype=dtype, tensor_parallel=tensor)
    try:
        resolve(settings)
    except DoesNotFit as error:
        message = str(error)
    except ConfigError:
        return  # a format or a degree that this device or model has not
    else:
        return
    assert re.search(r"needs [\d.]+ GiB .* has [\d.]+", message)
    degrees = [n for n in range(1, spec.num_heads + 1) if spec.num_heads % n == 0]
    castable = ("bf16", "fp16", "fp8", "int8", "int4")  # mxfp4 and nvfp4 are published so, or not to be had
    narrower = sorted(
        (name for name in castable if BYTES[name] < BYTES[dtype]), key=lambda name: -BYTES[name]
    )
    expected = [
        {key: least}
        for key, values in (
            ("tensor_parallel", [n for n in degrees if n > tensor]),
            ("pipeline_parallel", range(2, spec.num_layers + 1)),
            ("dtype", narrower),
        )
        if (least := next((value for value in values if fits(settings, **{key: value})), None)) is not None
    ]
    named = cures_of(message)
    if expected:
        assert named == expected
        return
    assert len(named) <= 1
    assert all(len(cure) > 1 and fits(settings, **cure) for cure in named)
    if not named:
        everything = product((max(degrees),), (1, spec.num_layers), (dtype, *narrower))
        assert not any(
            fits(settings, tensor_parallel=t, pipeline_parallel=p, dtype=name) for t, p, name in everything
        )


def test_the_least_degree_is_named_and_no_format_that_the_device_lacks() -> None:
    with pytest.raises(DoesNotFit) as caught:
        resolve(settings_of("opt-30b", "a100-40-sxm"))
    assert cures_of(str(caught.value)) == [
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"dtype": "int8"},
    ]


def test_what_no_single_change_does_is_named_together() -> None:
    with pytest.raises(DoesNotFit) as caught:
        resolve(
            settings_of("Llama-3.1-405B", "l4", dtype="bf16"), choices=Choices(pipeline=None, most_devices=16)
        )
    (cure,) = cures_of(str(caught.value))
    assert cure == {"tensor_parallel": 16, "dtype": "int4"}
    with pytest.raises(DoesNotFit, match=r"No degree .*format"):
        resolve(settings_of("Llama-3.1-405B"), choices=Choices(pipeline=None, most_devices=8))


def test_a_draft_model_that_does_not_fit_beside_its_target_is_cured_likewise() -> None:
    drafts = SpeculativeConfig(method="draft-model", num_speculative_tokens=4, model="Llama-3.2-3B")
    settings = settings_of(speculative=drafts)
    assert fits(settings, speculative=None)
    with pytest.raises(DoesNotFit, match="draft model") as caught:
        resolve(settings)
    cures = cures_of(str(caught.value))
    assert cures
    assert all(fits(settings, **cure) for cure in cures)


@pytest.mark.parametrize(
    ("values", "length", "message"),
    [
        (
            {},
            60_000,
            r"1 of 2 .* 43536.*needs .* --tp 2",
        ),
        ({}, 200_000, r"for 131072 tokens"),
        ({"max_model_len": 2048}, 3_000, r"--max-model-len is 2048; give --max-model-len 3010"),
        ({"max_model_len": 2048}, 60_000, r"of 2048.*What fits: --tp 2"),
    ],
)
def test_a_context_says_whether_flag_model_or_memory_binds_it(
    values: dict[str, Any], length: int, message: str
) -> None:
    load = load_of([(100, 10), (length, 10)])
    with pytest.raises(ConfigError, match=message):
        resolve_for(settings_of(**values), load, ())


@pytest.mark.parametrize("command", ["capacity --device h100-sxm", "plan --gpus h100-sxm=1 --rate 0.1"])
def test_a_search_for_hardware_that_is_too_small_ends_as_infeasible(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = "--dtype fp8 --random-input-len 12000 --random-output-len 1000 --num-prompts 60"
    objective = "--slo-ttft-ms 5000 --slo-tbt-ms 200"

    assert (
        main([*command.split(), "--model", "Llama-3.1-70B", *load.split(), *objective.split()]) == INFEASIBLE
    )
    assert "INFEASIBLE" in capsys.readouterr().out


def test_a_cache_of_few_blocks_says_how_many_would_do() -> None:
    few = settings_of("Llama-3.1-8B", "h100-sxm", max_model_len=1300, num_blocks=68)
    with pytest.raises(ConfigError) as caught:
        resolve(few)
    named = re.search(r"(\d+) blocks \(--num-blocks", str(caught.value))
    assert named is not None

    assert resolve(change(few, num_blocks=int(named[1]))).config.max_model_len == 1300


LOOKED_UP = SpeculativeConfig(method="ngram", num_speculative_tokens=12)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("speculative", [None, LOOKED_UP])
def test_states_take_their_part_of_the_memory(
    tensor_parallel: int, speculative: SpeculativeConfig | None
) -> None:
    deployment = Deployment(
        model="Qwen3.5-27B",
        device="h200",
        tensor_parallel=tensor_parallel,
        drafts=Drafts(speculative=speculative),
    )
    resolved = resolve(deployment)
    memory, limits = resolved.memory, resolved.config.scheduler
    assert memory is not None
    assert limits.num_snapshots
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    model = resolved.target.model
    state_bytes = (model.state_bytes + num_drafts * model.draft_state_bytes) / tensor_parallel
    held = memory.num_blocks * memory.block_bytes + (limits.max_num_seqs + limits.num_snapshots) * state_bytes
    assert 0.99 * memory.kv_bytes < held <= memory.kv_bytes
    assert memory.block_bytes == 16 * model.kv_bytes_per_token(resolved.target.precision) / tensor_parallel
    assert (limits.max_num_seqs + limits.num_snapshots) * state_bytes <= memory.kv_bytes / 2
