"""Output that nobody takes: dropped and counted, and never waited for."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.output import DroppingStream, num_dropped_lines, unblocked_output

PIPE_BYTES = 4096


class Pipe:
    """A pipe of one page, and a stream that writes to it."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.reader = os.fdopen(reader, "rb", buffering=0)
        self.writer = os.fdopen(writer, "w")

    def read(self, num_bytes: int = 2**20) -> str:
        return self.reader.read(num_bytes).decode()

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def lines(first: int, last: int) -> str:
    return "".join(f"{number:09}\n" for number in range(first, last))


def finish(stream: DroppingStream, pipe: Pipe) -> str:
    """Read all that is left, and let the stream end meanwhile."""
    found: list[str] = []

    def read() -> None:
        while text := pipe.read(1000):
            found.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    assert stream.finish()
    pipe.writer.close()
    reader.join()
    return "".join(found)


def test_all_lines_come_in_order(pipe: Pipe) -> None:
    stream = DroppingStream(pipe.writer)
    print(1, 2, file=stream)
    stream.write("unfinished")
    stream.flush()
    stream.write(" line\n\ud800")
    assert finish(stream, pipe) == "1 2\nunfinished line\n\\ud800"
    assert stream.num_dropped == 0


def test_what_finds_no_room_is_dropped_and_said_in_its_place(pipe: Pipe) -> None:
    stream = DroppingStream(pipe.writer, max_pending=10_000)
    stream.write(lines(0, 1000))
    assert pipe.read(1) == "0", "the thread has begun to write what the pipe does not hold"
    for number in range(1000, 2600):
        stream.write(lines(number, number + 1))
    assert stream.num_dropped == 600
    text = finish(stream, pipe)
    assert text.startswith(lines(0, 2000)[1:] + "onbeat: 600 lines ")
    assert text.count("\n") == 2001


def test_a_stuck_pipe_does_not_hold_the_end_up(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.output.FINISH_SECONDS", 0.1)
    stream = DroppingStream(pipe.writer)
    stream.write(lines(0, 1000))
    assert not stream.finish()
    stream.write("after the end\n")
    assert stream.num_dropped == 1
    finish(stream, pipe)


def test_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        stream = DroppingStream(full)
        stream.write("1\n2\n")
        while stream.num_dropped < 2:
            stream.flush()
        stream.write("3\n")
        assert stream.finish()
        assert stream.num_dropped == 3


def test_a_disk_that_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut line is ended, and what is missing is counted once."""
    write, is_full = os.write, threading.Event()

    def write_or_fail(fd: int, data: bytes) -> int:
        if not is_full.is_set():
            return write(fd, data)
        if data.startswith(b"cut"):
            return write(fd, data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write_or_fail)
    path = tmp_path / "log"
    with path.open("w") as file:
        stream = DroppingStream(file)
        is_full.set()
        stream.write("cut short\n2\n3\n")
        while stream.num_dropped < 3:
            stream.flush()
        stream.write("4\n")
        while stream.num_dropped < 4:
            stream.flush()
        is_full.clear()
        stream.write("5\n")
        assert stream.finish()
    text = path.read_text()
    assert text.startswith("cut\n5\nonbeat: 4 lines ")
    assert text.count("\n") == 3


def test_a_reader_that_has_gone(pipe: Pipe) -> None:
    pipe.reader.close()
    stream = DroppingStream(pipe.writer)
    stream.write("1\n")
    assert stream.finish()
    assert stream.num_dropped == 1


def test_a_file_whose_owner_wants_no_waiting(pipe: Pipe) -> None:
    os.set_blocking(pipe.writer.fileno(), False)
    stream = DroppingStream(pipe.writer)
    stream.write(lines(0, 2000))
    assert finish(stream, pipe) == lines(0, 2000)


def test_what_is_written_past_the_stream_does_not_wait_either(pipe: Pipe) -> None:
    stream = DroppingStream(pipe.writer)
    stream.write(lines(0, 1000))
    command = [sys.executable, "-c", "import os; os.write(2, b'x' * 10_000); os.write(2, b'x' * 10_000)"]
    child = subprocess.run(command, stderr=pipe.writer, timeout=30, check=False)
    assert child.returncode == 1, "it was told, and did not wait"
    text = finish(stream, pipe)
    assert set(lines(0, 1000).split()) - set(text.replace("x", "").split()) == set()


def test_garbage_that_prints_while_a_line_is_taken(pipe: Pipe) -> None:
    class Printing:
        def __del__(self) -> None:
            stream.write("collected\n")

    stream = DroppingStream(pipe.writer)
    cycle: list[object] = [Printing()]
    cycle.append(cycle)
    del cycle
    with stream._turn:
        gc.collect()
    assert finish(stream, pipe) == "collected\n"


PROGRAM = """
import logging, os, sys, threading, warnings
from onbeat.output import num_dropped_lines, unblocked_output

def fail():
    raise ValueError("x" * 5000)

with unblocked_output():
    logging.basicConfig()
    for number in range(3000):
        print(number, "printed")
        print(number, "printed", file=sys.stderr)
        logging.warning("%d %s", number, "x" * 500)
    warnings.warn("x" * 5000)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert num_dropped_lines() > 500
    sys.exit("x" * 5000)
"""


def test_a_program_ends_that_nobody_reads(pipe: Pipe) -> None:
    """Whatever part of Python prints, and however it ends."""
    program = [sys.executable, "-c", PROGRAM]
    process = subprocess.run(program, stdout=pipe.writer, stderr=pipe.writer, timeout=60, check=False)
    assert process.returncode == 1
    assert "0 printed" in pipe.read()


def test_a_stream_that_is_closed_is_left_alone(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout
    monkeypatch.setattr(sys, "stderr", None)
    with unblocked_output():
        assert getattr(sys, "stderr") is None  # noqa: B009 -- mypy believes that there is one
        assert sys.stdout is before, "it is no file here"
        assert num_dropped_lines() == 0
    monkeypatch.setattr(sys, "stderr", pipe.writer)
    with unblocked_output():
        assert sys.stderr is not pipe.writer
        sys.stderr.write("1\n")
    assert sys.stderr is pipe.writer
    assert pipe.read() == "1\n"
