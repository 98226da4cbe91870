"""Rate limits of API keys: how many requests and tokens a minute, and how many requests at once.

A bucket holds a minute's worth, and fills up within a minute. A request takes its tokens by an estimate, as
nobody has counted them at the door, and gives back or adds what it really took when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onbeat.core.errors import counted
from onbeat.server.errors import ApiError, error_response, retry_headers
from onbeat.server.middleware import HttpContext, context_of
from onbeat.server.slo_defaults import KeyLimits

BYTES_PER_TOKEN = 4
"""Of a body whose tokens nobody has counted yet; English text has about as many."""
MINUTE = 60.0
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}"
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
"""Of answers to keys with limits, as OpenAI names them."""


class Bucket:
    """Holds a minute's worth of something, and fills up within a minute.

    Parameters
    ----------
    per_minute : how much it holds.
    now : seconds, as all times here.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.most = per_minute
        self._level, self._time = float(per_minute), now

    def level(self, now: float) -> float:
        """Return what it holds; below 0 where more was taken than there was."""
        self._level = min(self._level + (now - self._time) * self.most / MINUTE, float(self.most))
        self._time = now
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Return how long it takes until so much can be taken, seconds; a full bucket is enough for any."""
        return max(min(amount, self.most) - self.level(now), 0.0) * MINUTE / self.most

    def take(self, amount: float) -> None:
        """Take so much, or put it back where it is below 0."""
        self._level -= amount


class KeyMeter:
    """What the requests of an API key have taken of its limits."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)
        self._most_open = limits.max_open_requests
        self._num_open = 0

    def begin(self, num_tokens: int, now: float) -> None:
        """Take a request.

        Parameters
        ----------
        num_tokens : that it may have, about.

        Raises
        ------
        ApiError : a limit is reached (429); nothing is taken.
        """
        if self._most_open is not None and self._num_open >= self._most_open:
            raise _refusal(
                "open_requests",
                f"has {counted(self._num_open, 'open request')} and may have {self._most_open}",
                0.0,
            )
        if self._requests is not None and (wait := self._requests.wait(1, now)):
            raise _refusal("requests", f"may send {counted(self._requests.most, 'request')} a minute", wait)
        if self._tokens is not None and (wait := self._tokens.wait(num_tokens, now)):
            raise _refusal("tokens", f"may use {counted(self._tokens.most, 'token')} a minute", wait)
        self._num_open += 1
        self._take(1, num_tokens)

    def end(self, estimated: int, taken: int) -> None:
        """Hear that a request ended.

        Parameters
        ----------
        estimated : the tokens that it began with.
        taken : that it really had.
        """
        self._num_open -= 1
        self._take(0, taken - estimated)

    def headers(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield what is left, as `RATE_HEADERS`."""
        for unit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                yield f"x-ratelimit-limit-{unit}", str(bucket.most)
                yield f"x-ratelimit-remaining-{unit}", str(max(int(bucket.level(now)), 0))
                yield f"x-ratelimit-reset-{unit}", f"{bucket.wait(bucket.most, now):.3f}s"

    def _take(self, num_requests: int, num_tokens: int) -> None:
        if self._requests is not None:
            self._requests.take(num_requests)
        if self._tokens is not None:
            self._tokens.take(num_tokens)


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)


def _refusal(limit: str, what: str, wait: float) -> ApiError:
    when = f"in {wait:.1f} s" if wait else "when one has ended"
    return ApiError(
        429,
        f"this API key {what}; try again {when}, or have the server's owner raise the limit (--slo-classes)",
        code="rate_limit_exceeded",
        headers=retry_headers(wait),
        details={"limit": limit},
    )


class RateLimits:
    """Refuses requests of API keys that have reached their limits. What is read (GET) is free.

    Parameters
    ----------
    app : the next application.
    limits : hash of an API key -> its limits.
    on_limited : called with the limit that a refused request has met (metrics).
    clock : seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Mapping[str, KeyLimits],
        on_limited: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._meters = {key: KeyMeter(each, clock()) for key, each in limits.items()}
        self._on_limited = on_limited
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        meter = None
        if scope["type"] == "http" and scope["method"] == "POST":
            context = context_of(scope)
            meter = self._meters.get(context.key_digest or "")
        if meter is None:
            await self._app(scope, receive, send)
        else:
            await self._metered(meter, context, scope, receive, send)

    async def _metered(
        self, meter: KeyMeter, context: HttpContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(dict(meter.headers(self._clock())))
            await send(message)

        length = Headers(scope=scope).get("content-length", "")
        estimated = max(int(length) // BYTES_PER_TOKEN, 1) if length.isdecimal() else 1
        try:
            meter.begin(estimated, self._clock())
        except ApiError as error:
            self._on_limited(error.details["limit"])
            context.error_code = error.code
            await error_response(error, scope["path"])(scope, receive, send_told)
            return
        try:
            await self._app(scope, receive, send_told)
        finally:
            was_served = context.status < 400
            taken = context.num_prompt_tokens + context.num_output_tokens
            meter.end(estimated, taken if was_served else 0)
