"""Known answers, asked for while connections break and engines are killed."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import aiohttp
import orjson

from onbeat.bench.client import why_no_answer
from onbeat.bench.history import End, KnownAnswer, ObservedAnswer
from onbeat.bench.stream import FAILURES, EventStreamParser
from onbeat.core.errors import ConfigError
from onbeat.core.options import check, option

_WORDS = (
    *("river", "seven", "glass", "north", "paper", "quiet", "stone", "lemon", "train", "cloud", "piano"),
    *("maple", "ocean", "radio", "silver", "candle", "garden", "winter", "letter", "bridge"),
)
_OPEN_AT_VLLM = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", re.MULTILINE)
_SETTLES_WITHIN = 15.0
_option = partial(option, group="chaos")
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """What is done to a server, and for how long."""

    seconds: float = _option(
        30.0, metavar="S", above=0, below=inf, help="time of chaos, once the right answers are known"
    )
    concurrency: int = _option(8, at_least=1, help="requests at once")
    num_prompts: int = _option(12, at_least=1, help="prompts with known answers")
    prompt_words: int = _option(
        8, at_least=1, help="words of the shortest prompt; each further one has as many more"
    )
    max_tokens: int = _option(48, at_least=2, help="most tokens in each answer")
    cancel_share: float = _option(
        0.2, at_least=0, at_most=1, metavar="SHARE", help="share of streams that the client breaks off"
    )
    whole_share: float = _option(
        0.2, at_least=0, at_most=1, metavar="SHARE", help="share of requests that are not streamed"
    )
    kill_command: str | None = _option(None, metavar="COMMAND", help="shell command to run again and again")
    kill_every: float = _option(
        5.0, metavar="S", above=0, below=inf, help="seconds between two runs of --kill-command"
    )
    seed: int = _option(0, help="random seed of what is asked and broken off")

    def __post_init__(self) -> None:
        check(self, ChaosPlan)


@dataclass(slots=True)
class ChaosRun:
    """What came of it."""

    known: list[KnownAnswer] = field(default_factory=list)
    unsteady: int = 0
    """Prompts left out, for undisturbed the server itself gave them two answers."""
    exchanges: list[ObservedAnswer] = field(default_factory=list)
    kills: list[tuple[float, int]] = field(default_factory=list)
    """When the command was run, and its exit code."""
    still_open: int = 0
    """Requests that the server said were open some time after all clients had gone."""


class Chaos:
    """One run against one server.

    Parameters
    ----------
    session : with the headers to send.
    root : the server's address.
    model : the model to ask for.
    on_exchange : told of each request that has ended.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        root: str,
        model: str,
        plan: ChaosPlan,
        on_exchange: Callable[[ObservedAnswer], None] = lambda _: None,
    ) -> None:
        self._session = session
        self._root, self._url = root, f"{root}/v1/completions"
        self._model = model
        self._plan = plan
        self._tell = on_exchange
        self._random = random.Random(plan.seed)
        self._began = time.monotonic()
        self._is_over = False
        self.result = ChaosRun()

    async def learn(self) -> None:
        """Ask for every answer twice, undisturbed, one at a time and then all at once.

        Raises
        ------
        ConfigError : the server does not answer, or no two answers of it are alike.
        """
        prompts = [
            " ".join(self._random.choices(_WORDS, k=self._plan.prompt_words * (1 + place)))
            for place in range(self._plan.num_prompts)
        ]
        first = [await self._answer(prompt) for prompt in prompts]
        second = await asyncio.gather(*map(self._answer, prompts))
        self.result.known = [one for one, other in zip(first, second, strict=True) if one == other]
        self.result.unsteady = len(prompts) - len(self.result.known)
        if not self.result.known:
            raise ConfigError(
                f"the server gave none of {len(prompts)} prompts the same answer twice at temperature "
                "0, so nothing can be checked; start it with `onbeat serve --batch-invariant`"
            )

    async def run(self) -> None:
        """Ask at random, break off at random, and kill, until the time is over."""
        self._began = time.monotonic()
        killing = asyncio.create_task(self._kill()) if self._plan.kill_command else None
        try:
            await asyncio.gather(*(self._client() for _ in range(self._plan.concurrency)))
        finally:
            if killing is not None:
                killing.cancel()

    def stop(self) -> None:
        """Ask for nothing more, before the time is over."""
        self._is_over = True

    async def settle(self) -> None:
        """Wait until the server has no request, where it tells."""
        for _ in range(int(_SETTLES_WITHIN / 0.25)):
            try:
                self.result.still_open = await self._num_open()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                return
            if not self.result.still_open:
                return
            await asyncio.sleep(0.25)

    async def _num_open(self) -> int:
        """Return how many requests an onbeat server has, or a vLLM; 0 of others."""
        async with self._session.get(f"{self._root}/state") as response:
            if response.status == 200:
                own = orjson.loads(await response.read())
                return sum(own.get(f"requests_{each}", 0) for each in ("running", "waiting"))
        async with self._session.get(f"{self._root}/metrics") as response:
            return int(sum(map(float, _OPEN_AT_VLLM.findall(await response.text()))))

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _client(self) -> None:
        while self._now < self._plan.seconds and not self._is_over:
            exchange = ObservedAnswer(
                number=len(self.result.exchanges),
                known=self._random.randrange(len(self.result.known)),
                streamed=self._random.random() >= self._plan.whole_share,
                begun=self._now,
            )
            self.result.exchanges.append(exchange)
            cancels = exchange.streamed and self._random.random() < self._plan.cancel_share
            await self._exchange(
                exchange, self._random.randrange(1, self._plan.max_tokens) if cancels else None
            )
            exchange.ended = self._now
            self._tell(exchange)
            if exchange.end in (End.REFUSED, End.CUT):
                await asyncio.sleep(0.05)  # a server that is away is not asked a thousand times a second

    async def _exchange(self, exchange: ObservedAnswer, cancel_after: int | None) -> None:
        """Ask, and write down what comes; break off behind some events."""
        prompt = self.result.known[exchange.known].prompt
        try:
            async with self._session.post(
                self._url, json=self._body(prompt, stream=exchange.streamed)
            ) as response:
                if response.status != 200:
                    exchange.end, exchange.detail = End.REFUSED, f"HTTP {response.status}"
                elif exchange.streamed:
                    await self._read_stream(response, exchange, cancel_after)
                else:
                    _take(await response.json(), exchange, is_whole=True)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            exchange.end, exchange.detail = End.CUT, f"{type(error).__name__}: {error}"

    async def _read_stream(
        self, response: aiohttp.ClientResponse, exchange: ObservedAnswer, cancel_after: int | None
    ) -> None:
        parser = EventStreamParser()
        num_events = 0
        async for piece in response.content.iter_any():
            for data in parser.feed(piece):
                if exchange.num_done:
                    exchange.late_events += 1
                if data == b"[DONE]":
                    exchange.num_done += 1
                    continue
                _take(orjson.loads(data), exchange, is_whole=False)
                num_events += 1
                if cancel_after is not None and num_events >= cancel_after and not exchange.finish_reasons:
                    exchange.end = End.CANCELLED
                    response.close()
                    return
        if parser.error is not None:
            exchange.end, exchange.detail = End.FAILED, parser.error.decode(errors="replace")[:200]
        elif exchange.end is End.CUT and exchange.finish_reasons:
            exchange.end = End.WHOLE

    async def _answer(self, prompt: str) -> KnownAnswer:
        """Return an answer as it is given undisturbed."""
        try:
            async with self._session.post(self._url, json=self._body(prompt, stream=False)) as response:
                text = await response.text()
                if response.status != 200:
                    raise ConfigError(f"{self._url} answers {response.status}: {text[:200]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConfigError(
                f"no server answers at {self._url} ({why_no_answer(error)}); start one, or name another"
            ) from error
        answer = orjson.loads(text)
        [choice] = answer["choices"]
        return KnownAnswer(
            prompt, choice["text"], answer["usage"]["completion_tokens"], choice["finish_reason"]
        )

    def _body(self, prompt: str, *, stream: bool) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._plan.max_tokens,
            "temperature": 0,
            "stream": stream,
        }
        return {**body, "stream_options": {"include_usage": True}} if stream else body

    async def _kill(self) -> None:
        assert self._plan.kill_command is not None
        while self._now + self._plan.kill_every < self._plan.seconds:
            await asyncio.sleep(self._plan.kill_every)
            process = await asyncio.create_subprocess_shell(self._plan.kill_command)
            self.result.kills.append((self._now, await process.wait()))


def _take(event: dict[str, Any], exchange: ObservedAnswer, *, is_whole: bool) -> None:
    """Write down what one event says, or a whole answer."""
    if event.get("error") is not None:
        exchange.end, exchange.detail = End.FAILED, str(event["error"])[:200]
        return
    for choice in event.get("choices", ()):
        if choice.get("text"):
            exchange.late_events += bool(exchange.finish_reasons)
            exchange.pieces.append(choice["text"])
        if choice.get("finish_reason"):
            exchange.finish_reasons.append(choice["finish_reason"])
            if choice["finish_reason"] in FAILURES:
                exchange.end, exchange.detail = End.FAILED, choice["finish_reason"]
    if event.get("usage") is not None:
        exchange.usages.append(event["usage"]["completion_tokens"])
    if is_whole and exchange.finish_reasons and exchange.end is End.CUT:
        exchange.end = End.WHOLE
