"""How much service each tenant has had: virtual token counters, for fairness between tenants."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from onbeat.core.errors import ConfigError


class TenantCounters:
    """Weighted tokens served to each tenant; the backlogged one with the least is served next.

    A tenant is *backlogged* while requests of it wait: from `on_arrival` to the `on_leave` of each, when it
    is first run, or gives up. One that comes back is lifted to the least counter of the backlogged ones (to
    that of the last one to leave where there is none), so that no tenant saves up service while away. If the
    least counter is always served, the service of any two tenants differs by at most 2 U over any time in
    which both are backlogged, U = max(w_in * longest prompt, w_out * tokens in the KV cache), and the server
    never idles while anybody waits.

    The level to which a new tenant is lifted never falls, so a tenant that is not backlogged and lies at or
    below it can be forgotten without a trace; this is done once more than `max_idle_tenants` are known. Where
    that does not halve them, those with the least excess are forgiven it. An unknown tenant stands at the
    level.

    Parameters
    ----------
    input_weight, output_weight : service in one prompt token that was computed (not found in the prefix
        cache), and in one output token.
    full_excess : weighted tokens that count as an excess of 1 (`share`).
    max_idle_tenants : tenants remembered beside those that are backlogged.

    References
    ----------
    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4.
    """

    __slots__ = (
        "_backlogged_sum",
        "_counters",
        "_full_excess",
        "_heap",
        "_in_heap",
        "_input_weight",
        "_last_to_leave",
        "_level",
        "_max_idle_tenants",
        "_num_waiting",
        "_output_weight",
    )

    def __init__(
        self,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        *,
        full_excess: float = 8192.0,
        max_idle_tenants: int = 4096,
    ) -> None:
        if not min(input_weight, output_weight, full_excess, max_idle_tenants) > 0:
            values = f"{input_weight=}, {output_weight=}, {full_excess=}, {max_idle_tenants=}"
            raise ConfigError(f"weights, full excess and number of tenants must be positive: {values}")
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._full_excess = full_excess
        self._max_idle_tenants = max_idle_tenants
        self._counters: dict[str | None, float] = {}
        self._num_waiting: dict[str | None, int] = {}
        """Requests of each backlogged tenant."""
        self._backlogged_sum = 0.0
        self._level = 0.0
        """What a new tenant is lifted to, as of the last time that one came or left."""
        self._last_to_leave: str | None = None
        self._heap: list[tuple[tuple[float, bool, str], str | None]] = []
        """Backlogged tenants, and some that are so no more, each once: in the `_order` that it had. Counters
        only grow, so that the least one is found by bringing the head up to date."""
        self._in_heap: set[str | None] = set()

    def __len__(self) -> int:
        """Return the number of tenants remembered."""
        return len(self._counters)

    def on_arrival(self, tenant: str | None) -> None:
        """Hear that a request of the tenant begins to wait."""
        num_waiting = self._num_waiting.get(tenant, 0)
        if not num_waiting:
            self._raise_level()
            counter = self._counters[tenant] = max(self.counter(tenant), self._level)
            self._backlogged_sum += counter
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heappush(self._heap, (self._order(tenant), tenant))
        self._num_waiting[tenant] = num_waiting + 1
        if len(self._counters) - len(self._num_waiting) > self._max_idle_tenants:
            self._forget()

    def on_leave(self, tenant: str | None) -> None:
        """Hear that a request of the tenant waits no more."""
        num_waiting = self._num_waiting[tenant] - 1
        if num_waiting:
            self._num_waiting[tenant] = num_waiting
            return
        self._raise_level()
        self._last_to_leave = tenant
        del self._num_waiting[tenant]
        # Sums of floats do not come back to 0 by themselves.
        self._backlogged_sum = self._backlogged_sum - self._counters[tenant] if self._num_waiting else 0.0

    def on_prefill(self, tenant: str | None, num_tokens: int) -> None:
        """Charge prompt tokens that are computed for the tenant."""
        self._charge(tenant, self._input_weight * num_tokens)

    def on_output(self, tenant: str | None, num_tokens: int) -> None:
        """Charge output tokens."""
        self._charge(tenant, self._output_weight * num_tokens)

    def counter(self, tenant: str | None) -> float:
        """Return the weighted tokens that stand against the tenant."""
        return self._counters.get(tenant, self._level)

    def share(self, tenant: str | None) -> float:
        """Return how far the tenant is ahead of the mean of the backlogged ones, in [-1, 1].

        1 is `full_excess` weighted tokens more than the mean, or beyond; 0 for the only backlogged one.
        """
        num_backlogged = len(self._num_waiting)
        if num_backlogged <= (tenant in self._num_waiting):
            return 0.0
        excess = self.counter(tenant) - self._backlogged_sum / num_backlogged
        return max(-1.0, min(1.0, excess / self._full_excess))

    def _charge(self, tenant: str | None, service: float) -> None:
        self._counters[tenant] = self.counter(tenant) + service
        if tenant in self._num_waiting:
            self._backlogged_sum += service

    def _raise_level(self) -> None:
        if self._num_waiting:
            self._level = self._least_backlogged()
        else:
            self._level = max(self._level, self.counter(self._last_to_leave))

    def _least_backlogged(self) -> float:
        """Return the least counter of the backlogged tenants, of which there is one."""
        heap = self._heap
        while True:
            known, tenant = heap[0]
            if tenant not in self._num_waiting:
                heappop(heap)
                self._in_heap.remove(tenant)
            elif (order := self._order(tenant)) > known:
                heapreplace(heap, (order, tenant))
            else:
                return order[0]

    def _forget(self) -> None:
        """Forget tenants that are not backlogged: those at the level, and more until half are left."""
        idle = sorted(self._counters.keys() - self._num_waiting.keys(), key=self._order)
        num_surplus = len(idle) - self._max_idle_tenants // 2
        for place, tenant in enumerate(idle):
            if place >= num_surplus and self._counters[tenant] > self._level:
                break
            del self._counters[tenant]
        self._heap = [(self._order(tenant), tenant) for tenant in self._num_waiting]
        heapify(self._heap)
        self._in_heap = set(self._num_waiting)

    def _order(self, tenant: str | None) -> tuple[float, bool, str]:
        return (self._counters[tenant], tenant is not None, tenant or "")
