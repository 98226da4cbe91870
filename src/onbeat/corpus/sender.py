"""Sends texts to an endpoint of embeddings, again where the server has no room for them now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from onbeat.bench.client import retry_after
from onbeat.bench.stream import error_text
from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.corpus.lines import Text

TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses that say nothing against the texts."""
OF_THE_TEXTS = frozenset({400, 413, 422})
"""Statuses that may be the fault of one of them."""
MOST_FAILURES = 4
"""How often a request may end with status 500 before one of its texts is to blame."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds until a request is sent again where the server does not say; each time twice as long."""


Tell = Callable[[int, int, str], None]


class TextRefused(Exception):
    """The server does not take a text; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where texts go, and as what."""

    root: str
    """The server's address without a path."""
    model: str | None = None
    """None leaves it to the server."""
    slo_class: str | None = "offline"
    """None states none."""
    dimensions: int | None = None
    encoding: str = "float"
    headers: Mapping[str, str] = field(default_factory=dict)
    patience: float = 300.0
    """For how long the server may take no text before the run gives up, seconds."""

    @property
    def url(self) -> str:
        """Where requests are posted."""
        return f"{self.root}/v1/embeddings"

    def body(self, texts: Sequence[Text]) -> bytes:
        """Return the body of a request."""
        fields: dict[str, Any] = {
            "input": [each.text for each in texts],
            "encoding_format": self.encoding,
            "model": self.model,
            "dimensions": self.dimensions,
            "slo": None if self.slo_class is None else {"class": self.slo_class},
        }
        return orjson.dumps({name: value for name, value in fields.items() if value is not None})


class Sender:
    """Posts texts until they are taken or refused for good.

    Parameters
    ----------
    session : for all requests.
    endpoint : where they go.
    tell : hears that a request is sent again, and why (`CorpusProgress.advance`).
    """

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint, tell: Tell) -> None:
        self._session, self._endpoint, self._tell = session, endpoint, tell
        self._last_success = time.monotonic()
        self.num_tokens = 0
        """Of the texts that were embedded, as the server counts them."""
        self.model: str | None = None
        """As the server names it."""
        self.problem = ""
        """Why a request was last sent again; empty once one has been answered."""

    async def embed(self, texts: Sequence[Text]) -> list[Any]:
        """Return the embeddings of texts, in their order.

        Raises
        ------
        TextRefused : the server does not take one of them.
        ConfigError : it does not take requests like this.
        OnbeatError : it has taken nothing for too long, or answers like no such endpoint.
        """
        body, wait = self._endpoint.body(texts), FIRST_WAIT
        begin, num_failures = time.monotonic(), 0
        while True:
            told: float | None = None
            try:
                async with self._session.post(self._endpoint.url, data=body) as response:
                    content = await response.read()
                if response.status == 200:
                    return self._taken(content, len(texts))
                num_failures += response.status == 500
                self._check(response.status, content, is_hopeless=num_failures == MOST_FAILURES)
                self.problem = f"HTTP {response.status}: {_message(content)}"
                told = retry_after(response.headers)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                self.problem = str(error) or type(error).__name__
            pause = wait if told is None else told
            wait = min(2 * wait, LONGEST_WAIT)
            self._check_patience(begin, pause)
            self._tell(0, self.num_tokens, self.problem)
            await asyncio.sleep(pause)

    def _taken(self, content: bytes, num_texts: int) -> list[Any]:
        try:
            answer = orjson.loads(content)
            by_index = {each["index"]: each["embedding"] for each in answer["data"]}
            embeddings = [by_index[index] for index in range(num_texts)]
            self.model = answer.get("model")
            self.num_tokens += int(answer.get("usage", {}).get("prompt_tokens", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OnbeatError(
                f"{self._endpoint.url} does not answer like an endpoint of embeddings: {content[:80]!r}"
            ) from error
        self._last_success, self.problem = time.monotonic(), ""
        return embeddings

    def _check(self, status: int, content: bytes, *, is_hopeless: bool) -> None:
        """Raise unless it may help to send the request again."""
        if status in OF_THE_TEXTS or is_hopeless:
            raise TextRefused(_message(content))
        if status not in TRY_AGAIN:
            cure = "; set the key in OPENAI_API_KEY" if status in {401, 403} else ""
            raise ConfigError(f"{self._endpoint.url} answers HTTP {status}: {_message(content)}{cure}")

    def _check_patience(self, begin: float, pause: float) -> None:
        patience = self._endpoint.patience
        if time.monotonic() + pause - max(begin, self._last_success) > patience:
            raise OnbeatError(
                f"{self._endpoint.url} takes no texts within {patience:g} s ({self.problem}); run the "
                "command again to go on with what is left, or give it more time with --patience-sec"
            )


def _message(content: bytes) -> str:
    try:
        message = orjson.loads(content)
    except orjson.JSONDecodeError:
        message = None
    if isinstance(message, dict):
        return error_text(message)
    return content.decode(errors="replace").strip()[:300] or "no message"
