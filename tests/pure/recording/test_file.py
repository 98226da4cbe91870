"""Record files: what is written is read, and what is wrong with a file is said."""

from __future__ import annotations

import gzip
import json
import logging
import os
import time
from pathlib import Path

import pytest

from onbeat.background_file import BackgroundFile
from onbeat.core.errors import ConfigError
from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.core.request import Request, SamplingParams
from onbeat.recording.log import AbortCall, AddCall, ScheduleCall, UpdateCall
from onbeat.recording.reader import Recording
from onbeat.recording.writer import LOGGED_BYTES, HashChain, RecordWriter
from onbeat.simulator.replay.decisions import Replay
from tests.pure.recording.recorded import RecordedRun, make_header, start_run
from tests.pure.scheduler.driver import make_config, make_request


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.gz"


def small_run(path: Path) -> RecordedRun:
    run = start_run(path, make_config())
    for index in range(6):
        run.add(make_request(f"r{index}", 20 + index, 30, arrival=run.now, salt="shared"))
        for _ in range(5):
            run.step()
    run.abort("r4")
    run.finish()
    return run


def rewrite(path: Path, change) -> None:
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(change(lines))))


def test_calls_read_back_as_they_were_made(path: Path) -> None:
    run = small_run(path)
    recording = Recording(path)
    calls = list(recording.calls())
    assert recording.is_complete
    assert recording.num_calls == len(calls)
    assert calls == list(recording.calls()), "it can be read again"
    adds = [call for call in calls if isinstance(call, AddCall)]
    assert [(call.request, call.request_id, call.num_prompt_tokens) for call in adds] == [
        (index, f"r{index}", 20 + index) for index in range(6)
    ]
    assert next(call for call in calls if isinstance(call, AbortCall)).requests == (4,)
    plans = [call for call in calls if isinstance(call, ScheduleCall) and call.step_id is not None]
    assert [[(f"r{row.request}", *row[1:]) for row in plan.rows] for plan in plans] == [
        [(row.request_id, row.num_computed_tokens, row.num_new_tokens, row.samples, 0) for row in step.rows]
        for step in run.steps
    ]
    updates = [call for call in calls if isinstance(call, UpdateCall)]
    assert len(updates) == len(run.steps) == recording.num_steps
    ended = {f"r{request}": reason for call in updates for request, reason in call.finished.items()}
    assert ended == {name: str(reason) for name, reason in run.finished.items() if name != "r4"}


def test_neither_tokens_nor_text_are_in_the_file(path: Path) -> None:
    run = start_run(path, make_config())
    run.add(make_request("r0", 3, 4, prompt=(123456, 234567, 345678)))
    run.finish()
    text = gzip.decompress(path.read_bytes()).decode()
    assert not any(token in text for token in ("123456", "234567", "345678"))


def test_hashes_are_the_scheduler_s_own(path: Path) -> None:
    run = small_run(path)
    recording = Recording(path)
    tokens = [*range(20), *range(20, 50)]
    expected = [each[:LOGGED_BYTES] for each in hash_blocks(root_hash("shared"), tokens, 16)]
    assert run.finished["r0"] == "length"
    assert recording.block_hashes(0) == tuple(expected)


@pytest.mark.parametrize("sizes", [(40,), (1,) * 40, (16, 16, 8), (3, 30, 7)])
def test_a_chain_does_not_depend_on_how_tokens_come(sizes) -> None:
    chain, tokens, hashes = HashChain(16, root_hash()), list(range(40)), []
    for size in sizes:
        hashes += chain.extend(tokens[:size])
        del tokens[:size]
    assert hashes == HashChain(16, root_hash()).extend(range(40))
    assert len(hashes) == 2
    assert hashes != HashChain(16, root_hash("salt")).extend(range(40))


def test_without_prefix_caching_no_hash_is_logged(path: Path) -> None:
    run = start_run(path, make_config(enable_prefix_caching=False))
    run.add(make_request("r0", 40, 30))
    run.finish()
    assert Recording(path).block_hashes(0) == ()


def test_the_writer_forgets_requests_that_are_gone(path: Path) -> None:
    run = start_run(path, make_config())
    for index in range(300):
        run.add(make_request(f"r{index}", 1 + index % 40, 1 + index % 7))
        if index % 10 == 0:
            run.abort(f"r{index}")
        while len(run.open) > 4:
            run.step()
    assert len(run.writer._open) <= 8
    run.finish()


def test_idle_calls_do_not_fill_the_disk(path: Path) -> None:
    run = start_run(path, make_config())
    for _ in range(1000):
        run.step()
    run.finish()
    assert Recording(path).num_calls == 1


def test_an_id_that_is_no_text_does_not_end_the_record(path: Path) -> None:
    run = start_run(path, make_config())
    run.add(make_request("half \ud800 é", 20, 5, salt=""))
    run.finish()
    assert Replay(Recording(path)).run().is_identical


def test_a_killed_server_leaves_what_was_flushed(path: Path) -> None:
    """The file is copied while the writer is still at it: that is what a kill leaves."""
    run = start_run(path, make_config())
    run.add(make_request("r0", 20, 100))
    for _ in range(30):
        run.step()
    deadline = time.monotonic() + 10
    while path.stat().st_size < 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    left = path.with_name("left.gz")
    left.write_bytes(path.read_bytes())
    run.finish()
    with pytest.raises(ConfigError, match="--allow-partial"):
        Recording(left)
    recording = Recording(left, allow_partial=True)
    assert not recording.is_complete
    assert recording.num_steps == 30
    assert Replay(recording).run().is_identical


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9, 0.97])
def test_any_cut_is_noticed_and_what_is_there_is_used(path: Path, share: float) -> None:
    small_run(path)
    whole = Recording(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ConfigError, match="cut short"):
        Recording(path)
    if share < 0.1:
        return  # not even the header is there
    recording = Recording(path, allow_partial=True)
    assert recording.num_calls <= whole.num_calls
    assert list(recording.calls()) == list(whole.calls())[: recording.num_calls]
    assert Replay(recording).run().is_identical


def test_a_missing_line_is_noticed(path: Path) -> None:
    small_run(path)
    rewrite(path, lambda lines: [*lines[:-2], lines[-1]])
    with pytest.raises(ConfigError, match=r"line \d+: .*trailer.* \d+ .* \d+"):
        Recording(path)


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[1, 2]\n",
        b'{"call": "dance", "now": 1}\n',
        b'{"call": "schedule"}\n',
        b'{"call": "schedule", "now": 1.0, "step_id": 0, "rows": [1, 2, 3]}\n',
        b'{"call": "update", "now": 1.0, "step_id": 0}\n',
        b'{"call": "add", "now": 1.0, "request": 0, "block_hashes": ["xyz"]}\n',
    ],
)
def test_a_bad_line_is_named(path: Path, line: bytes) -> None:
    small_run(path)
    rewrite(path, lambda lines: [*lines[:3], line, *lines[3:]])
    with pytest.raises(ConfigError, match=r"4\b.*`onbeat.*--record.*FILE`"):
        Recording(path)


def test_a_damaged_file_is_named(path: Path) -> None:
    small_run(path)
    data = bytearray(path.read_bytes())
    for index in range(len(data) // 2, len(data) // 2 + 20):
        data[index] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match=r"run.gz.*(damaged|not a line|cut short)"):
        Recording(path)


def packed(content: bytes) -> bytes:
    """Compress, without the time: it would be part of the tests' names."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"TIMESTAMP,ContextTokens\n", "not a gzip file"),
        (packed(b'{"file": "something else", "schema_version": 1}\n'), "line 1: file is"),
        (
            packed(b'{"file": "onbeat-record", "schema_version": 14, "onbeat_version": "7"}\n'),
            "version 14",
        ),
        (
            packed(
                b'{"file": "onbeat-record", "schema_version": 1, "onbeat_version": "1", "created": "", '
                b'"scheduler": {}, "engine": {}, "x": 1}\n'
            ),
            "field 'x'",
        ),
        (packed(b'{"file": "onbeat-record", "schema_version": 1}\n'), "line 1 lacks onbeat_version"),
        (packed(b""), "cut short before its first line"),
    ],
)
def test_what_is_no_record_is_refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Recording(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.gz: No such"):
        Recording(path)


def test_a_record_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/run\.gz: No such"):
        BackgroundFile(tmp_path / "nowhere" / "run.gz", "record", is_packed=True)


def test_a_full_disk_ends_the_record_only(caplog: pytest.LogCaptureFixture) -> None:
    sink = BackgroundFile(Path("/dev/full"), "record", is_packed=True)
    config = make_config()
    run = RecordedRun(config, RecordWriter(sink, make_header(config)))
    run.add(make_request("r0", 20, 100))
    with caplog.at_level(logging.WARNING, "onbeat.files"):
        run.finish()
    assert run.finished == {"r0": "length"}
    assert sink.is_broken
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "/dev/full" in messages[0]


def test_a_disk_that_falls_behind_ends_the_record_not_the_memory(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = BackgroundFile(path, "record", is_packed=True, max_pending_bytes=1000)
    with caplog.at_level(logging.WARNING, "onbeat.files"):
        for _ in range(100):
            sink.write(b"x" * 99 + b"\n")
    sink.close()
    assert sink.is_broken
    assert len(caplog.records) == 1


def test_a_bug_in_the_record_ends_the_record_only(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = start_run(path, make_config())
    run.writer.add(Request(request_id="r0", prompt_token_ids=("no number",), sampling=SamplingParams()), "x")  # type: ignore[arg-type]
    run.writer.add(
        Request(request_id="r1", prompt_token_ids=(1,) * 15 + (-1,), sampling=SamplingParams()), 1.0
    )
    run.add(make_request("r2", 20, 5))
    run.finish()
    assert run.finished == {"r2": "length"}
    with pytest.raises(ConfigError, match=r"line 2: .*'x'"):
        Recording(path)


def test_the_header_is_kept(path: Path) -> None:
    small_run(path)
    header = Recording(path).header
    assert header == make_header(make_config())
    first = json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])
    assert first["file"] == "onbeat-record"


def test_a_new_record_is_for_its_user_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        BackgroundFile(path, "record", is_packed=True).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
