"""Edited records get a sentence, or a replay that says what differs; never a traceback."""

from __future__ import annotations

import gzip
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.cli.main import main
from onbeat.core.errors import ConfigError
from onbeat.recording.fleet_log import FleetRecording
from onbeat.recording.reader import Recording
from onbeat.simulator.replay.decisions import replay_fleet
from tests.examples import examples
from tests.pure.recording.recorded import start_run
from tests.pure.recording.test_fleet import recorded as recorded_fleet
from tests.pure.scheduler.driver import make_config, make_request
from tests.pure.simulator.test_replay_model import describe

OTHERS: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    10**30,
    1e308,
    "",
    "x",
    "inf",
    [],
    [1],
    ["x"],
    {},
    {"x": 1},
    {"0": 1},
]


@cache
def recorded() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.gz"
        run = start_run(path, make_config())
        for index in range(6):
            run.add(make_request(f"r{index}", 20 + index, 30, arrival=run.now))
            for _ in range(4):
                run.step()
        run.abort("r5")
        run.finish()
        return path.read_bytes()


def replay_decisions(path: Path) -> None:
    replay_fleet(FleetRecording(path, allow_partial=True))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place within a value: what holds it, and under which key."""
    found: list[tuple[Any, Any]] = []
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(keys):
        found += [(value, key), *places(each)]
    return found


@cache
def by_kind(content: bytes) -> list[list[int]]:
    """Return the numbers of the lines of each kind."""
    kinds: dict[str, list[int]] = {}
    for number, line in enumerate(gzip.decompress(content).splitlines()):
        values = json.loads(line)
        kinds.setdefault(values.get("event", values).get("kind", values.get("call")), []).append(number)
    return list(kinds.values())


def edit(content: bytes, seed: int) -> bytes:
    """Change one value, leave one out, or move a line; all kinds of lines are as likely."""
    rng = Random(seed)
    lines = gzip.decompress(content).splitlines()
    where = rng.choice(rng.choice(by_kind(content)))
    match rng.randrange(8):
        case 0:
            del lines[where]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[where])
        case 2:
            lines[where] = json.dumps(rng.choice(OTHERS)).encode()
        case kind:
            line = json.loads(lines[where])
            holder, key = rng.choice(places(line))
            if kind == 3:
                del holder[key]
            else:
                holder[key] = rng.choice(OTHERS)
            lines[where] = json.dumps(line).encode()
    return gzip.compress(b"\n".join([*lines, b""]), compresslevel=1)


@pytest.mark.parametrize("kind", ["fleet", "replica"])
@examples(150)
@given(seed=st.integers(0, 10**9))
def test_an_edited_record_is_refused_in_words_or_replayed(kind: str, seed: int) -> None:
    content = recorded_fleet("slo", 40) if kind == "fleet" else recorded()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "edited.gz"
        path.write_bytes(edit(content, seed))
        told = StringIO()
        with redirect_stderr(told), redirect_stdout(StringIO()):
            main(["replay", str(path), "--allow-partial"])
        assert len(told.getvalue()) < 2000


def test_a_request_that_arrives_twice_is_named(tmp_path: Path) -> None:
    lines = gzip.decompress(recorded_fleet("slo", 40)).splitlines()
    where = next(number for number, line in enumerate(lines) if b'"Arrived"' in line)
    path = tmp_path / "fleet.gz"
    path.write_bytes(gzip.compress(b"\n".join([*lines[: where + 1], *lines[where:], b""])))
    with pytest.raises(ConfigError, match=rf"line {where + 2}: .*twice"):
        replay_decisions(path)


@pytest.mark.parametrize("place", [("scheduler", "block_size"), ("step_time", "fitted")])
def test_what_a_header_leaves_out_has_its_default(tmp_path: Path, place: tuple[str, str]) -> None:
    header, *calls = gzip.decompress(recorded()).splitlines()
    fields = json.loads(header) | {"step_time": describe("bare").as_json()}
    del fields[place[0]][place[1]]
    path = tmp_path / "run.gz"
    path.write_bytes(gzip.compress(b"\n".join([orjson.dumps(fields), *calls, b""])))
    assert main(["replay", str(path)]) == 0


@pytest.mark.parametrize("whole", [["a", "b", 1], ["a", 2, -1], {"a": 1}, 5])
def test_a_whole_request_of_another_form_is_named(tmp_path: Path, whole: object) -> None:
    lines = [json.loads(line) for line in gzip.decompress(recorded()).splitlines()]
    next(line for line in lines if line.get("call") == "add")["whole"] = whole
    path = tmp_path / "run.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    with pytest.raises(ConfigError, match=r"line \d+: whole.* is "):
        Recording(path)
