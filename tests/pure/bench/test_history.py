"""What a history of answers proves to be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.bench.history import End, KnownAnswer, ObservedAnswer, counts, save, violations

TOKENS = tuple("abcdefghijkl")
KNOWN = KnownAnswer("a prompt", "".join(TOKENS), len(TOKENS), "length")


def exchange(pieces: list[str] | tuple[str, ...] = TOKENS, **changes: Any) -> ObservedAnswer:
    made = ObservedAnswer(
        number=7, known=0, streamed=True, begun=0.0, end=End.WHOLE, pieces=list(pieces),
        finish_reasons=["length"], usages=[len(TOKENS)], num_done=1,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def wrong(one: ObservedAnswer) -> str:
    return "; ".join(each.what for each in violations([one], [KNOWN]))


def test_a_sound_answer_is_not_complained_of() -> None:
    assert not wrong(exchange())
    assert not wrong(exchange(["abc", "defghijkl"]))  # deliveries may be of any size
    assert not wrong(exchange(streamed=False, num_done=0))


@pytest.mark.parametrize("end", [End.CANCELLED, End.CUT, End.FAILED])
def test_an_answer_that_ends_early_and_says_so_is_sound(end: End) -> None:
    assert not wrong(exchange(TOKENS[:5], end=end, finish_reasons=[], usages=[], num_done=0))
    assert " character 1" in wrong(exchange(["a", "x"], end=end, finish_reasons=[], usages=[]))


@given(st.integers(0, len(TOKENS) - 1))
def test_each_token_lost_or_doubled_is_found(place: int) -> None:
    assert wrong(exchange([*TOKENS[:place], *TOKENS[place + 1 :]]))
    assert wrong(exchange([*TOKENS[: place + 1], *TOKENS[place:]]))


@given(st.integers(0, len(TOKENS) - 2))
def test_each_change_of_order_is_found(place: int) -> None:
    swapped = [*TOKENS[:place], TOKENS[place + 1], TOKENS[place], *TOKENS[place + 2 :]]
    assert "the text is another" in wrong(exchange(swapped))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pieces": list(TOKENS[:-2])}, "last 2 of 12"),
        ({"finish_reasons": ["length", "length"]}, "one 'length'"),
        ({"finish_reasons": ["stop"]}, "finish reasons ['stop']"),
        ({"usages": [11]}, "told [11] output tokens, not once 12"),
        ({"usages": [12, 12]}, "usage told [12, 12]"),
        ({"usages": []}, "usage told []"),
        ({"num_done": 2}, "[DONE] came 2 times"),
        ({"late_events": 3}, "3 events came behind the end"),
        ({"pieces": [*"abcd", *"bcdefghijkl"]}, "from character 4 on"),
    ],
)
def test_faults_are_told_in_words(changes: dict[str, Any], said: str) -> None:
    assert said in wrong(exchange(**changes))


def test_a_history_is_written_with_what_it_is_checked_by(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    save(path, [exchange(), exchange(end=End.CUT)], [KNOWN])
    first, second, _ = map(json.loads, path.read_text().splitlines())
    assert first["known"]["num_tokens"] == 12
    assert second["exchange"]["end"] == "whole"
    assert counts([exchange(), exchange(end=End.CUT)]) == {"whole": 1, "cut": 1}
