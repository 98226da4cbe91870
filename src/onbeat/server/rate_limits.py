"""Rate limits of API keys: how many requests and tokens a minute, and how many answers at once.

A bucket holds a minute's worth, and fills up within a minute. A request takes its tokens before they are
counted: at the door by the length of its body, then by its prompt and the most that its answer may have, and
in the end what it really had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from onbeat.core.errors import counted
from onbeat.server.errors import NEVER_RETRY, ApiError, retry_headers
from onbeat.server.slo_defaults import KeyLimits

BYTES_PER_TOKEN = 4
"""Of a body whose tokens nobody has counted yet; English text has about as many."""
MINUTE = 60.0
USUAL_TOKENS = 256.0
"""Of an answer to a request that states no `max_tokens`, before the key has had any."""
_LEARNING = 1 / 8
"""By how much each such answer moves the mean."""
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}"
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
"""Of answers to keys with limits, as OpenAI names them."""


class TokenBucket:
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
        """Take so much, or put it back where it is below 0; the debt is a minute's worth at most."""
        self._level = max(self._level - amount, -float(self.most))


class KeyMeter:
    """What the requests of an API key have taken of its limits.

    Parameters
    ----------
    limits : of the key.
    now : seconds.
    on_limited : called with the limit that a request has met (metrics).
    """

    def __init__(self, limits: KeyLimits, now: float, on_limited: Callable[[str], None]) -> None:
        self.requests = _bucket(limits.requests_per_minute, now)
        self.tokens = _bucket(limits.tokens_per_minute, now)
        self.most_open = limits.max_open_requests
        self.num_open = 0
        """Answers that are being made."""
        self.usual_tokens = USUAL_TOKENS
        """Of an answer whose request stated no `max_tokens`."""
        self._on_limited = on_limited

    def headers(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield what is left, as `RATE_HEADERS`."""
        for unit, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                yield f"x-ratelimit-limit-{unit}", str(bucket.most)
                yield f"x-ratelimit-remaining-{unit}", str(max(int(bucket.level(now)), 0))
                yield f"x-ratelimit-reset-{unit}", f"{bucket.wait(bucket.most, now):.3f}s"

    def refusal(self, limit: str, what: str, wait: float) -> ApiError:
        """Return what a request gets over a limit; 0 waits for another's end, and infinity for nothing."""
        self._on_limited(limit)
        when = f"try again in {wait:.1f} s" if wait else "try again when one has ended"
        if wait == math.inf:
            when = "ask for less, such as by max_tokens or n"
        return ApiError(
            429,
            f"this API key {what}; {when}, or have the server's owner raise the limit (--slo-classes)",
            code="rate_limit_exceeded",
            headers=NEVER_RETRY if wait == math.inf else retry_headers(wait),
            details={"limit": limit},
        )


def _bucket(per_minute: int | None, now: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, now)


class KeyAllowance:
    """What one HTTP request has of its key's limits, from the door to its end.

    Parameters
    ----------
    meter : of the key.
    num_bytes : of the body, as announced.
    clock : seconds.

    Raises
    ------
    ApiError : a limit is reached (429); so may the methods, and what it has stays as it was.
    """

    def __init__(self, meter: KeyMeter, num_bytes: int, clock: Callable[[], float]) -> None:
        self._meter, self._clock = meter, clock
        self._num_tokens = self._num_choices = 0
        self._learns = False
        if meter.requests is not None and (wait := meter.requests.wait(1, clock())):
            raise meter.refusal(
                "requests", f"may send {counted(meter.requests.most, 'request')} a minute", wait
            )
        self.take_body(num_bytes)
        if meter.requests is not None:
            meter.requests.take(1)

    def take_body(self, num_bytes: int) -> None:
        """Take the tokens of a body by its length: a minute's worth at most, as nobody has counted them."""
        self._num_body_tokens = max(num_bytes // BYTES_PER_TOKEN, 1)
        self._take(0, self._num_body_tokens, 1)

    def take_answers(
        self, num_prompt_tokens: int, max_tokens: Sequence[int] = (), *, is_stated: bool = True
    ) -> None:
        """Take what a request may need, now that its prompt is counted, before anything runs.

        Parameters
        ----------
        max_tokens : most output tokens of each choice; none where nothing is generated.
        is_stated : whether the caller says so many; else it is what fits, and the usual length is taken.
        """
        self._learns = not is_stated
        usual = math.ceil(self._meter.usual_tokens)
        num_tokens = num_prompt_tokens + sum(
            max_tokens if is_stated else (min(usual, each) for each in max_tokens)
        )
        self._take(num_tokens if is_stated else num_prompt_tokens, num_tokens, max(len(max_tokens), 1))

    def _take(self, sure: int, num_tokens: int, num_choices: int) -> None:
        """Have tokens, of which some are sure, and choices in place of those that it has."""
        meter, most_open = self._meter, self._meter.most_open
        num_others = meter.num_open - self._num_choices
        if most_open is not None and num_others + num_choices > most_open:
            asks = (
                f"has {num_others} open, asks for {counted(num_choices, 'answer')} and may have {most_open}"
            )
            never = math.inf if num_choices > most_open else 0.0
            raise meter.refusal("open_requests", f"{asks} at once", never)
        if (bucket := meter.tokens) is not None:
            wanted = max(sure, min(num_tokens, bucket.most))  # a guess alone keeps nobody out for ever
            wait = math.inf
            if wanted <= 2 * bucket.most:
                wait = bucket.wait(min(wanted, bucket.most) - self._num_tokens, self._clock())
            if wait and wanted > self._num_tokens:
                what = f"may use {counted(bucket.most, 'token')} a minute, and this request up to {wanted}"
                raise meter.refusal("tokens", what, wait)
            bucket.take(wanted - self._num_tokens)
            self._num_tokens = wanted
        meter.num_open, self._num_choices = num_others + num_choices, num_choices

    def end(self, status: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Settle: what was used, or of what was refused for its own fault the reading of its body."""
        meter, num_used = self._meter, num_prompt_tokens + num_output_tokens
        is_ours = status == 429 or status >= 500
        if self._learns and num_used and status < 400:
            mean = num_output_tokens / self._num_choices
            meter.usual_tokens += (mean - meter.usual_tokens) * _LEARNING
        meter.num_open -= self._num_choices
        if meter.tokens is not None:
            meter.tokens.take((0 if is_ours else num_used or self._num_body_tokens) - self._num_tokens)
