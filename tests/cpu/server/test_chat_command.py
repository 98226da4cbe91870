"""`onbeat chat` against a server with a fake engine."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
from functools import partial

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from onbeat.cli import chat as command
from onbeat.cli.chat import ChatOptions, Talk, _talk
from onbeat.cli.main import build_parser
from onbeat.core.errors import ConfigError, OnbeatError, SLOUnattainable
from tests.cpu.server.predicting_engine import PredictingEngine
from tests.cpu.server.running import Served
from tests.waiting import until


@pytest.fixture
def engine() -> PredictingEngine:
    return PredictingEngine(predicted_ttft=0.05)


async def chat(served: Served, capsys: pytest.CaptureFixture[str], **options: object) -> tuple[int, str, str]:
    """Send one message; return the exit code, the answer and what was said beside it."""
    code = await _talk(served.url, ChatOptions(message="hi", **options), Console(stderr=True, width=200))  # type: ignore[arg-type]
    output = capsys.readouterr()
    return code, output.out, output.err


async def test_an_answer_and_its_verdict(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer, said = await chat(served, capsys, slo_ttft_ms=5000.0, slo_tbt_ms=1000.0, system="be kind")
    assert (code, answer) == (0, "Hello, world!\n")
    assert re.match(r"objective kept · .*\(predicted 50 ms\) · P99 gap ", said)
    assert said.rstrip().endswith("14 tokens")


async def test_a_refusal_says_when_to_come_again(
    served: Served, engine: PredictingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.refusals[""] = SLOUnattainable("TTFT would be late", predicted_ttft=0.8, retry_after=1.25)
    code, answer, said = await chat(served, capsys, slo_ttft_ms=1.0, shed=True)
    assert (code, answer) == (1, "")
    assert re.fullmatch(r"refused: TTFT would be late; .* 1\.2 s\n", said)


async def test_a_refusal_for_good_does_not(
    served: Served, engine: PredictingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.refusals[""] = SLOUnattainable("not even when idle", predicted_ttft=0.8, retry_after=None)
    assert await chat(served, capsys, slo_ttft_ms=1.0, shed=True) == (1, "", "refused: not even when idle\n")


async def test_without_an_objective_the_times_are_those_of_the_client(
    served: Served, engine: PredictingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script.seconds_per_step = 0.03
    _, _, said = await chat(served, capsys)
    found = re.fullmatch(r"first token (\d+) ms · P99 gap (\d+) ms · 14 tokens\n", said)
    assert found is not None
    assert all(int(milliseconds) >= 25 for milliseconds in found.groups())


def test_ctrl_c_stops_an_answer_and_ends_the_talk_where_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    said, lines = [], iter(["one", "", "two", None])

    async def say(_talk: Talk, text: str) -> bool:
        said.append(text)
        if text == "one":
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        return True

    async def opened(_talk: Talk) -> None:
        return

    monkeypatch.setattr(Talk, "say", say)
    monkeypatch.setattr(Talk, "open", opened)
    monkeypatch.setattr(command, "_read_line", lambda: next(lines))
    arguments = build_parser(["chat"]).parse_args(["chat"])
    assert (arguments.run(arguments), said) == (0, ["one", "two"])
    monkeypatch.setattr(command, "_read_line", partial(signal.raise_signal, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        arguments.run(arguments)


async def test_an_answer_that_is_cut_off_says_so(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    _, answer, said = await chat(served, capsys, max_tokens=5)
    assert answer == "Hello\n"
    assert " 5 tokens" in said


async def test_a_terminal_edits_lines_and_keeps_keys_out_of_answers(
    served: Served, engine: PredictingEngine
) -> None:
    engine.script.seconds_per_step = 0.05
    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "onbeat", "chat", served.url]
    environment = {**os.environ, "TERM": "xterm"}
    talk = await asyncio.create_subprocess_exec(
        *program, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    screen = bytearray()
    asyncio.get_running_loop().add_reader(ours, lambda: screen.extend(os.read(ours, 4096)))

    async def answered(keys: bytes, sent: str) -> None:
        screen.clear()
        os.write(ours, keys)
        await until(lambda: b"Hello" in screen)
        assert f"[user]{sent}\n[assistant]" in bytes(engine.requests[-1].prompt_token_ids).decode()

    try:
        await until(lambda: b"> " in screen)
        await answered(b"hello\x1b[D\x1b[DX\n", "helXlo")
        os.write(ours, b"\x1b[A?")  # while the answer comes: Up brings the line before
        await until(lambda: b"> helXlo?" in screen)
        assert b"Hello, world!\r\n" in screen
        await answered(b"\n", "helXlo?")
        await until(lambda: b"\r\n> " in screen)
        await answered(b"\n\n\x1b[A!\n", "helXlo?!")  # empty lines end nothing
        os.write(ours, b"\x04")  # while the answer comes, too
        assert await asyncio.wait_for(talk.wait(), 60) == 0
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        if talk.returncode is None:
            talk.kill()
            await talk.wait()
        os.close(ours)


async def test_a_talk_goes_on_with_what_came_of_a_stopped_answer(
    served: Served, engine: PredictingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script.end, engine.script.seconds_per_step = False, 0.01
    talk = Talk(served.url, ChatOptions(), Console(stderr=True))
    await talk.open()
    stopped, shown = asyncio.create_task(talk.say("hi")), ""
    while len(shown) < 3:
        await asyncio.sleep(0.01)
        shown += capsys.readouterr().out
    stopped.cancel()
    await asyncio.gather(stopped, return_exceptions=True)
    shown = (shown + capsys.readouterr().out).removesuffix("\n")
    engine.script.end = True
    assert await talk.say("go on")
    prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
    assert f"[user]hi\n[assistant]{shown}\n[user]go on\n" in prompt


async def test_what_a_pipe_gets_is_one_line(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(stderr=True, width=20)
    await _talk(served.url, ChatOptions(message="hi", slo_ttft_ms=5000.0), console)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("served", [{"api_keys": ("secret",)}], indirect=True)
async def test_a_server_with_keys(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(OnbeatError, match=r"\$OPENAI_API_KEY"):
        await chat(served, capsys)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert (await chat(served, capsys))[1] == "Hello, world!\n"


async def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9"):
        await _talk("http://127.0.0.1:9", ChatOptions(message="hi"), Console(stderr=True))


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (200, "[]", "/v1/models does not answer"),
        (200, '{"data": []}', "with --model"),
        (400, '{"error": "unexpected path"}', "^unexpected path$"),
    ],
)
async def test_servers_of_another_kind(status: int, text: str, words: str) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(text=text, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    async with TestServer(app) as server:
        with pytest.raises(OnbeatError, match=words):
            await _talk(str(server.make_url("")), ChatOptions(message="hi"), Console(stderr=True))


def test_bad_flags_are_named() -> None:
    assert build_parser(["chat"]).parse_args(["chat", "--slo-ttft-ms", "5"]).slo_ttft_ms == 5
    with pytest.raises(ConfigError, match="slo_ttft_ms is 0"):
        ChatOptions(slo_ttft_ms=0.0)
    with pytest.raises(ConfigError, match="--shed"):
        ChatOptions(shed=True)
