from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from onbeat.core.errors import ConfigError
from onbeat.workload.load import Exchange, read_sharegpt, sharegpt_load


def words(count: int, word: str = "w") -> str:
    return " ".join([word] * count)


def count_words(text: str) -> int:
    return len(text.split())


def conversation(*turns: str) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


def test_the_first_exchange_of_each_conversation_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(
        orjson.dumps([conversation("q", "a", "more"), conversation("alone"), conversation("r", "b")])
    )

    assert read_sharegpt(path) == [Exchange("q", "a"), Exchange("r", "b")]


def test_conversations_may_stand_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, (conversation("q", "a"), conversation("r", "b")))))

    assert read_sharegpt(path) == [Exchange("q", "a"), Exchange("r", "b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{oops", "is not JSON"),
        (b'{"a": 1}', "line 1: it has no conversations"),
        (b'[{"text": "x"}]', r"\[0\] .* it has no conversations"),
        (
            b'[{"conversations": [{"value": 1}, {"value": 2}]}]',
            r"\[0\]\.conversations\[0\]\.value is 1;",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        read_sharegpt(path)


def test_very_short_and_long_exchanges_are_passed_over() -> None:
    exchanges = [
        Exchange(words(3), words(50)),
        Exchange(words(50), words(3)),
        Exchange(words(1025), words(50)),
        Exchange(words(1000), words(1049)),
        Exchange(words(1024), words(1024)),
        Exchange(words(4), words(4)),
    ]

    load = sharegpt_load(exchanges, num_requests=2, output_len=None, count_tokens=count_words, order=None)

    assert load.num_prompt_tokens.tolist() == [1024, 4]
    assert load.num_output_tokens.tolist() == [1024, 4]


def test_a_fixed_output_length_replaces_the_recorded_ones() -> None:
    exchanges = [Exchange(words(50), words(1))]

    load = sharegpt_load(exchanges, num_requests=1, output_len=7, count_tokens=count_words, order=None)

    assert load.num_output_tokens.tolist() == [7]
    assert load.texts == (words(50),)


def test_shuffling_draws_from_the_whole_file() -> None:
    exchanges = [Exchange(words(10, f"w{i}"), words(10)) for i in range(50)]

    def first_words(seed: int) -> list[str]:
        order = np.random.default_rng(seed)
        load = sharegpt_load(
            exchanges, num_requests=5, output_len=None, count_tokens=count_words, order=order
        )
        return [text.split()[0] for text in load.texts or ()]

    assert first_words(1) == first_words(1)
    assert first_words(1) != first_words(2)


def test_too_few_usable_conversations_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"1 usable.*--num-prompts"):
        sharegpt_load(
            [Exchange(words(9), words(9)), Exchange("a", "b")],
            num_requests=5,
            output_len=None,
            count_tokens=count_words,
            order=None,
        )
