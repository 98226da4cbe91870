"""A server that may open few files: words at the start, and clients above the bound are answered."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from onbeat.core.errors import Overloaded
from onbeat.server.listening import OWN_FILES
from onbeat.text.limited_process import LimitedProcess
from tests.cpu.e2e.program import starting

STAND_IN = ("Llama-3.1-8B", "--load-format", "stand-in", "--device", "h100-sxm", "--max-model-len", "4096")
WORDS = "--max-connections 4096 needs"


def limits(soft: int, hard: int) -> tuple[str, ...]:
    """Return the command that starts another one under limits of open files."""
    return ("sh", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "sh")


@pytest.mark.parametrize("limit", [40, 64])
def test_too_few_are_words_at_the_start(limit: int, tiny_directory: Path) -> None:
    with starting(*STAND_IN, "--tokenizer", tiny_directory, prefix=limits(limit, limit)) as server:
        assert server.exit_code() == 2
    (line,) = server.lines
    assert f" {limit} files" in line


def test_the_soft_limit_is_raised_and_what_the_hard_one_lacks_is_told(tiny_directory: Path) -> None:
    limit = OWN_FILES + 20
    with starting(*STAND_IN, "--tokenizer", tiny_directory, prefix=limits(60, limit)) as server:
        server.wait_until_ready()
        assert any(WORDS in line for line in server.lines)
        port = int(server.url.rpartition(":")[2])
        with ExitStack() as held:
            for _ in range(limit):
                last = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            assert last.recv(99).startswith(b"HTTP/1.1 503 ")
        server.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    assert not any("Traceback" in line for line in server.lines)


def test_a_process_that_the_system_does_not_start_is_the_servers_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("subprocess.Popen", refused)
    with pytest.raises(Overloaded) as caught:
        LimitedProcess("onbeat.text.grammar.guard", b"", max_seconds=1).ask(b"")
    assert caught.value.code == "no_process"
