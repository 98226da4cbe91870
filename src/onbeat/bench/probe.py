"""What must be known of the server before it is loaded: that it answers, its model, how it counts tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from onbeat.bench.bench_config import TargetConfig
from onbeat.bench.client import why_no_answer
from onbeat.core.errors import ConfigError
from onbeat.workload.prompts import COMMON_WORDS, WordPool, calibrated_pool

NUM_CALIBRATION_WORDS = 256
TEXT_FIELDS = ("prompt", "content")
"""What servers call the text to tokenize: vLLM and SGLang, llama.cpp."""
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)


@dataclass(frozen=True, slots=True)
class ServerModels:
    """What a server's model list says."""

    ids: tuple[str, ...] = ()
    is_onbeat: bool = False
    """Whether a model is `owned_by` onbeat: such a server understands objectives."""


async def wait_until_ready(session: aiohttp.ClientSession, target: TargetConfig) -> ServerModels:
    """Return the models that the server offers, once it answers.

    Raises
    ------
    ConfigError : no answer in time, or one that no OpenAI-compatible server gives.
    """
    url = f"{target.root}/v1/models"
    deadline = time.monotonic() + target.ready_timeout
    while True:
        try:
            async with session.get(url, headers=dict(target.headers), timeout=PROBE_TIMEOUT) as response:
                if response.status < 500:
                    return await read_models(url, response)
                problem = f"HTTP {response.status}"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            problem = why_no_answer(error)
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"no server answers at {url} ({problem}). Start it, correct --base-url, or wait for it "
                "with --ready-check-timeout-sec"
            )
        await asyncio.sleep(0.5)


async def read_models(url: str, response: aiohttp.ClientResponse) -> ServerModels:
    """Return the models of an answer of /v1/models; none where a server has no such list.

    Raises
    ------
    ConfigError : it wants a key, or is no answer of an OpenAI-compatible server.
    """
    if response.status in {401, 403}:
        raise ConfigError(f"{url} answers HTTP {response.status}: set the key in OPENAI_API_KEY")
    if response.status in {404, 405}:  # an endpoint without a model list can be loaded all the same
        return ServerModels()
    try:
        cards = orjson.loads(await response.read())["data"]
        return ServerModels(
            tuple(card["id"] for card in cards), any(card.get("owned_by") == "onbeat" for card in cards)
        )
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} does not answer like an OpenAI-compatible server") from error


def choose_model(target: TargetConfig, offered: ServerModels) -> str:
    """Return the model to ask for: the one that is named, else the first that the server offers.

    Raises
    ------
    ConfigError : there is neither.
    """
    if target.name is not None:
        return target.name
    if not offered.ids:
        raise ConfigError(f"{target.root} lists no model: name one with --model")
    return offered.ids[0]


async def server_pool(session: aiohttp.ClientSession, target: TargetConfig, model: str) -> WordPool | None:
    """Return words that the server's own /tokenize counts as one token; None if it cannot tell."""
    candidates = COMMON_WORDS[:: len(COMMON_WORDS) // NUM_CALIBRATION_WORDS]
    texts = ["the", "the the", *candidates, *(f"{word} {word}" for word in candidates)]
    for field in TEXT_FIELDS:
        if await _count(session, target, {"model": model, field: candidates[0]}):
            break
    else:
        return None
    limit = asyncio.Semaphore(8)

    async def count(text: str) -> int:
        async with limit:
            return await _count(session, target, {"model": model, field: text})

    counts = dict(zip(texts, await asyncio.gather(*map(count, texts)), strict=True))
    try:
        return calibrated_pool(candidates, counts.__getitem__, source="server")
    except ConfigError:  # a model of another language: few English words are one token
        return None


async def _count(session: aiohttp.ClientSession, target: TargetConfig, body: Mapping[str, Any]) -> int:
    """Return how many tokens the server counts; 0 where it does not answer with tokens."""
    try:
        async with session.post(
            f"{target.root}/tokenize", json=body, headers=dict(target.headers), timeout=PROBE_TIMEOUT
        ) as response:
            if response.status != 200:
                return 0
            answer = orjson.loads(await response.read())
    except (TimeoutError, aiohttp.ClientError, OSError, orjson.JSONDecodeError):
        return 0
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0
