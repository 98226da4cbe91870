"""Which instruction set is taken, by times that a fake timer gives and by real ones; what is kept of them."""

from __future__ import annotations

import json
import os
from collections import Counter
from copy import copy
from pathlib import Path

import pytest

from onbeat.core.errors import EngineError
from onbeat.engine.dtypes import FLOAT32
from onbeat.engine.native import instruction_sets
from onbeat.engine.native.forward import NativeForward, NativeModel
from onbeat.engine.native.instruction_sets import (
    SetChoice,
    SetTimes,
    SetTimesFile,
    StepKind,
    choose_instruction_set,
    choose_set,
    settle_set,
    step_kinds,
    time_sets,
    time_with_care,
)
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.native.structures import NativeOptions
from tests.cpu.engine.forwards import pack
from tests.cpu.native.test_forward import checkpoint_of
from tests.told import numbers

KINDS = [StepKind(1, 1, 4), StepKind(8, 1, 4), StepKind(1, 512, 1)]
NAMES = ("new", "wide", "old")


class FakeTimer:
    """Takes what a table says, the first time of a kind twice as long; counts its steps."""

    def __init__(self, seconds: dict[str, tuple[float, ...]]) -> None:
        self.seconds = seconds
        self.counts: Counter[tuple[str, StepKind]] = Counter()

    def __call__(self, name: str, kind: StepKind) -> float:
        self.counts[name, kind] += 1
        return self.seconds[name][KINDS.index(kind)] * (2 if self.counts[name, kind] == 1 else 1)


def test_the_shortest_time_of_each_kind_counts() -> None:
    timer = FakeTimer({"new": (1.0, 2.0, 8.0), "wide": (0.9, 1.8, 8.5), "old": (0.5, 3.0, 9.0)})
    assert time_sets(NAMES, KINDS, timer) == {name: list(own) for name, own in timer.seconds.items()}
    assert set(timer.counts.values()) == {3}


@pytest.mark.parametrize(
    ("wide", "expected"),
    [
        ((0.5, 2.0, 8.0), "wide"),  # twice as quick in one of three
        ((1.0, 2.0, 4.0), "wide"),
        ((0.95, 1.9, 7.6), "new"),  # by chance
        ((0.5, 4.0, 16.0), "new"),  # quick with one request alone
    ],
)
def test_the_quickest_over_all_kinds_is_taken(wide: tuple[float, ...], expected: str) -> None:
    timer = FakeTimer({"new": (1.0, 2.0, 8.0), "wide": wide, "old": (2.0, 4.0, 16.0)})
    assert choose_set(time_with_care(NAMES, KINDS, timer)).instruction_set == expected


def test_a_set_that_cannot_win_is_timed_no_further() -> None:
    timer = FakeTimer({"new": (1.0, 2.0, 8.0), "wide": (3.1, 2.0, 8.0), "old": (50.0, 2.0, 8.0)})
    times = time_sets(NAMES, KINDS, timer)
    assert [len(times[name]) for name in NAMES] == [3, 1, 1]
    assert timer.counts["wide", KINDS[0]] == 3
    assert timer.counts["old", KINDS[0]] == 1, "as slow as this is no disturbance"
    assert choose_set(times).instruction_set == "new"
    assert numbers(choose_set(times).reason.replace("x", " ")) == [3.10, 100]
    everything = time_sets(NAMES, KINDS, timer, gives_up=False)
    assert [len(everything[name]) for name in NAMES] == [3, 3, 3]


def test_a_disturbed_first_set_is_timed_again() -> None:
    class Disturbed(FakeTimer):
        def __call__(self, name: str, kind: StepKind) -> float:
            return super().__call__(name, kind) * (9 if name == "new" and self.counts[name, kind] < 4 else 1)

    equal = (1.0, 2.0, 8.0)
    timer = Disturbed(dict.fromkeys(NAMES, equal))
    assert choose_set(time_sets(NAMES, KINDS, timer)).instruction_set != "new"
    timer.counts.clear()
    assert choose_set(time_with_care(NAMES, KINDS, timer)).instruction_set == "new"


# ---- What is kept ----

TIMES = {"new": [1.0, 2.0, 8.0], "wide": [0.5, 1.0, 4.0], "old": [3.0]}


def never() -> SetTimes:
    pytest.fail("the sets were timed again")


def test_times_are_kept_by_what_they_depend_on(tmp_path: Path) -> None:
    file = SetTimesFile(tmp_path / "sets", {"processor": "A", "threads": 2})
    first = settle_set(NAMES, file, lambda: TIMES)
    assert first.instruction_set == "wide"
    assert numbers(first.reason.replace("x", " ")) == [2, 6]
    again = settle_set(NAMES, SetTimesFile(tmp_path / "sets", {"processor": "A", "threads": 2}), never)
    assert again.instruction_set == "wide"
    assert again.reason.startswith(f"as timed before ({file.path}): new 2.00x")
    other = SetTimesFile(tmp_path / "sets", {"processor": "A", "threads": 3})
    assert settle_set(NAMES, other, lambda: {"new": [1.0], "wide": [1.0], "old": [1.0]})[0] == "new"
    assert settle_set(("wide", "old"), file, lambda: {"wide": [1.0], "old": [1.0]})[0] == "wide", "fewer sets"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"key": {"a": 1}}',
        '{"key": {"a": 1}, "seconds": {}}',
        '{"key": {"a": 2}, "seconds": 3}',
    ]
    + [
        json.dumps({"key": {"a": 1}, "seconds": dict.fromkeys(NAMES, own)})
        for own in ([], [-1.0], ["x"], None)
    ],
)
def test_what_cannot_be_used_is_measured_anew(tmp_path: Path, content: str) -> None:
    file = SetTimesFile(tmp_path, {"a": 1})
    file.path.write_text(content)
    assert settle_set(NAMES, file, lambda: TIMES).instruction_set == "wide"
    assert file.read() == TIMES


def test_who_is_second_takes_the_first_ones_times(tmp_path: Path) -> None:
    """Replicas that start at once run the same instructions, and so say the same."""
    file = SetTimesFile(tmp_path, {"a": 1})

    def measure() -> SetTimes:
        file.keep(TIMES)
        return {"new": [1.0], "wide": [2.0], "old": [2.0]}

    assert settle_set(NAMES, file, measure).instruction_set == "wide"
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


def test_a_failure_to_measure_takes_the_newest_and_is_said(tmp_path: Path) -> None:
    def fail() -> SetTimes:
        raise EngineError("no memory")

    chosen = settle_set(NAMES, SetTimesFile(tmp_path, {}), fail)
    assert chosen.instruction_set == "new"
    assert "(no memory)" in chosen.reason
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "sets").write_text("no directory")
    chosen = settle_set(NAMES, SetTimesFile(tmp_path / "sets", {}), lambda: TIMES)
    assert chosen.instruction_set == "wide"
    assert "be kept" in chosen.reason


# ---- Real steps ----


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
def test_real_sets_are_timed_and_kept(
    native_library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Some layers of gemma3 slide; the first of qwen3.5 keeps a state: fewer layers have fewer of them."""
    checkpoint = checkpoint_of(name)
    weights = pack(native_library, checkpoint)
    options = NativeOptions(dtype=FLOAT32, num_blocks=1, block_size=16, num_threads=2)
    model = NativeModel(native_library, checkpoint.config, weights, options)
    monkeypatch.setattr(instruction_sets, "_LEAST_BYTES", 0)
    monkeypatch.setattr(instruction_sets, "_DECODE_BYTES", 1)

    kinds = step_kinds(weights)
    assert kinds == [(1, 1, 1), (8, 1, 1), (32, 1, 1), (1, 512, 1)]

    chosen = choose_instruction_set(model, processor="this", directory=tmp_path)
    assert chosen.instruction_set in native_library.instruction_sets
    if len(native_library.instruction_sets) > 1:
        assert os.listdir(tmp_path), chosen.reason
        monkeypatch.setattr(NativeForward, "run", None)  # nothing runs any more
        again = choose_instruction_set(model, processor="this", directory=tmp_path)
        assert again.instruction_set == chosen.instruction_set


def test_a_set_that_the_processor_lacks_is_not_tried(
    native_library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = copy(native_library)
    library.instruction_sets = library.instruction_sets[-1:]
    monkeypatch.setattr(NativeForward, "run", None)
    checkpoint = checkpoint_of("llama3")
    weights = pack(native_library, checkpoint)
    options = NativeOptions(dtype=FLOAT32, num_blocks=1, block_size=16, num_threads=1)
    chosen = choose_instruction_set(
        NativeModel(library, checkpoint.config, weights, options), processor="this", directory=tmp_path
    )
    assert chosen == SetChoice("portable", "the only one here")
    assert os.listdir(tmp_path) == []
