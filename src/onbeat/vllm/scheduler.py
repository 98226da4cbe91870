"""The scheduler class that vLLM loads: its own, with each step planned by our `slo` policy.

`SLOScheduler` is what `--scheduler-cls` names. Where another class has that place, `SLOSchedulerMixin` goes
before it: `class Mine(SLOSchedulerMixin, Other): ...`.
"""

from __future__ import annotations

import time
from typing import Any

from onbeat.vllm.plugin import Plugin
from onbeat.vllm.surface import EngineRequest

_Base: Any = object
"""vLLM's scheduler, behind it in the order of classes."""


class SLOSchedulerMixin(_Base):  # type: ignore[misc]
    """Plans the steps of the vLLM scheduler behind it, and has it carry them out.

    It never keeps vLLM from serving: where a plan fails, vLLM plans that step itself (`Plugin`).

    Attributes
    ----------
    clock, wall : monotonic seconds, and those of `Request.arrival_time`. A test may have others.
    """

    clock = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.onbeat = Plugin(self)

    def add_request(self, request: EngineRequest) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            waited = max(0.0, self.wall() - request.arrival_time)
            self.onbeat.add(request, self.clock() - waited, self.clock())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        plugin = self.onbeat
        throttles = bool(args and args[0]) or bool(kwargs.get("throttle_prefills"))
        imposed = None if throttles else plugin.plan(self.clock())
        if imposed is None:
            output = super().schedule(*args, **kwargs)
        else:
            with plugin.imposing(imposed):
                output = super().schedule(*args, **kwargs)
        plugin.note_step(output, imposed, self.clock())
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        self.onbeat.take(scheduler_output, self.clock())
        self.onbeat.add_refusals(outputs)
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        ended = super().finish_requests(request_ids, finished_status)
        self.onbeat.forget_ended(request_ids)
        return ended

    def has_requests(self) -> bool:
        return super().has_requests() or self.onbeat.has_work

    def shutdown(self) -> None:
        self.onbeat.close()
        super().shutdown()


def _make_scheduler() -> type:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    class SyncSLOScheduler(SLOSchedulerMixin, Scheduler):  # type: ignore[misc]
        """For steps one after another, where drafts come before the step that verifies them."""

    class SLOScheduler(SLOSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
        """vLLM's own scheduler, with steps planned by objectives."""

        def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is SLOScheduler and not vllm_config.scheduler_config.async_scheduling:
                return SyncSLOScheduler(vllm_config, *args, **kwargs)
            return super().__new__(cls)

    return SLOScheduler


def __getattr__(name: str) -> Any:
    """Return `SLOScheduler`, made when it is asked for: only then vLLM is imported."""
    if name != "SLOScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _make_scheduler()
    return made
