"""Which tenant has had how much service, to be fair between them."""

from __future__ import annotations

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Service in a prompt token that was computed (not found in the prefix cache), and in an output token."""
FULL_EXCESS = 8192.0
"""Weighted tokens that count as an excess of 1."""
MOST_IDLE_TENANTS = 4096
"""Remembered beside those that wait; of one that is forgotten the excess is forgiven."""


class TenantCounters:
    """Weighted tokens served to each tenant; the backlogged one with the least is served next.

    A tenant is *backlogged* while requests of it wait: from `on_arrival` to the `on_leave` of each, when it
    is first run, or gives up. One that comes back is lifted to the least counter of the backlogged ones (to
    that of the last one to leave where there is none), so that no tenant saves up service while away. If the
    least counter is always served, the service of any two tenants differs by at most 2 U over any time in
    which both are backlogged, U = max(w_in * longest prompt, w_out * tokens in the KV cache), and the server
    never idles while anybody waits. An unknown tenant stands at the level to which the last one was lifted.

    References
    ----------
    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4.
    """

    __slots__ = ("_backlogged_sum", "_counters", "_last_to_leave", "_level", "_num_waiting")

    def __init__(self) -> None:
        self._counters: dict[str | None, float] = {}
        self._num_waiting: dict[str | None, int] = {}
        """Requests of each backlogged tenant."""
        self._backlogged_sum = self._level = 0.0
        self._last_to_leave: str | None = None

    def __len__(self) -> int:
        """Return the number of tenants remembered."""
        return len(self._counters)

    def on_arrival(self, tenant: str | None) -> None:
        """Hear that a request of the tenant begins to wait."""
        waiting, counters = self._num_waiting, self._counters
        if tenant not in waiting:
            if waiting:
                self._level = min([counters[each] for each in waiting])
            else:
                self._level = max(self._level, self.counter(self._last_to_leave))
            counters[tenant] = max(self.counter(tenant), self._level)
            self._backlogged_sum += counters[tenant]
        waiting[tenant] = waiting.get(tenant, 0) + 1
        if len(counters) - len(waiting) > MOST_IDLE_TENANTS:
            self._counters = {each: counters[each] for each in waiting}

    def on_leave(self, tenant: str | None) -> None:
        """Hear that a request of the tenant waits no more."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            self._last_to_leave = tenant
            del self._num_waiting[tenant]
            # Sums of floats do not come back to 0 by themselves.
            self._backlogged_sum = self._backlogged_sum - self._counters[tenant] if self._num_waiting else 0.0

    def on_prefill(self, tenant: str | None, num_tokens: int) -> None:
        """Charge prompt tokens that are computed for the tenant."""
        self._charge(tenant, INPUT_WEIGHT * num_tokens)

    def on_output(self, tenant: str | None, num_tokens: int) -> None:
        """Charge output tokens."""
        self._charge(tenant, OUTPUT_WEIGHT * num_tokens)

    def counter(self, tenant: str | None) -> float:
        """Return the weighted tokens that stand against the tenant."""
        return self._counters.get(tenant, self._level)

    def share(self, tenant: str | None) -> float:
        """Return how far the tenant is ahead of the mean of the backlogged ones, in [-1, 1].

        1 is `FULL_EXCESS` weighted tokens more than the mean, or beyond; 0 for the only backlogged one.
        """
        num_backlogged = len(self._num_waiting)
        if num_backlogged <= (tenant in self._num_waiting):
            return 0.0
        excess = self.counter(tenant) - self._backlogged_sum / num_backlogged
        return max(-1.0, min(1.0, excess / FULL_EXCESS))

    def _charge(self, tenant: str | None, service: float) -> None:
        self._counters[tenant] = self.counter(tenant) + service
        if tenant in self._num_waiting:
            self._backlogged_sum += service
