"""Recorded steps of other engines: what is read, what is refused and in which words, and what steps took."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.step_log import LoggedStep, read_step_log, rows_shape, step_times
from tests.pure.perfmodel.recorded import fpm, fpm_line, write_lines
from tests.pure.perfmodel.shapes import batch, decodes


def test_a_message_becomes_the_batch_that_it_tells_of(tmp_path: Path) -> None:
    message = fpm(prompts=1, tokens=64, cached=32, decodes=2, context=200)
    stream = read_step_log(write_lines(tmp_path, {"fpm": message}))
    assert stream.steps == [LoggedStep(batch([(32, 64), (100, 1), (100, 1)]), 0.01)]


def test_whole_prompts_of_different_lengths_have_their_pairs() -> None:
    # 30 and 10 tokens: mean 20, variance 100
    two = rows_shape(
        num_prompts=2,
        prompt_tokens=40,
        prompt_cached_tokens=0,
        num_decodes=0,
        decode_cached_tokens=0,
        prompt_variance=100.0,
    )
    assert two == batch([(0, 30), (0, 10)])


def test_heartbeats_and_idle_gaps_are_no_steps(tmp_path: Path) -> None:
    lines = [
        fpm_line(0, 1.0, decodes=1, context=10),
        fpm_line(1, 1.5, decodes=1, context=11),
        fpm_line(2, 2.5, wall=0.0),
        fpm_line(3, 9.0, prompts=1, tokens=5),
        fpm_line(4, 20.0, prompts=1, tokens=5),  # nothing ran or waited in between
        fpm_line(7, 21.0, decodes=1, context=6),
    ]
    stream = read_step_log(write_lines(tmp_path, *lines))
    assert [step.distance for step in stream.steps] == [None, 0.5, None, None, None]
    assert (stream.num_heartbeats, stream.num_lost) == (1, 2)


def test_each_worker_has_steps_of_its_own(tmp_path: Path) -> None:
    lines = [
        fpm_line(number // 2, float(number), worker=str(number % 2), decodes=1, context=9)
        for number in range(4)
    ]
    stream = read_step_log(write_lines(tmp_path, *lines))
    assert [step.distance for step in stream.steps] == [None, None, 2.0, 2.0]


def test_a_trace_of_dynamo_is_read(tmp_path: Path) -> None:
    about = {"schema": "dynamo.fpm.trace.v1", "capture_mode": "sampled", "observed_at_unix_ms": 5}
    events = [about | {"fpm": fpm(counter=number, decodes=1, context=9)} for number in (4, 400)]
    lines = [{"timestamp": 1250, "event": event} for event in events]
    stream = read_step_log(write_lines(tmp_path, *lines))
    assert stream.steps == [LoggedStep(decodes(1, 10), 0.01)] * 2
    assert stream.num_lost == 0


LINE = fpm_line(0, 1.0, decodes=1, context=9)


def test_a_line_cut_short_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path, LINE)
    path.write_text(path.read_text() + '{"received": 2.')
    assert len(read_step_log(path).steps) == 1


def test_a_recording_with_a_header_is_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"file": "onbeat-steps", "schema_version": 1}, LINE)
    assert len(read_step_log(path).steps) == 1


def change(place: str, name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda message: (message[place] if place else message).__setitem__(name, value)


def move(message: dict[str, Any]) -> None:
    message["sum_prefill_tokens"] = message["scheduled_requests"].pop("sum_prefill_tokens")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (change("", "version", 2), "fpm.version is 2;"),
        (lambda message: message.pop("version"), "fpm lacks version"),
        (lambda message: message.pop("wall_time"), "fpm lacks wall_time"),
        (move, "fpm.scheduled_requests lacks sum_prefill_tokens"),
        (change("", "queued_requests", [0, 0]), "fpm.queued_requests is [0, 0];"),
        (change("", "wall_time", -1.0), "fpm.wall_time is -1.0;"),
        (
            change("scheduled_requests", "num_decode_requests", 1.5),
            "scheduled_requests.num_decode_requests is 1.5",
        ),
        (change("scheduled_requests", "num_decode_requests", 300), "num_decode_requests 300"),
        (change("scheduled_requests", "sum_prefill_tokens", 0), "num_prefill_requests 1"),
        (change("scheduled_requests", "num_decode_requests", 0), "but num_decode_requests is 0"),
        (change("", "wall_time", 0), "wall_time is 0, but 66"),
    ],
)
def test_a_message_that_is_not_as_it_must_be_is_named(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    message = fpm(prompts=1, tokens=64, decodes=2, context=200)
    edit(message)
    path = write_lines(tmp_path, {"fpm": message})
    with pytest.raises(ConfigError) as error:
        read_step_log(path)
    assert f"{path}, line 1: " in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no steps; send the engine requests"),
        ([{"file": "onbeat-record"}], "lacks fpm"),
        ([fpm_line(0, 1.0, wall=0.0)], "only 1 signs of life of an idle engine"),
        ([LINE | {"received": -1}], "received is -1;"),
        (
            [fpm_line(1, 1.0, decodes=1, context=9), fpm_line(1, 2.0, decodes=1, context=9)],
            "counter_id 1 of worker 'w/0' comes after 1",
        ),
        (
            [fpm_line(1, 2.0, decodes=1, context=9), fpm_line(2, 1.0, decodes=1, context=9)],
            "time 1 s is before that of the message before it, 2",
        ),
    ],
)
def test_a_file_that_is_not_as_it_must_be_is_named(
    tmp_path: Path, lines: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_step_log(write_lines(tmp_path, *lines))
    assert words in str(error.value)


def test_broken_json_is_named(tmp_path: Path) -> None:
    line = json.dumps(LINE)
    path = tmp_path / "steps.jsonl"
    path.write_text(f"{line}\n{{oh\n{line}\n")
    with pytest.raises(ConfigError, match=r"line 2 .*JSON"):
        read_step_log(path)


def steps(times: Sequence[tuple[float, float | None]]) -> list[LoggedStep]:
    return [LoggedStep(decodes(1, 10), wall, distance) for wall, distance in times]


def test_distances_count_where_steps_are_scheduled_ahead() -> None:
    """The engine measures the wait for a result, or two steps at once: a client sees neither."""
    for wall in (0.007, 0.019):
        found = step_times(steps([*[(wall, 0.010)] * 20, (0.0, 0.010), (0.0, None)]))
        assert [step.seconds for step in found.steps] == [0.010] * 21
        assert found.basis.startswith("the distances")


def test_a_wait_that_is_no_part_of_the_step_tells_nothing_after_idleness() -> None:
    found = step_times(steps([(0.001, None), *[(0.001, 0.010)] * 20]))
    assert [step.seconds for step in found.steps] == [0.010] * 20


def test_after_idleness_the_engine_is_believed_and_its_host_added() -> None:
    found = step_times(steps([(0.010, None), *[(0.010, 0.012)] * 20]))
    assert found.steps[0].seconds == pytest.approx(0.012)


def test_the_engines_own_times_count_where_they_say_the_same() -> None:
    found = step_times(steps([(0.010, 0.0102), (0.010, 0.0099)] * 10))
    assert {step.seconds for step in found.steps} == {0.010}
    assert "own times" in found.basis


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)


@given(place=st.integers(0, 60), junk=JUNK, is_gone=st.booleans())
def test_whatever_stands_in_a_file_is_read_or_refused_in_words(
    place: int, junk: object, is_gone: bool
) -> None:
    full = fpm_line(1, 2.0, prompts=1, tokens=9, decodes=1, context=9)
    lines: list[dict[str, Any]] = json.loads(json.dumps([LINE, full]))
    places = [(part, name) for line in lines for part in parts_of(line) for name in part]
    part, name = places[place % len(places)]
    if is_gone:
        del part[name]
    else:
        part[name] = junk
    with TemporaryDirectory() as folder, suppress(ConfigError):
        assert read_step_log(write_lines(Path(folder), *lines)).steps


def parts_of(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield values
    for value in values.values():
        if isinstance(value, dict):
            yield from parts_of(value)
