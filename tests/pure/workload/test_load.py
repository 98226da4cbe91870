"""From data sets and arrivals to loads; published data where it is at hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.workload.load import Load, LoadName

LENGTHS = "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{100 + i},{200 + i}\n" for i in range(50))
MOONCAKE = "timestamp_ms,input_length,output_length,hash_ids\n0,700,50,4 9\n1000,512,0,4\n4000,600,3,4 5\n"
STEPS = "1:10,4:10"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["random", "conversation"])
def test_drawn_loads_depend_on_the_seed_alone(name: LoadName) -> None:
    def make(seed: int) -> tuple[object, ...]:
        asked = Load(dataset_name=name, input_len=300, output_len=40, arrivals="poisson", request_rate=3.0)
        ratio = 0.5 if name == "random" else 0.0
        load = replace(asked, num_prompts=200, seed=seed, random_range_ratio=ratio).offered()
        assert load.arrivals is not None
        return load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist(), load.arrivals.tolist()

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_lengths_do_not_change_with_the_arrivals() -> None:
    asked = Load(dataset_name="conversation", input_len=300, num_prompts=50, seed=4)
    closed = replace(asked, max_concurrency=2).offered()
    poisson = replace(asked, arrivals="poisson").offered()

    assert closed.arrivals is None
    assert closed.num_prompt_tokens.tolist() == poisson.num_prompt_tokens.tolist()


def test_lengths_of_a_file_come_in_pairs_and_may_be_drawn_again(tmp_path: Path) -> None:
    asked = Load(dataset_name="lengths", dataset_path=write(tmp_path / "l.csv", LENGTHS), request_rate=1.0)
    once, many = asked.offered(), replace(asked, num_prompts=1000).offered()

    assert sorted(once.num_prompt_tokens.tolist()) == list(range(100, 150))
    for load in (once, many):
        assert (load.num_output_tokens - load.num_prompt_tokens == 100).all()
        assert load.lines is not None
        assert (load.lines == load.num_prompt_tokens - 98).all()
    assert set(many.num_prompt_tokens.tolist()) == set(range(100, 150))


def test_a_replay_keeps_times_blocks_and_order(tmp_path: Path) -> None:
    asked = Load(trace=write(tmp_path / "m.csv", MOONCAKE))
    load = replace(asked, rate_scale=2.0).offered()

    assert load.arrivals is not None
    assert load.arrivals.tolist() == [0.0, 0.5, 2.0]
    assert load.block_ids == ((4, 9), (4,), (4, 5))
    assert load.num_output_tokens.tolist() == [50, 1, 3]  # no engine takes a request for nothing
    assert replace(asked, arrivals="replay", request_rate=0.5).offered().rate == pytest.approx(0.5)


def test_a_sharegpt_file_is_measured_with_the_tokenizer(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a b c d e"}, {"from": "gpt", "value": "f g h i"}]
    path = write(tmp_path / "s.json", json.dumps([{"conversations": turns}] * 3))
    asked = Load(dataset_name="sharegpt", dataset_path=path, num_prompts=2, max_concurrency=1)

    load = asked.offered(count_tokens=lambda text: len(text.split()))

    assert (load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist()) == ([5, 5], [4, 4])
    assert load.texts == ("a b c d e",) * 2
    with pytest.raises(ConfigError, match="give --tokenizer"):
        asked.offered()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": "azure"}, "--dataset-name azure needs a file"),
        ({"dataset_path": Path("x")}, "--dataset-name random reads no file"),
        ({"dataset_name": "azure", "dataset_path": Path("x"), "length_columns": "a,b"}, "--length-columns"),
        ({"dataset_name": "lanes", "output_len": 3}, "--output-len"),
        ({"dataset_name": "conversation", "random_output_range_ratio": 0.1}, "--random-output-range-ratio"),
    ],
)
def test_contradictory_sources_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Load(**options).named()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": "replay"}, r"has 3 .* --num-prompts is 4"),
        ({"request_rate": 2.0}, "shared blocks"),
    ],
)
def test_a_short_file_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "m.csv", MOONCAKE)

    with pytest.raises(ConfigError, match=message):
        Load(trace=path, num_prompts=4, **options).offered()


def test_lengths_have_no_times_to_replay(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", LENGTHS)

    assert Load(trace=path).offered().rate == 1.0
    with pytest.raises(ConfigError, match="arrival times"):
        Load(trace=path, arrivals="replay").offered()
    with pytest.raises(ConfigError, match="--rate-scale"):
        Load(trace=path, rate_scale=2.0).offered()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_rate": 0.0}, "request_rate is 0"),
        ({"arrivals": "poisson", "burstiness": 2.0}, "--burstiness"),
        ({"arrivals": "constant", "request_rate": math.inf}, "finite --request-rate"),
        ({"rate_scale": 2.0, "request_rate": 1.0}, "--rate-scale"),
        ({"arrivals": "replay", "request_rate": 1.0, "rate_scale": 2.0}, "leave one out"),
        ({"arrivals": "steps"}, "--rate-steps"),
        ({"rate_steps": STEPS, "arrivals": "gamma"}, "--rate-steps"),
        ({"rate_steps": STEPS, "request_rate": 1.0}, "or --request-rate"),
    ],
)
def test_contradictory_arrivals_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Load(**options)


@pytest.mark.parametrize(
    ("options", "rate", "deviation"),
    [
        ({"arrivals": "poisson", "request_rate": 4.0}, 4.0, 1.0),
        ({"request_rate": 4.0, "burstiness": 0.25}, 4.0, 2.0),
        ({"arrivals": "constant", "request_rate": 4.0}, 4.0, 0.0),
        ({"rate_steps": STEPS}, 2.5, None),
    ],
)
def test_every_plan_offers_its_rate(options: dict[str, Any], rate: float, deviation: float | None) -> None:
    offsets = Load(num_prompts=40_000, **options).offered().arrivals
    assert offsets is not None
    gaps = np.diff(offsets, prepend=0.0)

    assert len(offsets) / offsets[-1] == pytest.approx(rate, rel=0.02)
    if deviation is not None:
        assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.03, abs=1e-6)


def test_no_rate_is_all_at_once() -> None:
    arrivals = Load(request_rate=math.inf, num_prompts=3).offered().arrivals
    assert arrivals is not None
    assert arrivals.tolist() == [0.0, 0.0, 0.0]
