"""Tells who listens what the scheduler does. A fault in it ends the telling, and no step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol

from onbeat.core.request import Request
from onbeat.core.step import StepStats
from onbeat.perfmodel.correction import Drift
from onbeat.perfmodel.device_spec import known_device
from onbeat.perfmodel.logged_step import StepOrigin
from onbeat.vllm.keeper import NotedStep, PromiseKeeper, TakenStep
from onbeat.vllm.objectives import ID
from onbeat.vllm.surface import EngineRequest
from onbeat.vllm.telemetry import Event, added_message, hello_message, request_message, step_message

logger = logging.getLogger("onbeat.vllm")

P = ParamSpec("P")

_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Of weights, as records name them."""
_NOTHING: Mapping[str, float | str | None] = {}


class Sends(Protocol):
    """`telemetry.Publisher`, or what takes its place."""

    hello: Mapping[str, Any]

    def send(self, message: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def _harmless(tell: Callable[Concatenate[Teller, P], None]) -> Callable[Concatenate[Teller, P], None]:
    @wraps(tell)
    def guarded(teller: Teller, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if teller.is_broken:
            return
        try:
            tell(teller, *args, **kwargs)
        except Exception:
            teller.is_broken = True
            logger.exception("telemetry has failed, and tells nothing more; steps are planned as before")

    return guarded


class Teller:
    """Makes messages of what the plug-in sees. Each call costs what the batch is long, not what waits.

    Parameters
    ----------
    publisher : sends them.
    rank : of the scheduler.

    Attributes
    ----------
    is_broken : whether it has failed.
    """

    def __init__(self, publisher: Sends, *, rank: int) -> None:
        self.is_broken = False
        self._publisher, self._rank = publisher, rank
        self._num_steps = 0

    @_harmless
    def added(self, keeper: PromiseKeeper, request: EngineRequest, now: float) -> None:
        """Tell of a request that was taken."""
        state, slo_id = keeper.mirror.states[request.request_id], _slo_id(keeper, request)
        self._publisher.send(
            added_message(state.request, now, slo_id=slo_id, predicted_ttft=state.slo.predicted_ttft)
        )
        if state.slo.is_best_effort:
            self._publisher.send(request_message("relegated", state.request_id, now, slo_id=slo_id))

    @_harmless
    def refused(
        self,
        keeper: PromiseKeeper,
        request: EngineRequest,
        now: float,
        details: Mapping[str, float | str | None],
        asked: Request | None,
    ) -> None:
        """Tell of a request that is not served.

        Parameters
        ----------
        asked : what it asked for, where it was not taken; None of one that was, or that is wrong.
        """
        slo_id = _slo_id(keeper, request)
        whole = {} if asked is None else added_message(asked, now)
        refused = request_message("refused", request.request_id, now, slo_id=slo_id, **details)
        self._publisher.send(whole | refused)

    @_harmless
    def say_hello(self, message: Mapping[str, Any]) -> None:
        """Tell from now on that the scheduler is this (`hello`)."""
        self._publisher.hello = message

    @_harmless
    def request(
        self,
        event: Event,
        keeper: PromiseKeeper,
        request: EngineRequest,
        now: float,
        details: Mapping[str, float | str | None] = _NOTHING,
    ) -> None:
        """Tell what became of a request."""
        slo_id = _slo_id(keeper, request)
        self._publisher.send(request_message(event, request.request_id, now, slo_id=slo_id, **details))

    @_harmless
    def planned(self, keeper: PromiseKeeper, noted: NotedStep) -> None:
        """Tell who has joined the batch, who has left it and who is late."""
        for state in noted.begun:
            details = {"num_cached_tokens": state.num_cached_tokens}
            self._follow("scheduled", keeper, state.request_id, noted.end, details)
        for request_id in noted.preempted:
            self._follow("preempted", keeper, request_id, noted.end)
        for state in noted.relegated:
            self._follow("relegated", keeper, state.request_id, noted.end)

    def _follow(
        self,
        event: Event,
        keeper: PromiseKeeper,
        request_id: str,
        now: float,
        details: Mapping[str, float | str | None] = _NOTHING,
    ) -> None:
        request = keeper.mirror.requests.get(request_id)
        if request is not None:  # else it has ended meanwhile
            self.request(event, keeper, request, now, details)

    @_harmless
    def took(self, keeper: PromiseKeeper, taken: TakenStep, update_seconds: float) -> None:
        """Tell of a step whose results were taken.

        Parameters
        ----------
        update_seconds : that vLLM took for that.
        """
        noted = taken.noted
        self._publisher.send(
            step_message(
                self._stats(keeper, taken, update_seconds),
                rank=self._rank,
                planned=noted.begin,
                rows=noted.rows,
                counts=[taken.counts.get(name, 0) for name, _, _, samples in noted.rows if samples],
                preempted=noted.preempted,
                finished=taken.finished,
            )
        )

    def _stats(self, keeper: PromiseKeeper, taken: TakenStep, update_seconds: float) -> StepStats:
        noted, scheduler = taken.noted, keeper.surface.scheduler
        kv = keeper.mirror.kv
        drift: Drift | None = getattr(keeper.model, "drift", None)
        self._num_steps += 1
        num_looked_up = sum([state.num_tokens for state in noted.begun]) if kv.has_prefix_cache else 0
        return StepStats(
            step_id=self._num_steps,
            start=taken.start,
            end=taken.end,
            shape=noted.shape,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.requests) - len(scheduler.running),
            num_blocks=kv.num_blocks,
            num_used_blocks=kv.num_used_blocks,
            num_preemptions=len(noted.preempted),
            num_prefix_queries=num_looked_up,
            num_prefix_hits=sum([state.num_cached_tokens for state in noted.begun]),
            schedule_seconds=noted.end - noted.begin,
            update_seconds=update_seconds,
            predicted_seconds=noted.seconds,
            is_drifting=None if drift is None else drift.is_alarming,
            budget_seconds=noted.budget,
            budget_request_id=noted.budget_request_id,
            scheduler=keeper.state(),
        )

    def close(self) -> None:
        """Let go of what the process holds."""
        self._publisher.close()


def hello(keeper: PromiseKeeper, origin: StepOrigin, *, rank: int) -> dict[str, Any]:
    """Return what the scheduler's process says that it is.

    Parameters
    ----------
    origin : what vLLM says of itself.
    """
    config, kv = keeper.config, keeper.mirror.kv
    block_size = kv.block_size if kv.block_size % 16 == 0 else 16  # of which a simulation has multiples
    num_blocks = max(kv.num_blocks * kv.block_size, config.max_model_len)
    limits = replace(config, block_size=block_size, num_blocks=-(-num_blocks // block_size))
    engine = {
        "model_name": origin.model,
        "device": origin.device or known_device(origin.device_name or "") or origin.device_name,
        "device_name": origin.device_name,
        "dtype": _PRECISIONS.get(origin.dtype or "", origin.dtype),
        "vllm_version": origin.engine_version,
        "tensor_parallel": origin.tensor_parallel,
    }
    return hello_message(
        {
            "scheduler": asdict(limits),
            "engine": engine,
            "max_in_flight_steps": 1 + (origin.steps_ahead or 0),
            "step_time": None if keeper.known is None else keeper.known.as_json(),
        },
        rank=rank,
    )


def _slo_id(keeper: PromiseKeeper, request: EngineRequest) -> str | None:
    slo_id = keeper.surface.extra_args(request).get(ID)
    return slo_id if isinstance(slo_id, str) else None
