"""Between the clients and the replicas: which replica runs a request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from onbeat.scheduler.cluster.routing import Router, RoutingRequest
from onbeat.scheduler.cluster.work import WorkEstimate, describe
from onbeat.simulator.client import OfferedRequest
from onbeat.workload.offered import OfferedLoad


class Dispatcher:
    """Asks a router where each request goes, which then runs there to its end.

    Parameters
    ----------
    router : None where there is one replica only.
    work : predicts work, for a router that looks at it.
    """

    def __init__(self, router: Router | None, work: WorkEstimate | None = None) -> None:
        self._router = router
        self._work = work
        self._is_told = router is not None and not router.ignores_state

    def send(self, offered: OfferedRequest) -> int:
        """Return the replica for a request that is sent now."""
        if self._router is None:
            return 0
        offered.routing = describe(offered.request, self._work)
        choice = self._router.route(offered.routing)
        assert choice is not None, "the last member never leaves"
        return choice.replica

    def on_first_tokens(self, replica: int, started: Iterable[OfferedRequest]) -> None:
        """Tell the router of prompts that are done."""
        if self._is_told:
            assert self._router is not None
            for offered in started:
                assert offered.routing is not None
                self._router.on_first_token(replica, offered.routing)

    def on_finish(self, replica: int, offered: OfferedRequest) -> None:
        """Tell the router of a request that ended, perhaps before its first token."""
        if self._is_told:
            assert self._router is not None
            assert offered.routing is not None
            if not offered.record.delivery_times:
                self._router.on_first_token(replica, offered.routing)
            self._router.on_finish(replica, offered.routing)


def assign(router: Router, load: OfferedLoad) -> NDArray[np.int32]:
    """Return the replica of each request of a load, by a router that ignores the replicas' state."""
    assert router.ignores_state

    def replica_of(index: int) -> int:
        choice = router.route(RoutingRequest(str(index)))
        assert choice is not None, "there is a member"
        return choice.replica

    return np.fromiter(map(replica_of, range(len(load))), np.int32, len(load))
