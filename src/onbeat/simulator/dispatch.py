"""Between the clients and the replicas: what a router is told."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.routers import Router, RoutingRequest
from onbeat.simulator.client import OfferedRequest
from onbeat.simulator.step_times import predict
from onbeat.workload.offered import OfferedLoad

_TYPICAL_BATCH = 32
"""Decodes that share a step, where the work of one of them is asked for."""


class WorkEstimate:
    """Predicts how long a request keeps a replica busy, from its prompt's length alone.

    Its output length is not known beforehand: the mean of the load stands for it. A decode costs
    its share of a step of `_TYPICAL_BATCH` of them.
    """

    def __init__(self, step_time: StepTimeModel, *, mean_output_tokens: float) -> None:
        self._step_time = step_time
        self._mean_output_tokens = mean_output_tokens

    def prefill(self, num_prompt_tokens: int) -> float:
        """Return the seconds of a step with this prompt alone."""
        shape = BatchShape()
        shape.add(0, num_prompt_tokens, samples=True)
        return predict(self._step_time, shape)

    def decode(self, num_prompt_tokens: int) -> float:
        """Return the request's share of the steps that generate the mean number of tokens."""
        context = num_prompt_tokens + int(self._mean_output_tokens / 2)
        shape = BatchShape(
            num_new_tokens=_TYPICAL_BATCH,
            num_sequences=_TYPICAL_BATCH,
            num_decodes=_TYPICAL_BATCH,
            decode_context_tokens=_TYPICAL_BATCH * (context + 1),
            num_lm_head_rows=_TYPICAL_BATCH,
        )
        return self._mean_output_tokens * predict(self._step_time, shape) / _TYPICAL_BATCH


class Dispatcher:
    """Asks a router where each request goes.

    Parameters
    ----------
    router : None where there is one replica only.
    work : predicts work, for a router that looks at it.
    """

    def __init__(self, router: Router | None, work: WorkEstimate | None = None) -> None:
        self._router = router
        self._work = work
        self._is_told = router is not None and not router.ignores_state

    def choose(self, offered: OfferedRequest) -> int:
        """Return the replica for a request that is sent now."""
        if self._router is None:
            return 0
        request = offered.request
        num_prompt_tokens = len(request.prompt_token_ids)
        routing = RoutingRequest(
            request.request_id,
            request.block_hashes or (),
            0.0 if self._work is None else self._work.prefill(num_prompt_tokens),
            0.0 if self._work is None else self._work.decode(num_prompt_tokens),
        )
        offered.routing = routing
        return self._router.route(routing)

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
    route = router.route
    return np.fromiter((route(RoutingRequest(str(index))) for index in range(len(load))), np.int32, len(load))
