"""From data sets and arrivals to loads; published data where it is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.workload.arrival_plan import ArrivalPlan
from onbeat.workload.arrivals import RateStep
from onbeat.workload.load_source import LoadName, LoadSource, make_load

LENGTHS = "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{100 + i},{200 + i}\n" for i in range(50))
MOONCAKE = "timestamp_ms,input_length,output_length,hash_ids\n0,700,50,4 9\n1000,512,0,4\n4000,600,3,4 5\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["random", "conversation", "zipf"])
def test_drawn_loads_depend_on_the_seed_alone(name: LoadName) -> None:
    def make(seed: int) -> tuple[object, ...]:
        load = make_load(
            LoadSource(name=name, input_len=300, output_len=40, range_ratio=0.5 if name == "random" else 0.0),
            ArrivalPlan(kind="poisson", rate=3.0),
            num_requests=200,
            seed=seed,
        )
        assert load.arrivals is not None
        return load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist(), load.arrivals.tolist()

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_lengths_do_not_change_with_the_arrivals() -> None:
    source = LoadSource(name="conversation", input_len=300)
    closed = make_load(source, None, num_requests=50, seed=4)
    poisson = make_load(source, ArrivalPlan(kind="poisson", rate=1.0), num_requests=50, seed=4)

    assert closed.arrivals is None
    assert closed.num_prompt_tokens.tolist() == poisson.num_prompt_tokens.tolist()


def test_lengths_of_a_file_come_in_pairs_and_may_be_drawn_again(tmp_path: Path) -> None:
    source = LoadSource(name="lengths", path=write(tmp_path / "l.csv", LENGTHS))
    plan = ArrivalPlan(rate=1.0)
    once = make_load(source, plan, num_requests=None, seed=0)
    many = make_load(source, plan, num_requests=1000, seed=0)

    assert sorted(once.num_prompt_tokens.tolist()) == list(range(100, 150))
    for load in (once, many):
        assert (load.num_output_tokens - load.num_prompt_tokens == 100).all()
        assert load.lines is not None
        assert (load.lines == load.num_prompt_tokens - 98).all()
    assert set(many.num_prompt_tokens.tolist()) == set(range(100, 150))


def test_a_replay_keeps_times_blocks_and_order(tmp_path: Path) -> None:
    source = LoadSource(name="mooncake", path=write(tmp_path / "m.csv", MOONCAKE))
    load = make_load(source, ArrivalPlan(kind="replay", rate_scale=2.0), num_requests=None, seed=0)

    assert load.arrivals is not None
    assert load.arrivals.tolist() == [0.0, 0.5, 2.0]
    assert load.block_ids == ((4, 9), (4,), (4, 5))
    assert load.num_output_tokens.tolist() == [50, 1, 3]  # no engine takes a request for nothing
    stretched = make_load(source, ArrivalPlan(kind="replay", rate=0.5), num_requests=None, seed=0)
    assert stretched.rate == pytest.approx(0.5)


def test_a_sharegpt_file_is_measured_with_the_tokenizer(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a b c d e"}, {"from": "gpt", "value": "f g h i"}]
    path = write(tmp_path / "s.json", json.dumps([{"conversations": turns}] * 3))
    source = LoadSource(name="sharegpt", path=path, count_tokens=lambda text: len(text.split()))

    load = make_load(source, None, num_requests=2, seed=0)

    assert (load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist()) == ([5, 5], [4, 4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "azure"}, "--dataset-name azure needs a file"),
        ({"path": Path("x")}, "--dataset-name random reads no file"),
        ({"name": "sharegpt", "path": Path("x")}, "give --tokenizer"),
        ({"name": "azure", "path": Path("x"), "columns": ("a", "b")}, "--length-columns"),
    ],
)
def test_contradictory_sources_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadSource(**options)  # type: ignore[arg-type]


STEPS = (RateStep(1.0, 10.0), RateStep(4.0, 10.0))


@pytest.mark.parametrize(
    ("plan", "num_requests", "message"),
    [
        (ArrivalPlan(kind="replay"), 4, "has 3 requests, and --num-prompts is 4"),
        (ArrivalPlan(rate=2.0), 4, "shared blocks"),
    ],
)
def test_a_short_file_is_refused(tmp_path: Path, plan: ArrivalPlan, num_requests: int, message: str) -> None:
    source = LoadSource(name="mooncake", path=write(tmp_path / "m.csv", MOONCAKE))

    with pytest.raises(ConfigError, match=message):
        make_load(source, plan, num_requests=num_requests, seed=0)


def test_lengths_have_no_times_to_replay(tmp_path: Path) -> None:
    source = LoadSource(name="lengths", path=write(tmp_path / "l.csv", LENGTHS))

    with pytest.raises(ConfigError, match="no arrival times"):
        make_load(source, ArrivalPlan(kind="replay"), num_requests=None, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "--request-rate"),
        ({"kind": "poisson", "burstiness": 2.0, "rate": 1.0}, "--burstiness shapes"),
        ({"kind": "burst"}, "finite --request-rate"),
        ({"kind": "constant"}, "finite --request-rate"),
        ({"rate_scale": 2.0, "rate": 1.0}, "replayed"),
        ({"kind": "replay", "rate": 1.0, "rate_scale": 2.0}, "leave one out"),
        ({"kind": "steps"}, "go together"),
        ({"steps": STEPS, "rate": 1.0}, "go together"),
        ({"kind": "steps", "steps": STEPS, "rate": 1.0}, "leave out --request-rate"),
    ],
)
def test_contradictory_arrivals_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ArrivalPlan(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "rate", "deviation"),
    [
        (ArrivalPlan(kind="poisson", rate=4.0), 4.0, 1.0),
        (ArrivalPlan(kind="gamma", rate=4.0, burstiness=0.25), 4.0, 2.0),
        (ArrivalPlan(kind="constant", rate=4.0), 4.0, 0.0),
        (ArrivalPlan(kind="steps", steps=STEPS), 2.5, None),
        (ArrivalPlan(kind="burst", rate=4.0), 4.0, None),
    ],
)
def test_every_plan_offers_its_rate(plan: ArrivalPlan, rate: float, deviation: float | None) -> None:
    offsets = plan.offsets(40_000, rng=np.random.default_rng(0))
    gaps = np.diff(offsets, prepend=0.0)

    assert len(offsets) / offsets[-1] == pytest.approx(rate, rel=0.02)
    if deviation is not None:
        assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.03, abs=1e-6)


def test_no_rate_is_all_at_once() -> None:
    assert ArrivalPlan().offsets(3, rng=np.random.default_rng(0)).tolist() == [0.0, 0.0, 0.0]


# Published statistics of the traces, to 0.5 %.
