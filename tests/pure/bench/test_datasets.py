from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from onbeat.bench.bench_load import BenchLoad, PromptTools, RunConfig
from onbeat.bench.session import RequestOffer
from onbeat.core.errors import ConfigError
from onbeat.workload.prompts import PromptWriter, estimated_pool


def count_words(text: str) -> int:
    return len(text.split())


def load(config: BenchLoad, num_prompts: int | None = 40, *, seed: int = 0, salt: str = "s") -> RequestOffer:
    tools = PromptTools(writer=PromptWriter(estimated_pool(), salt), count_tokens=count_words)
    asked = replace(config, num_prompts=num_prompts, seed=seed).named()
    return RequestOffer.make(RunConfig(load=asked), tools)


def test_random_has_the_asked_lengths() -> None:
    workload = load(BenchLoad(input_len=20, output_len=10, random_range_ratio=0.5), 400)

    assert (workload.load.num_prompt_tokens.min(), workload.load.num_prompt_tokens.max()) == (10, 30)
    assert (workload.load.num_output_tokens.min(), workload.load.num_output_tokens.max()) == (5, 15)
    assert all(count_words(workload.prompts(i)) == workload.load.num_prompt_tokens[i] for i in range(20))


def test_random_with_a_shared_prefix() -> None:
    workload = load(BenchLoad(input_len=6, output_len=1, random_prefix_len=9), 3)
    prompts = [workload.prompts(i).split() for i in range(3)]

    assert workload.load.num_prompt_tokens.tolist() == [15, 15, 15]
    assert prompts[0][:9] == prompts[1][:9] == prompts[2][:9]
    assert prompts[0][9:] != prompts[1][9:]


def test_the_seed_decides_lengths_and_the_salt_decides_words() -> None:
    config = BenchLoad(input_len=50, random_range_ratio=0.9)

    assert (
        load(config, salt="a").load.num_prompt_tokens.tolist()
        == load(config, salt="b").load.num_prompt_tokens.tolist()
    )
    assert load(config, salt="a").prompts(0) != load(config, salt="b").prompts(0)
    assert (
        load(config, seed=1).load.num_prompt_tokens.tolist()
        != load(config, seed=2).load.num_prompt_tokens.tolist()
    )


def test_conversations_have_the_asked_means_and_a_long_tail() -> None:
    workload = load(BenchLoad(dataset_name="conversation", input_len=306, output_len=500), 20_000)

    assert workload.load.num_prompt_tokens.mean() == pytest.approx(306, rel=0.05)
    assert workload.load.num_output_tokens.mean() == pytest.approx(500, rel=0.05)
    assert np.percentile(workload.load.num_prompt_tokens, 99) > 4 * np.median(workload.load.num_prompt_tokens)


def test_prefix_repetition_spreads_the_prefixes_evenly() -> None:
    config = BenchLoad(
        dataset_name="prefix_repetition",
        prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=6,
        prefix_repetition_suffix_len=3,
        output_len=2,
    )
    workload = load(config, 40)

    prefixes = [" ".join(workload.prompts(i).split()[:6]) for i in range(40)]
    assert sorted(map(prefixes.count, set(prefixes))) == [10, 10, 10, 10]
    with pytest.raises(ConfigError, match="4 prefixes"):
        load(config, 3)


def test_lengths_are_shuffled_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{i},{i}\n" for i in range(1, 61)))

    shuffled = load(BenchLoad(dataset_name="lengths", dataset_path=path), 10)
    in_order = load(BenchLoad(dataset_name="lengths", dataset_path=path, disable_shuffle=True), 10)

    assert in_order.load.num_prompt_tokens.tolist() == list(range(1, 11))
    assert shuffled.load.num_prompt_tokens.tolist() != in_order.load.num_prompt_tokens.tolist()
    assert (shuffled.load.num_prompt_tokens == shuffled.load.num_output_tokens).all()


def test_an_output_length_replaces_recorded_ones(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n4,9\n5,8\n")

    assert load(
        BenchLoad(dataset_name="lengths", dataset_path=path, output_len=3), None
    ).load.num_output_tokens.tolist() == [3, 3]


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    turns = [{"from": "human", "value": "a b c d e"}, {"from": "gpt", "value": "f g h i"}]
    path.write_bytes(orjson.dumps([{"conversations": turns}] * 3))

    workload = load(BenchLoad(dataset_name="sharegpt", dataset_path=path), None)

    assert (workload.load.num_prompt_tokens.tolist(), workload.load.num_output_tokens.tolist()) == (
        [5, 5, 5],
        [4, 4, 4],
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"text": "a"}', "line 2 lacks prompt"),
        ('{"prompt": ""}', r"line 2: .* ''"),
    ],
)
def test_bad_custom_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")

    with pytest.raises(ConfigError, match=message):
        load(BenchLoad(dataset_name="custom", dataset_path=path), None)


def test_more_custom_prompts_than_there_are(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "fine"}\n')

    with pytest.raises(ConfigError, match=r"1.*--num-prompts.*2"):
        load(BenchLoad(dataset_name="custom", dataset_path=path), 2)


def test_arrivals_depend_on_the_seed_and_not_on_the_words() -> None:
    def offsets(seed: int) -> list[float]:
        arrivals = load(BenchLoad(request_rate=5.0), seed=seed, salt=str(seed)).load.arrivals
        assert arrivals is not None
        return [float(offset) for offset in arrivals]

    assert offsets(3) == offsets(3) != offsets(4)


def test_a_closed_loop_has_no_schedule() -> None:
    assert load(BenchLoad(max_concurrency=2)).load.arrivals is None
    assert load(BenchLoad()).load.arrivals is None
    assert load(BenchLoad(request_rate=math.inf)).load.arrivals is None


def test_blocks_of_a_trace_repeat_as_text(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    rows = "0,600,1,1 2\n1,600,2,1 3\n2,600,0,4 5\n"
    path.write_text(f"timestamp_ms,input_length,output_length,hash_ids\n{rows}")

    workload = load(BenchLoad(trace=path), None)

    prompts = [workload.prompts(i).split() for i in range(3)]
    assert prompts[0][:512] == prompts[1][:512] != prompts[2][:512]
    assert prompts[0][512:] != prompts[1][512:]
    assert workload.load.num_output_tokens.tolist() == [1, 2, 1]
    with pytest.raises(ConfigError, match=r"3.*--num-prompts.*4"):
        load(BenchLoad(trace=path), 4)


def test_random_with_long_prompts_among_short_ones() -> None:
    config = BenchLoad(
        input_len=20, random_range_ratio=0.5, random_long_share=0.125, random_long_input_len=100
    )
    workload = load(config, 24)
    plain = load(BenchLoad(input_len=20, random_range_ratio=0.5), 24)

    lengths = workload.load.num_prompt_tokens.tolist()
    assert [i for i, length in enumerate(lengths) if length == 100] == [7, 15, 23]
    assert count_words(workload.prompts(7)) == 100
    # The other requests, and all output lengths, are those of the load without long prompts.
    assert workload.prompts(0) == plain.prompts(0)
    assert workload.load.num_output_tokens.tolist() == plain.load.num_output_tokens.tolist()


def test_output_lengths_can_have_a_spread_of_their_own() -> None:
    workload = load(
        BenchLoad(input_len=350, output_len=60, random_range_ratio=0.0, random_output_range_ratio=2 / 3), 400
    )

    assert set(workload.load.num_prompt_tokens) == {350}
    assert (workload.load.num_output_tokens.min(), workload.load.num_output_tokens.max()) == (20, 100)


def test_long_prompts_and_a_shared_prefix_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"--random-long-share.*--random-prefix-len"):
        BenchLoad(random_long_share=0.1, random_prefix_len=5)
