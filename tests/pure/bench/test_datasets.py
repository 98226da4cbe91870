from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from onbeat.bench.bench_config import DatasetConfig, LoadConfig
from onbeat.bench.datasets import PromptTools, load_workload
from onbeat.bench.schedule import schedule
from onbeat.core.errors import ConfigError
from onbeat.workload.prompts import PromptWriter, estimated_pool
from onbeat.workload.workload import Workload


def count_words(text: str) -> int:
    return len(text.split())


def load(config: DatasetConfig, num_prompts: int | None = 40, *, seed: int = 0, salt: str = "s") -> Workload:
    tools = PromptTools(writer=PromptWriter(estimated_pool(), salt), count_tokens=count_words)
    return load_workload(config, num_prompts, tools, seed)


def test_random_has_the_asked_lengths() -> None:
    workload = load(DatasetConfig(input_len=20, output_len=10, range_ratio=0.5), 400)

    assert (workload.num_prompt_tokens.min(), workload.num_prompt_tokens.max()) == (10, 30)
    assert (workload.max_tokens.min(), workload.max_tokens.max()) == (5, 15)
    assert all(count_words(workload.request(i).prompt) == workload.num_prompt_tokens[i] for i in range(20))


def test_random_with_a_shared_prefix() -> None:
    workload = load(DatasetConfig(input_len=6, output_len=1, prefix_len=9), 3)
    prompts = [workload.request(i).prompt.split() for i in range(3)]

    assert workload.num_prompt_tokens.tolist() == [15, 15, 15]
    assert prompts[0][:9] == prompts[1][:9] == prompts[2][:9]
    assert prompts[0][9:] != prompts[1][9:]


def test_the_seed_decides_lengths_and_the_salt_decides_words() -> None:
    config = DatasetConfig(input_len=50, range_ratio=0.9)

    assert (
        load(config, salt="a").num_prompt_tokens.tolist() == load(config, salt="b").num_prompt_tokens.tolist()
    )
    assert load(config, salt="a").request(0).prompt != load(config, salt="b").request(0).prompt
    assert load(config, seed=1).num_prompt_tokens.tolist() != load(config, seed=2).num_prompt_tokens.tolist()


def test_conversations_have_the_asked_means_and_a_long_tail() -> None:
    workload = load(DatasetConfig(name="conversation", input_len=306, output_len=500), 20_000)

    assert workload.num_prompt_tokens.mean() == pytest.approx(306, rel=0.05)
    assert workload.max_tokens.mean() == pytest.approx(500, rel=0.05)
    assert np.percentile(workload.num_prompt_tokens, 99) > 4 * np.median(workload.num_prompt_tokens)


def test_prefix_repetition_spreads_the_prefixes_evenly() -> None:
    config = DatasetConfig(
        name="prefix_repetition", num_prefixes=4, repeated_prefix_len=6, suffix_len=3, repetition_output_len=2
    )
    workload = load(config, 40)

    prefixes = [" ".join(workload.request(i).prompt.split()[:6]) for i in range(40)]
    assert sorted(map(prefixes.count, set(prefixes))) == [10, 10, 10, 10]
    with pytest.raises(ConfigError, match="4 prefixes"):
        load(config, 3)


def test_lengths_are_shuffled_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i},{i}\n" for i in range(1, 61)))

    shuffled = load(DatasetConfig(name="lengths", path=path), 10)
    in_order = load(DatasetConfig(name="lengths", path=path, shuffle=False), 10)

    assert in_order.num_prompt_tokens.tolist() == list(range(1, 11))
    assert shuffled.num_prompt_tokens.tolist() != in_order.num_prompt_tokens.tolist()
    assert (shuffled.num_prompt_tokens == shuffled.max_tokens).all()


def test_an_output_length_replaces_recorded_ones(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n4,9\n5,8\n")

    assert load(DatasetConfig(name="lengths", path=path, output_len=3), None).max_tokens.tolist() == [3, 3]


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    turns = [{"from": "human", "value": "a b c d e"}, {"from": "gpt", "value": "f g h i"}]
    path.write_bytes(orjson.dumps([{"conversations": turns}] * 3))

    workload = load(DatasetConfig(name="sharegpt", path=path), None)

    assert (workload.num_prompt_tokens.tolist(), workload.max_tokens.tolist()) == ([5, 5, 5], [4, 4, 4])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected"),
        ('{"text": "a"}', "line 2: expected"),
        ('{"prompt": ""}', "line 2: an empty prompt"),
    ],
)
def test_bad_custom_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")

    with pytest.raises(ConfigError, match=message):
        load(DatasetConfig(name="custom", path=path), None)


def test_more_custom_prompts_than_there_are(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "fine"}\n')

    with pytest.raises(ConfigError, match="has 1 prompt, and --num-prompts is 2"):
        load(DatasetConfig(name="custom", path=path), 2)


def test_arrivals_depend_on_the_seed_and_not_on_the_words() -> None:
    def offsets(seed: int) -> list[float]:
        arrivals = schedule(
            LoadConfig(request_rate=5.0), len(load(DatasetConfig())), np.random.default_rng([seed, 1])
        )
        assert arrivals is not None
        return [float(offset) for offset in arrivals]

    assert offsets(3) == offsets(3) != offsets(4)


def test_a_closed_loop_has_no_schedule() -> None:
    assert schedule(LoadConfig(max_concurrency=2), 20, np.random.default_rng(0)) is None


def test_random_with_long_prompts_among_short_ones() -> None:
    config = DatasetConfig(input_len=20, range_ratio=0.5, long_share=0.125, long_input_len=100)
    workload = load(config, 24)
    plain = load(DatasetConfig(input_len=20, range_ratio=0.5), 24)

    assert workload.groups is not None
    assert [i for i, group in enumerate(workload.groups) if group == "long"] == [7, 15, 23]
    assert count_words(workload.request(7).prompt) == 100 == workload.num_prompt_tokens[7]
    assert workload.request(7).group == "long"
    # The other requests, and all output lengths, are those of the load without long prompts.
    assert workload.request(0).prompt == plain.request(0).prompt
    assert workload.max_tokens.tolist() == plain.max_tokens.tolist()


def test_output_lengths_can_have_a_spread_of_their_own() -> None:
    workload = load(
        DatasetConfig(input_len=350, output_len=60, range_ratio=0.0, output_range_ratio=2 / 3), 400
    )

    assert set(workload.num_prompt_tokens) == {350}
    assert (workload.max_tokens.min(), workload.max_tokens.max()) == (20, 100)


def test_long_prompts_and_a_shared_prefix_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="do not go together"):
        DatasetConfig(long_share=0.1, prefix_len=5)
