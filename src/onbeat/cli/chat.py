"""`onbeat chat`: talk to a running server in the terminal, with an objective."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import readline  # noqa: F401 - gives `input` line editing and the lines before
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import orjson
from rich.console import Console

from onbeat.bench.bench_config import TargetConfig, key_headers
from onbeat.bench.client import why_no_answer
from onbeat.bench.probe import choose_model, read_models
from onbeat.bench.stream import EventStreamParser, error_code, error_text
from onbeat.cli.args import FAILED, server_root
from onbeat.cli.options import add_options, read_options
from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.core.options import check, option
from onbeat.metrics.distribution import percentile

_option = partial(option, group="chat")
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
_REFUSALS = ("slo_unattainable", "deadline_exceeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What is asked of the server with every message."""

    model: str | None = _option(None, help="model to ask for (default: the server's first)")
    system: str | None = _option(None, metavar="TEXT", help="system message")
    message: str | None = _option(
        None, metavar="TEXT", help="send only this message, print the answer and end"
    )
    temperature: float | None = _option(
        None, at_least=0.0, help="sampling temperature (default: the model's)"
    )
    max_tokens: int = _option(512, at_least=1, help="most tokens in an answer")
    slo_ttft_ms: float | None = _option(
        None, metavar="MS", above=0, below=math.inf, help="objective for the first token"
    )
    slo_tbt_ms: float | None = _option(
        None, metavar="MS", above=0, below=math.inf, help="objective for each further token"
    )
    shed: bool = _option(
        default=False, is_switch=True, help="ask the server to refuse requests that would be late"
    )

    def __post_init__(self) -> None:
        check(self, ChatOptions)
        if self.shed and not self.objective:
            raise ConfigError("--shed needs an objective: give --slo-ttft-ms or --slo-tbt-ms")

    @property
    def objective(self) -> dict[str, Any]:
        """The body's `slo`; empty where nothing is asked."""
        given = {"ttft_ms": self.slo_ttft_ms, "tbt_ms": self.slo_tbt_ms}
        stated: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return {**stated, "shed": self.shed} if stated else {}


class NoAnswer(OnbeatError):
    """The server gives no answer; the message is what it says."""


@dataclass(slots=True)
class Answer:
    """One answer, as it came."""

    text: str = ""
    slo: dict[str, Any] | None = None
    num_tokens: int | None = None
    is_cut: bool = False
    """Whether it reached its limit of tokens."""
    sent: float = 0.0
    """Seconds, as is when each piece of text came."""
    arrivals: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument(
        "url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="the server's address"
    )
    add_options(parser, ChatOptions)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends; return the exit code."""
    options, root = read_options(args, ChatOptions), server_root(args.url)
    console = Console(stderr=True, highlight=False)
    if options.message is not None:
        return asyncio.run(_talk(root, options, console))
    _talk_on(Talk(root, options, console))
    return 0


async def _talk(root: str, options: ChatOptions, console: Console) -> int:
    """Send the one message; return the exit code."""
    talk = Talk(root, options, console)
    await talk.open()
    return 0 if await talk.say(options.message or "") else FAILED


def _talk_on(talk: Talk) -> None:
    """Talk until the input ends. It is read outside of the event loop, which would keep Ctrl-C from it."""
    with _changed_terminal(~termios.ICANON), asyncio.Runner() as runner:
        runner.run(talk.open())
        text = f"{talk.model} at {talk.root}. Ctrl-D ends, Ctrl-C stops an answer."
        talk.console.print(text, style="dim")
        while (line := _read_line()) is not None:
            if line:
                with suppress(KeyboardInterrupt), _changed_terminal(~termios.ECHO):
                    runner.run(talk.say(line))


def _read_line() -> str | None:
    """Return the next line; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


@contextmanager
def _changed_terminal(local_modes: int) -> Iterator[None]:
    """Give the terminal only these of its local modes.

    Keys that are typed while an answer comes are not shown (no ECHO), and the next line begins with them.
    They are kept as they are (no ICANON, in the whole talk): a terminal that reads lines by itself would
    swallow a Ctrl-D.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, [*before[:3], before[3] & local_modes, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@dataclass(slots=True)
class Talk:
    """A conversation with one server.

    Parameters
    ----------
    root : the server's address.
    console : for what is no answer; answers go to the standard output.
    """

    root: str
    options: ChatOptions
    console: Console
    model: str = ""
    _messages: list[dict[str, str]] = field(default_factory=list)

    async def open(self) -> None:
        """Find the model.

        Raises
        ------
        ConfigError : no server answers, or it wants a key.
        """
        try:
            async with _session() as session, session.get(f"{self.root}/v1/models") as response:
                await _check(response)
                served = await read_models(f"{self.root}/v1/models", response)
        except aiohttp.ClientError as error:
            raise ConfigError(
                f"no server answers at {self.root} ({why_no_answer(error)}); start one with `onbeat serve`, "
                "or name another: `onbeat chat URL`"
            ) from error
        self.model = choose_model(TargetConfig(base_url=self.root, model=self.options.model), served)
        if self.options.system is not None:
            self._messages.append({"role": "system", "content": self.options.system})

    async def say(self, text: str) -> bool:
        """Send a message, and print the answer as it comes; return whether there was a whole one."""
        asked = [*self._messages, {"role": "user", "content": text}]
        answer = Answer()
        try:
            await self._stream(asked, answer)
        except NoAnswer as error:
            self._say(str(error), style="yellow")
            return False
        except aiohttp.ClientError as error:
            self._say(f"the connection was lost: {error}", style="red")
            return False
        except asyncio.CancelledError:  # it is stopped; the talk goes on with what there is of it
            self._end(asked, answer)
            raise
        self._end(asked, answer)
        self._say(_verdict(answer), style="dim")
        return True

    def _end(self, asked: list[dict[str, str]], answer: Answer) -> None:
        self._messages = [*asked, {"role": "assistant", "content": answer.text}]
        sys.stdout.write("\n")

    def _say(self, text: str, *, style: str) -> None:
        """Print a line beside the answers, which a program that reads it gets as one."""
        self.console.print(text, style=style, markup=False, soft_wrap=not self.console.is_terminal)

    async def _stream(self, messages: list[dict[str, str]], answer: Answer) -> None:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.options.max_tokens,
        }
        if self.options.temperature is not None:
            body["temperature"] = self.options.temperature
        if self.options.objective:
            body["slo"] = self.options.objective
        parser = EventStreamParser()
        answer.sent = time.perf_counter()
        url = f"{self.root}/v1/chat/completions"
        async with _session() as session, session.post(url, json=body) as response:
            await _check(response)
            async for piece in response.content.iter_any():
                for data in parser.feed(piece):
                    if data != b"[DONE]":
                        _take(orjson.loads(data), answer)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers=key_headers(), timeout=_TIMEOUT)


def _take(event: dict[str, Any], answer: Answer) -> None:
    if event.get("error"):
        raise NoAnswer(f"the answer broke off: {error_text(event)}")
    for choice in event.get("choices", ()):
        text = choice["delta"].get("content") or ""
        answer.text += text
        answer.is_cut = answer.is_cut or choice.get("finish_reason") == "length"
        if text:
            answer.arrivals.append(time.perf_counter())
        sys.stdout.write(text)
        sys.stdout.flush()
    answer.slo = event.get("slo") or answer.slo
    answer.num_tokens = (event.get("usage") or {}).get("completion_tokens", answer.num_tokens)


async def _check(response: aiohttp.ClientResponse) -> None:
    """Say why there is no answer.

    Raises
    ------
    Refused : with the server's words, and when to come again.
    """
    if response.status == 200:
        return
    try:
        body = await response.json(content_type=None)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {"error": f"HTTP {response.status}"}
    if response.status == 401:
        raise NoAnswer("the server wants an API key; put it into $OPENAI_API_KEY")
    text = error_text(body)
    if error_code(body) in _REFUSALS:
        wait = response.headers.get("retry-after-ms")
        text = f"refused: {text}" + (f"; try again in {float(wait) / 1000:.1f} s" if wait else "")
    raise NoAnswer(text)


def _verdict(answer: Answer) -> str:
    """Return a line on an answer: how long it took, and with an objective what the server says of it."""
    parts = (
        [] if answer.num_tokens is None else [f"{'cut off at ' * answer.is_cut}{answer.num_tokens} tokens"]
    )
    if slo := answer.slo:
        kept = "kept" if slo["met"] else "given up: best effort" if slo["relegated"] else "missed"
        forecast = slo.get("predicted_ttft_ms")
        parts = [f"objective {kept}", _measured("first token", slo["ttft_ms"]), *parts]
        if forecast is not None:
            parts[1] += f" (predicted {forecast:.0f} ms)"
        if slo["tbt_p99_ms"] is not None:
            parts.insert(2, _measured("P99 gap", slo["tbt_p99_ms"]))
    elif arrivals := answer.arrivals:
        if gaps := [after - before for before, after in itertools.pairwise(arrivals)]:
            parts.insert(0, _measured("P99 gap", 1e3 * percentile(gaps, 99)))
        parts.insert(0, _measured("first token", 1e3 * (arrivals[0] - answer.sent)))
    return " · ".join(parts)


def _measured(name: str, value: float | None) -> str:
    return f"{name} {'-' if value is None else f'{value:.0f} ms'}"
