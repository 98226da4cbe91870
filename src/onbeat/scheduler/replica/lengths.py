"""How long answers are, by those of late."""

from __future__ import annotations

from collections import deque
from math import ceil

from onbeat.core.errors import ConfigError

MIN_SAMPLES = 16
"""Requests that must have been longer before their history is asked."""

MAX_CLASSES = 64
"""Classes with a history of their own; further ones share that of all."""

_MARGIN = 1.5
"""Of the mean of the tokens to come, for how many there should be time."""

_PRIOR_MEAN = 512.0
"""Tokens; with shape 2, half of the answers end within 212 and nine in ten within 1,107."""


class OutputLengths:
    """Quantiles of the remaining output tokens, given that a request has come this far.

    The history of a request's class answers where at least 16 of its recent requests were longer than this
    one is so far, else that of all classes, else a prior. Of the n longer ones the k-th smallest is the
    answer, k = ceil(q (n + 1)), at most n: a new one from the same distribution ends by then with probability
    q or more. Lengths that were cut by `max_tokens` are learnt as they were served.

    The prior is a Lomax (Pareto II) distribution of shape 2 and a mean of 512 tokens, about that of answers
    in a chat: the longer one has been at it, the longer it will still take. Its q-quantile of the remaining
    tokens after s is (512 + s) ((1 - q)^(-1/2) - 1).

    Parameters
    ----------
    window : requests remembered, of each class and of all together.

    References
    ----------
    Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025: lengths sampled
    from recent ones that are longer than the request so far. Here a quantile of them, so that the same
    history gives the same decision.
    """

    __slots__ = ("_all", "_by_class", "_window")

    def __init__(self, window: int = 512) -> None:
        if window < MIN_SAMPLES:
            raise ConfigError(
                f"a window of output lengths must hold at least {MIN_SAMPLES} requests: {window}"
            )
        self._window = window
        self._all: deque[int] = deque(maxlen=window)
        self._by_class: dict[str | None, deque[int]] = {}

    def observe(self, slo_class: str | None, num_output_tokens: int) -> None:
        """Learn how long a request was that has ended by itself or by `max_tokens`.

        Parameters
        ----------
        slo_class : name of its class of objectives; None is a class of its own.
        """
        self._all.append(num_output_tokens)
        history = self._by_class.get(slo_class)
        if history is None and len(self._by_class) < MAX_CLASSES:
            history = self._by_class[slo_class] = deque(maxlen=self._window)
        if history is not None:
            history.append(num_output_tokens)

    def remaining(self, slo_class: str | None, num_output_tokens_so_far: int, *, q: float, limit: int) -> int:
        """Return the q-quantile of the tokens that a request will still generate.

        Parameters
        ----------
        num_output_tokens_so_far : 0 before the first.
        q : in (0, 1).
        limit : tokens that it may still generate (`max_tokens` and context), at least 1.

        Returns
        -------
        Tokens, in [1, limit].
        """
        if not 0 < q < 1:
            raise ConfigError(f"a quantile of output lengths must lie between 0 and 1, both excluded: {q}")
        if limit <= 1:
            return 1
        so_far = num_output_tokens_so_far
        longer = self._longer(slo_class, so_far)
        if not longer:
            num_left = ceil((_PRIOR_MEAN + so_far) * ((1 - q) ** -0.5 - 1)) or 1
        else:
            num_left = longer[min(ceil(q * (len(longer) + 1)), len(longer)) - 1] - so_far
        return min(num_left, limit)

    def expected(self, slo_class: str | None, so_far: int, *, limit: int) -> int:
        """Return how many tokens a request that has come this far is taken to generate still, to pace it.

        Half as many again as in the mean: it must end in time where it is somewhat longer, too.

        Parameters
        ----------
        limit : see `remaining`.
        """
        longer = self._longer(slo_class, so_far)
        mean = sum(longer) / len(longer) - so_far if longer else _PRIOR_MEAN + so_far
        return max(1, min(ceil(_MARGIN * mean), limit))

    def _longer(self, slo_class: str | None, so_far: int) -> list[int]:
        """Return lengths beyond that of a request so far, ascending; none where too few are known."""
        for history in (self._by_class.get(slo_class, ()), self._all):
            longer = [length for length in history if length > so_far]
            if len(longer) >= MIN_SAMPLES:
                return sorted(longer)
        return []
