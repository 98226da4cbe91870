"""`onbeat profile record tcp://...`: steps of an engine that publishes forward-pass metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from onbeat.cli import step_socket
from onbeat.cli.main import main
from onbeat.perfmodel.step_log import read_step_log
from tests.pure.perfmodel.recorded import fpm


@contextmanager
def publishing(message_of: Callable[[int], object]) -> Iterator[str]:
    """Publish a message a hundred times a second, as engines do: topic, sequence, msgpack."""
    context, is_over = zmq.Context(), threading.Event()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def publish() -> None:
        number = 0
        while not is_over.wait(0.01):
            payload = msgspec.msgpack.encode(message_of(number))
            socket.send_multipart((b"", number.to_bytes(8, "big"), payload))
            number += 1

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        is_over.set()
        thread.join()
        socket.close(linger=0)
        context.term()


def test_steps_are_recorded_as_they_come(tmp_path: Path) -> None:
    with publishing(lambda number: fpm(counter=number, decodes=2, context=100 + number)) as address:
        assert main(["profile", "record", address, str(tmp_path / "steps.jsonl"), "--seconds", "1"]) == 0
    stream = read_step_log(tmp_path / "steps.jsonl")
    assert len(stream.steps) > 10
    assert all(step.distance is not None and step.wall == 0.01 for step in stream.steps[1:])


def test_another_version_ends_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with publishing(lambda number: fpm(counter=number, decodes=1, context=9) | {"version": 2}) as address:
        assert main(["profile", "record", address, str(tmp_path / "steps.jsonl"), "--seconds", "5"]) == 2
    assert f"{address}, message 1: version" in capsys.readouterr().err


def test_silence_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_socket, "SILENCE", 0.3)
    path = str(tmp_path / "steps.jsonl")
    assert main(["profile", "record", "tcp://127.0.0.1:9", path, "--seconds", "5"]) == 2
    assert "tcp://127.0.0.1:9" in capsys.readouterr().err


def test_an_address_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "record", "tcp://nowhere", str(tmp_path / "steps.jsonl")]) == 2
    assert "tcp://nowhere" in capsys.readouterr().err
