"""`onbeat top` against servers that are there, are not, go away, come back, or are something else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness.servers import free_port
from onbeat.cli.args import server_root
from onbeat.cli.main import main
from onbeat.core.errors import ConfigError
from tests.cpu.top.state_server import showing
from tests.cpu.top.terminal import in_terminal

STORED = (Path(__file__).parents[2] / "data" / "top_state.json").read_text()


RUNNING = '"requests_running":9'


@dataclass
class Run:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_top(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run the command without a terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: str) -> Run:
        code = main(["top", *arguments])
        out, err = capsys.readouterr()
        return Run(code, out, err)

    return run


@pytest.mark.parametrize("flags", [(), ("--once",)])
def test_without_a_terminal_it_prints_one_frame(flags: tuple[str, ...], run_top) -> None:
    with showing(STORED) as server:
        run = run_top(server.url, *flags)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split()[:4] == ["onbeat", "0.1.0", "smollm2-135m-instruct", "slo"]
    assert "2 slo_unattainable" in run.stdout
    assert "\x1b" not in run.stdout
    assert max(map(len, run.stdout.splitlines())) == 80
    assert server.paths == ["/state"]


def test_once_in_a_terminal_prints_one_frame_and_ends() -> None:
    with showing(STORED) as server, in_terminal("top", server.url, "--once", NO_COLOR="1") as terminal:
        terminal.wait_for("Since the server started.")
        assert terminal.process.wait(10) == 0
        assert "\x1b[31m" not in terminal.drawn
        assert "\x1b[?1049h" not in terminal.drawn  # what scrolls by stays to be read


def test_the_key_is_sent(run_top) -> None:
    with showing(STORED) as server:
        assert run_top(server.url, "--api-key", "secret").returncode == 0
    assert set(server.keys) == {"Bearer secret"}


def test_it_follows_the_server_and_ends_on_ctrl_c() -> None:
    with showing(STORED) as server, in_terminal("top", server.url, "--interval", "0.1") as terminal:
        terminal.wait_for("9 running")
        server.text = STORED.replace(RUNNING, RUNNING.replace("9", "7"))
        terminal.wait_for("7 running")
        assert terminal.press_ctrl_c() == 130
        assert terminal.drawn.count("\x1b[?1049h") == terminal.drawn.count("\x1b[?1049l") == 1
        assert "Traceback" not in terminal.text
        assert "onbeat: interrupted" in terminal.text


def test_a_server_that_goes_away_is_waited_for() -> None:
    with showing(STORED) as server, in_terminal("top", server.url, "--interval", "0.1") as terminal:
        terminal.wait_for("9 running")
        server.stop()
        terminal.wait_for("Out of date since")
        terminal.wait_for("Connection refused")
        terminal.wait_for("9 running")  # what was known last stays to be seen
        restarted = re.sub(r'"start_time":[0-9.]+', '"start_time":1795257200.0', STORED)
        server.text = restarted.replace(RUNNING, RUNNING.replace("9", "3"))
        server.start()
        terminal.wait_for("3 running")
        terminal.wait_for("last 0 s")  # a new server: nothing is compared with the old one
        assert terminal.press_ctrl_c() == 130


def test_a_server_whose_engine_died_says_so(run_top) -> None:
    with showing(STORED.replace(RUNNING, f'{RUNNING},"engine_alive":0')) as server:
        run = run_top(server.url)
    assert run.returncode == 0
    assert run.stdout.splitlines()[-1].startswith("No replica")


def test_another_server_in_its_place_is_no_end() -> None:
    with showing(STORED) as server, in_terminal("top", server.url, "--interval", "0.1") as terminal:
        terminal.wait_for("9 running")
        server.text = "<html></html>"
        terminal.wait_for("Out of date since")
        server.text = STORED
        terminal.wait_for("Classes, plan: last")
        assert terminal.press_ctrl_c() == 130


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("<html>It works!</html>", 200, "answers without server_info"),
        ('{"requests_running": 1}', 200, "answers without server_info"),
        ("", 404, "HTTP 404"),
        ("", 401, "HTTP 401: give its key with --api-key"),
        ("", 502, "answers HTTP 502"),
    ],
)
def test_what_is_no_onbeat_server_is_named(text: str, status: int, message: str, run_top) -> None:
    with showing(text, status=status) as server:
        run = run_top(server.url)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"onbeat: error: {server.url}/state ")
    assert message in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_server_that_is_not_there_is_named_with_the_cure(run_top) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    run = run_top(url)
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(
        rf"onbeat: error: .*{url}/state \(Connection refused\).*`onbeat serve`.*`onbeat top URL`\n",
        run.stderr,
    )


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("http://host:1/v1/", "http://host:1"),
        ("https://host/llm/metrics", "https://host/llm"),
        ("https://host/llm/state", "https://host/llm"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_addresses_are_taken_as_people_give_them(given: str, root: str) -> None:
    assert server_root(given) == root


@pytest.mark.parametrize(
    "given", ["", "ftp://host", "http://", "http://host:x", "http://[::1", "http://h/?q=1"]
)
def test_what_is_no_address_is_an_error(given: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(given))):
        server_root(given)


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "soon"])
def test_intervals_that_cannot_be(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["top", "--interval", interval])
    assert f" 0.1, got '{interval}'" in capsys.readouterr().err
